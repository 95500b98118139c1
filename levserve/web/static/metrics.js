// The live panel: rows, queue, KV cache and speed, read from /metrics once a second while the page is visible.

import { ApiError, call } from "./api.js";
import { find } from "./dom.js";

const INTERVAL_MS = 1000;
const NUM_SAMPLES = 60;

/** Sums of all series of each metric, by name, from Prometheus' text format. */
export function parseMetrics(text) {
  const sums = {};
  for (const line of text.split("\n")) {
    if (line === "" || line.startsWith("#")) continue;
    const end = line.search(/[{ ]/);
    const name = line.slice(0, end);
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    sums[name] = (sums[name] ?? 0) + value;
  }
  return sums;
}

/** What the panel shows, from two readings `seconds` apart. */
export function summarize(now, before, seconds) {
  const rate = (name) => (before && seconds > 0 ? Math.max(0, (now[name] - before[name]) / seconds) : 0);
  const total = now.levserve_kv_pages_total ?? 0;
  return {
    running: now.levserve_requests_running ?? 0,
    waiting: now.levserve_requests_waiting ?? 0,
    kv: total ? (100 * now.levserve_kv_pages_used) / total : 0,
    cached: total ? (100 * now.levserve_kv_pages_cached) / total : 0,
    decode: rate("levserve_generated_tokens_total"),
    prefill: rate("levserve_prefill_tokens_total"),
  };
}

const PERCENTAGES = ["kv", "cached"];
const samples = {};

let before = null;
let timer = 0;
let modelsChanged = () => {};

/** `run` is called when a model has been loaded or unloaded. */
export const onModelsChange = (run) => (modelsChanged = run);

/** Starts reading, or starts again after a change of the key. */
export async function startMetrics() {
  clearTimeout(timer);
  const mayGoOn = document.hidden || (await update());
  clearTimeout(timer); // another start may have come meanwhile
  if (mayGoOn) timer = setTimeout(startMetrics, INTERVAL_MS);
}

/** Reads and shows the metrics once; false if only a key can help. */
async function update() {
  try {
    const text = await (await call("/metrics", { asks: false })).text();
    const now = { values: parseMetrics(text), at: performance.now() };
    show(summarize(now.values, before?.values, before ? (now.at - before.at) / 1000 : 0));
    const numModels = now.values.levserve_models_loaded;
    if (before && before.values.levserve_models_loaded !== numModels) modelsChanged();
    before = now;
    find("metrics-error").textContent = "";
    return true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    before = null;
    find("metrics-error").textContent = error.message;
    return error.status !== 401;
  }
}

function show(summary) {
  for (const [name, value] of Object.entries(summary)) {
    const isPercentage = PERCENTAGES.includes(name);
    find(`metric-${name}`).textContent = value.toFixed(0) + (isPercentage ? " %" : "");
    samples[name] = [...(samples[name] ?? []), value].slice(-NUM_SAMPLES);
    drawLine(find(`line-${name}`), samples[name], isPercentage ? 100 : 1);
  }
}

/** Draws the samples over the width of the picture; its top stands for the largest one, but at least for `least`. */
function drawLine(picture, values, least) {
  const top = Math.max(least, ...values);
  const x = (index) => (100 * (NUM_SAMPLES - values.length + index)) / (NUM_SAMPLES - 1);
  const points = values.map((value, index) => `${x(index).toFixed(1)},${(23 - (22 * value) / top).toFixed(1)}`);
  picture.querySelector("polyline").setAttribute("points", points.join(" "));
}
