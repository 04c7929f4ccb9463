"use strict";
// Draw the peak of each stage, by category. Every number comes from the embedded data.
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let data = null;

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function draw() {
  const [name, scale] = unit(Math.max(data.budget_bytes, ...data.stages.map((stage) => stage.peak_bytes)));
  const places = data.stages.map((stage) => `place ${stage.place}`);
  const traces = data.categories.map((category, at) => ({ type: "bar", name: category, x: places, y: data.stages.map((stage) => stage.parts[at] / scale),
    text: data.stages.map((stage) => `${category} ${size(stage.parts[at])}`), textposition: "none", hovertemplate: "%{text}<extra></extra>" }))
    .filter((trace) => trace.y.some((height) => height > 0));
  const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false };
  Plotly.react(byId("stages"), traces, {
    barmode: "stack", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 14, t: 16, b: 46 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: css("--quiet") },
    legend: { orientation: "h", y: 1.12 }, xaxis: axis, yaxis: { ...axis, title: { text: name }, rangemode: "tozero" },
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: data.budget_bytes / scale, y1: data.budget_bytes / scale, line: { width: 1.5, color: css("--ink"), dash: "dash" } }],
    annotations: [{ text: `budget ${size(data.budget_bytes)}`, xref: "paper", x: 0.995, xanchor: "right", y: data.budget_bytes / scale, yanchor: "bottom", showarrow: false, font: { color: css("--ink") } }],
  }, { displayModeBar: false, responsive: true });
}

(async () => {
  const [text, library] = await Promise.all([unpacked("data"), unpacked("plotly")]);
  const script = document.createElement("script");
  script.textContent = library;
  document.head.append(script);
  data = JSON.parse(text);
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.dataset.ready = "yes";
})();
