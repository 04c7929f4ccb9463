"use strict";
// Number formats. Each number on the page also carries its exact value: see `number`.
const KIB = 1024, MIB = KIB * 1024, GIB = MIB * 1024;

// `toFixed`, but a tie rounds to the even digit, as Python's formatting does.
function rounded(bytes, scale, digits) {
  const halves = (bytes * 2 * 10 ** digits) / scale, below = (halves - 1) / 2;
  return Number.isInteger(below) && below % 2 === 0 ? (below / 10 ** digits).toFixed(digits) : (bytes / scale).toFixed(digits);
}

function size(bytes) {
  if (bytes < KIB) return `${bytes} B`;
  if (bytes < MIB) return `${rounded(bytes, KIB, 1)} KiB`;
  return bytes < GIB ? `${rounded(bytes, MIB, 1)} MiB` : `${rounded(bytes, GIB, 2)} GiB`;
}

function signed(bytes) {
  return bytes === 0 ? "±0" : (bytes < 0 ? "−" : "+") + size(Math.abs(bytes));
}

function duration(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(2)} µs`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(2)} ms` : `${seconds.toFixed(2)} s`;
}

function flops(n) {
  for (const [unit, scale] of [["PFLOP", 1e15], ["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6]])
    if (n >= scale) return `${(n / scale).toFixed(1)} ${unit}`;
  return `${n} FLOP`;
}

const times = (ratio) => `${ratio.toFixed(4)}×`;
const count = (n) => n.toLocaleString("en-US");
const percent = (fraction) => `${(100 * fraction).toFixed(2)} %`;

// Bytes in the unit of the largest value, so that the digits of a column line up.
function sizeIn(bytes, [name, scale]) {
  if (scale === 1) return `${bytes} B`;
  const text = rounded(bytes, scale, 2);
  return bytes && Number(text) === 0 ? `< 0.01 ${name}` : `${text} ${name}`;
}

// The unit for an axis and its divisor.
function unit(bytes) {
  if (bytes >= GIB) return ["GiB", GIB];
  return bytes >= MIB ? ["MiB", MIB] : bytes >= KIB ? ["KiB", KIB] : ["B", 1];
}

// An element with attributes and children, which are elements or text.
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A number that says which field of the data it shows, and the exact value.
const number = (key, value, text) => make("span", { "data-key": key, "data-value": value }, text);
