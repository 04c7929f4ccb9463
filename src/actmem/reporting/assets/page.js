"use strict";
// Show one of the embedded plans. Nothing here computes a plan, and nothing is interpolated.
const byId = (id) => document.getElementById(id);
const state = { plan: 0, group: 0, axis: "operators" };
let data = null, asked = 0;

// The decompressed text of an element.
async function unpacked(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function summary(plan) {
  const saved = data.modes.find((mode) => mode.name === "save everything"), full = data.modes.find((mode) => mode.name === "full");
  const field = (key, text) => number(key, plan[key], text);
  const wanted = number("asked_bytes", data.asked_bytes, size(data.asked_bytes));
  const less = plan.headroom && plan.asked ? [" (", field("budget_bytes", size(plan.budget_bytes)), ` after ${(100 * plan.headroom).toFixed(0)} % for the allocator)`] : [];
  const within = plan.asked ? [", within the requested ", wanted, ...less]
    : [", within a budget of ", field("budget_bytes", size(plan.budget_bytes)), " (requested: ", wanted, ")"];
  byId("headline").replaceChildren("The step peaks at ", field("peak_bytes", size(plan.peak_bytes)), ...within,
    ", and takes ", field("step_time_ratio", times(plan.step_time_ratio)), " the time of saving everything.");
  const faster = 1 - plan.step_time_ratio / full.step_time_ratio;
  const words = [];
  if (saved.peak_bytes > plan.peak_bytes) words.push(`Saving everything would need ${size(saved.peak_bytes)}. `);
  if (faster > 0) words.push(`Recomputing every block would make the step ${times(full.step_time_ratio)} as long: this plan takes ${(100 * faster).toFixed(1)} % less. `);
  const proof = plan.gap > 0
    ? ["It is proven that no plan within this budget is below ", field("bound", times(plan.bound)), ": at most ", field("gap", percent(plan.gap)), " of a step is left to gain."]
    : ["It is proven that no plan within this budget is faster (bound ", field("bound", times(plan.bound)), ", gap ", field("gap", percent(plan.gap)), ")."];
  byId("certificate").replaceChildren(...words, ...proof);
  byId("peak").replaceChildren(...plan.peak_words.map((sentence) => make("p", {}, sentence)));
  const tile = (name, value, more) => [make("dt", {}, name), make("dd", {}, value, make("small", {}, more))];
  const tiles = [
    tile("Predicted peak", field("peak_bytes", size(plan.peak_bytes)), field("peak_at", `after ${short(plan.peak_at)}`)),
    tile("Step time", field("step_time_ratio", times(plan.step_time_ratio)), `of ${duration(data.step_seconds)} with everything saved`),
    tile("Recomputed", field("replay_seconds", duration(plan.replay_seconds)), make("span", {}, field("num_replayed", count(plan.num_replayed)), " operators, ", field("replayed_flops", flops(plan.replayed_flops)))),
    tile("Alive for backward", field("saved_bytes", size(plan.saved_bytes)), "when backward begins, beyond what is always alive"),
  ];
  if (data.offload || plan.sent_bytes) tiles.push(tile("Offloaded", field("sent_bytes", size(plan.sent_bytes)), "copied out and fetched back per step"));
  byId("tiles").replaceChildren(...tiles.map((parts) => make("div", {}, ...parts)));
}

function modes(plan) {
  byId("modes").tBodies[0].replaceChildren(...data.modes.map((mode, n) => {
    const time = plan.step_time_ratio / mode.step_time_ratio - 1, fits = mode.peak_bytes <= plan.budget_bytes;
    const against = [signed(plan.peak_bytes - mode.peak_bytes), make("small", {}, `${time < 0 ? "−" : "+"}${Math.abs(100 * time).toFixed(1)} % time`)];
    return make("tr", {}, make("td", {}, make("span", { class: "letter" }, letter(n))),
      make("td", {}, mode.name, make("small", { class: fits ? "" : "over" }, fits ? "within this budget" : "over this budget")),
      make("td", { class: "num" }, number(`modes.${n}.peak_bytes`, mode.peak_bytes, size(mode.peak_bytes)),
        make("small", {}, "step ", number(`modes.${n}.step_time_ratio`, mode.step_time_ratio, times(mode.step_time_ratio)))),
      make("td", { class: "num" }, ...against));
  }));
}

function breakdown(plan) {
  const parts = bytesAt(data, plan.curve, plan.curve.peak), table = byId("breakdown"), column = unit(plan.peak_bytes);
  table.tBodies[0].replaceChildren(...parts.reverse().map(([c, bytes]) => {
    const swatch = make("span", { class: `swatch ${c}`, style: `background-color:var(${VARIABLE[c] || `--${c}`})` });
    return make("tr", { "data-category": c, "data-bytes": bytes }, make("td", {}, swatch, WORDS[c]), make("td", { class: "num" }, sizeIn(bytes, column)));
  }));
  table.tFoot.replaceChildren(make("tr", {}, make("th", { scope: "row" }, "Peak"), make("td", { class: "num" }, sizeIn(plan.peak_bytes, column))));
  const curve = plan.curve, op = data.labels[curve.labels[curve.peak]];
  const drawn = curve.bucket === 1 ? `All ${count(curve.num_moments)} operators are drawn.`
    : `The step runs ${count(curve.num_moments)} operators. The highest and lowest of every ${curve.bucket} consecutive moments are drawn; the peak is exact.`;
  byId("note-memory").textContent = `All live bytes by category. The peak comes after ${short(op.op)} (${where(op)}). ${drawn}`;
}

function measured() {
  if (!byId("measured")) return;
  const shown = { bytes: size, flops, count };
  const rows = data.measured.map((row, n) => {
    const by = row.measured - row.predicted, text = by === 0 ? "equal" : `${by < 0 ? "−" : "+"}${shown[row.unit](Math.abs(by))}`;
    return make("tr", {}, make("td", {}, row.name), ...["predicted", "measured"].map((f) => make("td", { class: "num" }, number(`measured.${n}.${f}`, row[f], shown[row.unit](row[f])))), make("td", { class: "num" }, text));
  });
  const head = make("tr", {}, ...["Figure", "Predicted", "Measured", "Difference"].map((name, n) => make("th", { scope: "col", class: n ? "num" : "" }, name)));
  byId("measured").replaceChildren(make("p", { class: "note" }, `One step under the requested plan, whose peak is ${size(data.plans[asked].peak_bytes)}.`),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Predicted and measured" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
}

function block() {
  if (!byId("panel")) return;
  const plan = data.plans[state.plan];
  state.group = Math.min(state.group, Math.max(0, plan.groups.length - 1));
  drawTabs(data, plan, state.group, (n) => { state.group = n; block(); });
  drawBlock(data, plan, state.group);
}

function show(n) {
  state.plan = n;
  const plan = data.plans[n], slider = byId("budget");
  slider.value = n;
  slider.setAttribute("aria-valuetext", `${size(plan.budget_bytes)}, step ${times(plan.step_time_ratio)}`);
  byId("chosen").replaceChildren(number("budget_bytes", plan.budget_bytes, size(plan.budget_bytes)));
  byId("which").textContent = `Plan ${n + 1} of ${data.plans.length}, each solved${plan.asked ? ": the requested plan" : ""}. Peak ${size(plan.peak_bytes)}, step ${times(plan.step_time_ratio)}.`;
  byId("asked").disabled = plan.asked;
  warn(plan);
  summary(plan);
  modes(plan);
  breakdown(plan);
  block();
  byId("plan").textContent = plan.plan_json;
  byId("copied").textContent = "";
  charts();
}

// Warn if a plan does not fit the device, or leaves the allocator less headroom than requested.
function warn(plan) {
  const room = data.plans[asked].headroom, over = plan.peak_bytes - data.device_bytes;
  const text = over > 0 ? `This plan does not fit: its peak is ${size(over)} above the ${size(data.device_bytes)} of ${data.device_name}.`
    : plan.peak_bytes > (1 - room) * data.device_bytes ? `This plan leaves the allocator ${size(-over)} of the ${size(data.device_bytes)} of ${data.device_name}, less than ${(100 * room).toFixed(0)} %.` : "";
  byId("warning").textContent = text;
  byId("warning").hidden = !text;
}

function charts() {
  drawFrontier(byId("frontier"), data, state.plan, show);
  drawMemory(byId("memory"), data, data.plans[state.plan], state.axis);
}

function isDark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function theme() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  byId("theme").setAttribute("aria-pressed", isDark());
  byId("theme").setAttribute("aria-label", isDark() ? "Dark colours are on. Switch to light." : "Light colours are on. Switch to dark.");
}

async function copy() {
  const text = data.plans[state.plan].plan_json;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Some browsers deny clipboard access to local files: fall back to copying a selection.
    const area = make("textarea", {});
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    byId("copy").focus();
  }
  byId("copied").textContent = "Copied.";
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    byId("headline").textContent = "This browser is too old to unpack the page. Open it in Firefox 113, Safari 16.4, Chrome 80 or later.";
    return;
  }
  const [text, library] = await Promise.all([unpacked("data"), unpacked("plotly")]);
  document.head.append(Object.assign(document.createElement("script"), { textContent: library }));
  data = JSON.parse(text);
  asked = data.plans.findIndex((plan) => plan.asked);
  const few = data.plans.length < data.num_wanted;
  byId("note-frontier").textContent = `${data.plans.length} different plans, each the fastest found for its budget and for every budget up to the next plan.` +
    (few ? ` ${data.num_wanted} were wanted: ${data.exhausted ? "no other budget yields another plan" : "more budgets were tried and yielded no others"}.` : "") + " Circles with letters are named modes. Click a point or move the budget slider to choose a plan.";
  byId("budget").addEventListener("input", (event) => show(Number(event.target.value)));
  byId("asked").addEventListener("click", () => show(asked));
  byId("copy").addEventListener("click", copy);
  byId("theme").addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; theme(); charts(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { theme(); charts(); });
  for (const choice of document.querySelectorAll("input[name=axis]"))
    choice.addEventListener("change", () => { state.axis = choice.value; charts(); });
  theme();
  measured();
  show(asked);
  document.documentElement.dataset.ready = "yes";
}

start();
