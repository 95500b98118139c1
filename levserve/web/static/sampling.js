// The settings of a request, under the names that the API gives them. A field that is left empty is not sent, so the
// server's default holds.

import { element, find } from "./dom.js";
import { read, write } from "./store.js";

const NUM_ALTERNATIVES = 5;
const FIRST_VISIT = { temperature: 0.7 }; // at OpenAI's 1, small models ramble

// The range is the slider's; the number beside it may be anything that the server accepts.
const FIELDS = [
  { name: "temperature", min: 0, max: 2, step: 0.05, empty: "1", help: "0 always takes the likeliest token" },
  { name: "top_p", min: 0, max: 1, step: 0.01, empty: "1", help: "sample from the likeliest tokens that add up to this probability" },
  { name: "top_k", min: 0, max: 200, step: 1, empty: "all", help: "sample from the k likeliest tokens" },
  { name: "min_p", min: 0, max: 1, step: 0.01, empty: "0", help: "drop tokens less likely than this fraction of the likeliest" },
  { name: "max_tokens", min: 1, max: 4096, step: 1, empty: "auto", help: "the most tokens to generate" },
  { name: "presence_penalty", min: -2, max: 2, step: 0.1, empty: "0", help: "above 0: fewer tokens that already occurred" },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.1, empty: "0", help: "above 0: fewer tokens that occurred often" },
  { name: "repetition_penalty", min: 0.5, max: 2, step: 0.05, empty: "1", help: "above 1: fewer tokens of prompt and answer" },
];

export function mountSampling() {
  const saved = read("sampling", FIRST_VISIT);
  find("sampling").append(...FIELDS.map((field) => makeField(field, saved[field.name])));
  find("seed").value = saved.seed ?? "";
  find("stop").value = (saved.stop ?? []).join("\n");
  find("logprobs").checked = saved.logprobs ?? true;
  find("settings").addEventListener("input", (event) => {
    const { target } = event;
    const number = target.type === "range" ? find(target.dataset.for) : target;
    if (target.type === "range") number.value = target.value;
    if (find(`${number.id}-slider`)) showSlider(number);
    save();
  });
  find("sampling-reset").addEventListener("click", () => {
    for (const input of find("settings").querySelectorAll("input, #stop")) {
      if (input.type === "checkbox") input.checked = true;
      else if (input.type !== "range") input.value = "";
    }
    for (const { name } of FIELDS) showSlider(find(name));
    save();
  });
}

/** The settings that are not empty, under the API's names; the browser marks invalid numbers. */
export function samplingFields() {
  const fields = {};
  for (const { name } of FIELDS) {
    if (!Number.isNaN(find(name).valueAsNumber)) fields[name] = find(name).valueAsNumber;
  }
  if (!Number.isNaN(find("seed").valueAsNumber)) fields.seed = find("seed").valueAsNumber;
  const stops = find("stop").value.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  return fields;
}

/** How many alternatives to ask for with each token, or null for no log-probabilities. */
export const numAlternatives = () => (find("logprobs").checked ? NUM_ALTERNATIVES : null);

function save() {
  write("sampling", { ...samplingFields(), logprobs: find("logprobs").checked });
}

function makeField({ name, min, max, step, empty, help }, value) {
  const number = element("input", {
    type: "number",
    id: name,
    step: "any",
    placeholder: empty,
    value,
    "aria-describedby": `${name}-help`,
  });
  const slider = element("input", {
    type: "range",
    id: `${name}-slider`,
    min,
    max,
    step,
    "data-for": name,
    "data-empty": Number.isNaN(Number(empty)) ? min : empty,
    "aria-label": `${name}, slider`,
  });
  setSlider(slider, value ?? "");
  const label = element("label", { for: name }, element("code", {}, name));
  const hint = element("p", { class: "help", id: `${name}-help` }, help);
  return element("div", { class: "field" }, label, number, slider, hint);
}

function showSlider(number) {
  setSlider(find(`${number.id}-slider`), number.value);
}

/** A slider cannot be empty: it then stands at the default, and is pale. */
function setSlider(slider, value) {
  slider.value = value === "" ? slider.dataset.empty : value;
  slider.classList.toggle("unset", value === "");
}
