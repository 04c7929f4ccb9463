"use strict";
// Draw the curves of a recording. Every number comes from the embedded data.
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let data = null;

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function draw(figure, device) {
  const curve = device.curve, last = Math.max(curve.moments[curve.moments.length - 1] || 1, 1);
  const lines = [["predicted peak", data.predicted_bytes], ["budget", data.budget_bytes]].filter(([, bytes]) => bytes !== null);
  const [name, scale] = unit(Math.max(device.peak_reserved_bytes, ...lines.map(([, bytes]) => bytes)));
  const line = (title, x, bytes, color, dash) => ({ type: "scatter", mode: "lines", name: title, x, y: bytes.map((b) => b / scale),
    line: { width: 1.5, color, dash, shape: "hv" }, text: bytes.map((b) => `${title} ${size(b)}`), hovertemplate: "%{text}<extra></extra>" });
  const traces = [line("reserved", curve.moments, curve.reserved, css("--quiet"), "solid"),
    line("allocated", curve.moments, curve.allocated, css("--accent"), "solid")];
  if (device.predicted.moments.length) traces.push(line("predicted", device.predicted.moments, device.predicted.allocated, css("--recompute"), "dot"));
  // This prediction counts operators and the recording allocations: both are drawn over the whole width.
  if (data.predicted.length) traces.push(line("predicted", data.predicted.map((_, at) => (at * last) / Math.max(data.predicted.length - 1, 1)), data.predicted, css("--recompute"), "dot"));
  const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false };
  Plotly.react(figure, traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 14, t: 16, b: 46 }, hovermode: "x",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: css("--quiet") },
    legend: { orientation: "h", y: 1.08 }, xaxis: { ...axis, title: { text: "allocations, in order" }, tickformat: ",d" },
    yaxis: { ...axis, title: { text: name }, rangemode: "tozero" },
    shapes: lines.map(([, bytes]) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: bytes / scale, y1: bytes / scale, line: { width: 1.5, color: css("--ink"), dash: "dash" } })),
    annotations: lines.map(([text, bytes]) => ({ text: `${text} ${size(bytes)}`, xref: "paper", x: 0.995, xanchor: "right", y: bytes / scale, yanchor: "bottom", showarrow: false, font: { color: css("--ink") } })),
  }, { displayModeBar: false, responsive: true });
}

const drawAll = () => data.devices.forEach((device, place) => draw(byId(`memory-${place}`), device));

(async () => {
  const [text, library] = await Promise.all([unpacked("data"), unpacked("plotly")]);
  const script = document.createElement("script");
  script.textContent = library;
  document.head.append(script);
  data = JSON.parse(text);
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.documentElement.dataset.ready = "yes";
})();
