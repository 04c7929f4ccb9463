"use strict";
// The two charts. Colours come from the style sheet, so light and dark themes are defined in one place.
const WORDS = {
  parameters: "Parameters", buffers: "Buffers", optimizer: "Optimizer state", gradients: "Gradients",
  outside: "Outside the blocks", saved: "Saved activations", replayed: "Replayed", transfers: "Offload transfers",
  temporary: "Temporary",
};
const STACK = Object.keys(WORDS);
const VARIABLE = { saved: "--save", replayed: "--recompute", transfers: "--offload" };
const PATTERN = { replayed: "/", transfers: "x" };

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (category) => css(VARIABLE[category] || `--${category}`);
const short = (op) => op.replace(/^aten\./, "").replace(/\.default\b/, "");

const title = (text) => ({ text, font: { size: 12.5 } });

function layout(more) {
  const narrow = window.innerWidth < 620;
  const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, fixedrange: narrow, ticks: "" };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    dragmode: narrow ? false : "zoom", margin: { l: 56, r: 14, t: 16, b: 46 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: css("--quiet") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--quiet"), align: "left",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: css("--ink") } },
    ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

const OPTIONS = { displayModeBar: false, responsive: true, doubleClick: "reset" };

function where(label) {
  const path = [label.block, label.module].filter(Boolean).join(".");
  return `${label.phase}, ${path || "outside the blocks"}`;
}

// Bytes of every category at a drawn moment, in the order of the stack.
function bytesAt(data, curve, at) {
  return STACK.map((c) => [c, c in curve.series ? curve.series[c][at] : data.constant_bytes[c] || 0]).filter(([c]) =>
    c in curve.series || c in data.constant_bytes);
}

// The unit for the duration of a step and its divisor.
function clock(curve) {
  return curve.total_seconds >= 1 ? ["s", 1] : curve.total_seconds >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
}

function drawMemory(figure, data, plan, axis) {
  const curve = plan.curve, [name, scale] = unit(plan.peak_bytes), byTime = axis === "time";
  const [tick, last] = byTime ? clock(curve) : ["", curve.num_moments];
  const x = curve.moments.map((moment, at) => (byTime ? curve.seconds[at] / last : moment + 1));
  const backward = byTime ? curve.backward_seconds / last : curve.backward + 1, end = byTime ? curve.end_seconds / last : curve.end + 1;
  const whole = byTime ? curve.total_seconds / last : curve.num_moments, start = byTime ? 0 : 1;
  const total = curve.moments.map((_, at) => bytesAt(data, curve, at).reduce((sum, [, bytes]) => sum + bytes, 0));
  const traces = bytesAt(data, curve, 0).map(([c]) => ({
    type: "scatter", mode: "lines", stackgroup: "all", name: WORDS[c], x, hoverinfo: "skip",
    y: curve.moments.map((_, at) => (c in curve.series ? curve.series[c][at] : data.constant_bytes[c]) / scale),
    line: { width: 0, color: colour(c), shape: "hv" }, fillcolor: colour(c),
    ...(PATTERN[c] ? { fillpattern: { shape: PATTERN[c], bgcolor: colour(c), fgcolor: css("--card"), size: 6, solidity: 0.18 } } : {}),
  }));
  traces.push({
    type: "scatter", mode: "lines", name: "Alive", x, y: total.map((bytes) => bytes / scale),
    line: { width: 1, color: css("--ink"), shape: "hv" }, hovertemplate: "%{text}<extra></extra>",
    text: x.map((_, at) => {
      const label = data.labels[curve.labels[at]];
      const parts = bytesAt(data, curve, at).filter(([, bytes]) => bytes).reverse().map(([c, bytes]) => `${WORDS[c]}: ${size(bytes)}`);
      return `<b>${size(total[at])}</b> after ${short(label.op)}<br>${where(label)}<br>operator ${count(curve.moments[at] + 1)} of ${count(curve.num_moments)}, at ${duration(curve.seconds[at])}<br>${parts.join("<br>")}`;
    }),
  });
  const top = data.labels[curve.labels[curve.peak]], left = x[curve.peak] > whole / 2;
  traces.push({ type: "scatter", mode: "markers", x: [x[curve.peak]], y: [total[curve.peak] / scale], hoverinfo: "skip",
    marker: { size: 9, color: css("--card"), line: { width: 2, color: css("--ink") } } });
  const most = Math.max(plan.peak_bytes, plan.budget_bytes) / scale;
  const rule = (x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { width: 1, color: css("--quiet"), dash: "dot" } });
  const phase = (text, from, to) => ({ text, x: (from + to) / 2, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, font: { size: 12 } });
  Plotly.react(figure, traces, layout({
    hovermode: "x", margin: { l: 56, r: 14, t: 30, b: 46 },
    xaxis: byTime ? { title: title(`time by the roofline, ${tick}`), range: [start, whole] }
      : { title: title("operators, in the order in which they run"), range: [start, whole], tickformat: ",d" },
    yaxis: { title: title(name), range: [0, most * 1.24] },
    shapes: [rule(backward), rule(end),
      { type: "line", xref: "paper", x0: 0, x1: 1, y0: plan.budget_bytes / scale, y1: plan.budget_bytes / scale, line: { width: 1.5, color: css("--ink"), dash: "dash" } }],
    annotations: [phase("forward", start, backward), phase("backward", backward, end),
      { text: `budget ${size(plan.budget_bytes)}`, xref: "paper", x: left ? 0.005 : 0.995, y: plan.budget_bytes / scale, xanchor: left ? "left" : "right", yanchor: "bottom", showarrow: false, font: { color: css("--ink"), size: 12 } },
      { text: `peak ${size(plan.peak_bytes)}${window.innerWidth < 620 ? "" : `<br>${short(top.op)}`}`, x: x[curve.peak], y: total[curve.peak] / scale, ax: left ? -16 : 16, ay: -34,
        align: "left", xanchor: left ? "right" : "left", arrowcolor: css("--ink"), arrowwidth: 1, arrowhead: 0, bgcolor: css("--card"), bordercolor: css("--line"), borderpad: 4, font: { color: css("--ink"), size: 12 } }],
  }), OPTIONS);
}

const letter = (nth) => String.fromCharCode(65 + nth);

function drawFrontier(figure, data, chosen, choose) {
  const [name, scale] = unit(Math.max(...data.plans.map((p) => p.peak_bytes)));
  const plan = data.plans[chosen], ratio = (p) => p.step_time_ratio, peak = (p) => p.peak_bytes / scale;
  const told = (p, what) => `<b>${what}</b><br>peak ${size(p.peak_bytes)}<br>step ${times(p.step_time_ratio)}`;
  const traces = [
    { type: "scatter", mode: "lines+markers", x: data.plans.map(peak), y: data.plans.map(ratio), line: { shape: "hv", width: 1.5, color: css("--accent") },
      marker: { size: 8, color: css("--accent") }, text: data.plans.map((p, n) => told(p, `plan ${n + 1} of ${data.plans.length}`)), hovertemplate: "%{text}<extra></extra>" },
    { type: "scatter", mode: "markers+text", x: data.modes.map(peak), y: data.modes.map(ratio), text: data.modes.map((_, n) => letter(n)),
      textfont: { size: 11, color: css("--ink") }, hovertext: data.modes.map((m) => told(m, m.name)), hovertemplate: "%{hovertext}<extra></extra>",
      marker: { size: 19, color: css("--card"), line: { width: 1.5, color: css("--quiet") } } },
    { type: "scatter", mode: "markers", x: [peak(plan)], y: [ratio(plan)], hoverinfo: "skip",
      marker: { size: 16, color: css("--accent"), line: { width: 1.5, color: css("--card") } } },
  ];
  const shown = [...data.plans, ...data.modes].map(peak), low = Math.min(...shown), high = Math.max(...shown), pad = (high - low) * 0.05 || 1;
  const device = data.device_bytes / scale, inside = device > low - pad && device < high + pad;
  Plotly.react(figure, traces, layout({
    xaxis: { title: title(`peak, ${name}`), range: [low - pad, high + pad] }, yaxis: { title: title("step time, × saving everything"), tickformat: ".2f" },
    shapes: inside ? [{ type: "line", x0: device, x1: device, y0: 0, y1: 1, yref: "paper", line: { width: 1.5, color: css("--ink"), dash: "dash" } }] : [],
    annotations: inside ? [{ text: `the device has ${size(data.device_bytes)}`, x: device, y: 1, yref: "paper", xanchor: "left", yanchor: "top", showarrow: false, xshift: 5, font: { color: css("--ink"), size: 12 } }] : [],
  }), OPTIONS);
  figure.removeAllListeners("plotly_click");
  figure.on("plotly_click", (event) => { if (event.points[0].curveNumber === 0) choose(event.points[0].pointNumber); });
}
