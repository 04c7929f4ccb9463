"use strict";
// The block: its operators in order, with the plan's decision for each.
const DECISIONS = { s: ["s", "save"], r: ["r", "recompute"], o: ["o", "offload"], "-": ["n", "free"] };

function tabName(data, group) {
  const layers = `${group.num_layers === 1 ? "layer" : "layers"} ${group.layers.replaceAll(",", ", ").replace(/(\d+):(\d+)/g, (_, a, b) => (b - a === 2 ? `${a}, ${b - 1}` : `${a}–${b - 1}`))}`;
  return data.kinds.length > 1 ? `${data.kinds[group.kind].name}: ${layers}` : layers;
}

function drawTabs(data, plan, chosen, choose) {
  const tabs = plan.groups.map((group, n) => {
    const tab = make("button", { role: "tab", type: "button", id: `tab-${n}`, "aria-controls": "panel", "aria-selected": n === chosen, tabindex: n === chosen ? 0 : -1 }, tabName(data, group));
    tab.addEventListener("click", () => choose(n));
    tab.addEventListener("keydown", (event) => {
      const last = plan.groups.length - 1;
      const to = { ArrowRight: n === last ? 0 : n + 1, ArrowLeft: n === 0 ? last : n - 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(to);
      document.getElementById(`tab-${to}`).focus();
    });
    return tab;
  });
  document.getElementById("tabs").replaceChildren(...tabs);
}

function drawBlock(data, plan, chosen) {
  const group = plan.groups[chosen], panel = document.getElementById("panel");
  panel.setAttribute("aria-labelledby", `tab-${chosen}`);
  if (!group) return panel.replaceChildren("The profile has no blocks.");
  const kind = data.kinds[group.kind], most = Math.max(1, ...kind.operators.map((o) => o.num_bytes));
  const key = (field) => `groups.${chosen}.${field}`;
  const head = make("p", { class: "panel-head" },
    make("span", {}, number(key("num_layers"), group.num_layers, count(group.num_layers)), group.num_layers === 1 ? " layer, " : " equal layers, each of them:"),
    make("span", {}, "saves ", make("b", {}, number(key("saved_bytes"), group.saved_bytes, size(group.saved_bytes)))),
    make("span", {}, "replays for ", make("b", {}, number(key("replay_seconds"), group.replay_seconds, duration(group.replay_seconds)))));
  if (group.sent_bytes) head.append(make("span", {}, "offloads ", make("b", {}, number(key("sent_bytes"), group.sent_bytes, size(group.sent_bytes)))));
  const ribbon = make("div", { class: "ribbon", "aria-hidden": "true" }), list = make("ol", { class: "ops" });
  let module = null;
  kind.operators.forEach((operator, n) => {
    const [style, word] = DECISIONS[group.decisions[n]];
    const part = make("span", { class: style, style: `flex-grow:${operator.num_bytes}`, title: `${operator.module} ${short(operator.op)}: ${word}, ${size(operator.num_bytes)}` });
    ribbon.append(part);
    const given = n === 0, name = given ? "" : operator.module || "the block itself";
    if (!given && name !== module) list.append(make("li", { class: "module" }, name));
    module = name;
    const row = make("li", { class: `op ${style}`, "data-decision": word });
    const track = make("span", { class: `track ${style}` }, make("span", { class: "bar", style: `width:${(100 * operator.num_bytes) / most}%` }));
    row.append(make("span", { class: `badge ${style}` }, word), make("span", { class: "name", title: operator.op }, given ? "block inputs" : short(operator.op)), track,
      make("span", { class: "num", title: `${count(operator.num_bytes)} bytes` }, size(operator.num_bytes)),
      make("span", { class: "num", title: flops(operator.flops) }, given ? "" : duration(operator.seconds)));
    list.append(row);
  });
  const views = kind.num_views ? make("p", { class: "note" }, `${count(kind.num_views)} more operators are views of other results. They take no memory.`) : "";
  panel.replaceChildren(head, ribbon, list, views);
}
