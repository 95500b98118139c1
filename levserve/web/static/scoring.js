// The scoring tab: how likely the model finds each continuation of a prompt (/loglikelihood).

import { ApiError, getJson } from "./api.js";
import { button, element, find } from "./dom.js";
import { currentModel, hasModel } from "./models.js";
import { announce } from "./notice.js";
import { read, write } from "./store.js";
import { percent, tokenRow } from "./tokens.js";

const PATH = "/loglikelihood";
const EXAMPLE = { prompt: "The capital of France is", continuations: [" Paris", " London", " a city"] };

let isRunning = false;

export function mountScoring() {
  const saved = read("scoring", EXAMPLE);
  find("score-prompt").value = saved.prompt;
  saved.continuations.forEach(addContinuation);
  find("add-continuation").addEventListener("click", () => addContinuation("").focus());
  find("panel-scoring").addEventListener("input", save);
  find("scoring-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!isRunning) score();
  });
}

export function scoringRequest() {
  const continuations = inputs().map((input) => input.value);
  const prompts = continuations.map(() => find("score-prompt").value);
  return { path: PATH, body: { model: currentModel(), prompts, continuations, details: true } };
}

const inputs = () => [...find("continuations").querySelectorAll("input")];

function save() {
  write("scoring", { prompt: find("score-prompt").value, continuations: inputs().map((input) => input.value) });
}

function addContinuation(value) {
  const input = element("input", { type: "text", "aria-label": `Continuation ${inputs().length + 1}` });
  input.value = value;
  const erase = button("×", () => removeContinuation(item), { class: "erase quiet", "aria-label": "Remove this continuation" });
  const item = element("li", {}, input, erase);
  find("continuations").append(item);
  return input;
}

function removeContinuation(item) {
  if (inputs().length === 1) return;
  item.remove();
  inputs().forEach((input, index) => (input.ariaLabel = `Continuation ${index + 1}`));
  save();
  inputs().at(-1).focus();
}

async function score() {
  if (!hasModel()) return;
  isRunning = true;
  find("score").disabled = true;
  find("scoring-error").hidden = true;
  const began = performance.now();
  try {
    const { body } = scoringRequest();
    const scores = await getJson(PATH, { body });
    showScores(body.continuations, scores);
    const note = `${scores.tokens.flat().length} tokens scored in ${Math.round(performance.now() - began)} ms`;
    find("scoring-note").textContent = note;
    announce(note);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    find("scoring-error").textContent = error.describe();
    find("scoring-error").hidden = false;
  } finally {
    isRunning = false;
    find("score").disabled = false;
  }
}

/** A row for each continuation, the likeliest first; `share` compares them with each other only. */
function showScores(continuations, { ll, is_greedy, tokens, token_logprobs }) {
  const best = Math.max(...ll);
  const total = ll.reduce((sum, value) => sum + Math.exp(value - best), 0);
  const order = ll.map((_, index) => index).sort((one, other) => ll[other] - ll[one]);
  const rows = order.map((index) => {
    const shown = tokens[index].map((text, place) => ({ text, logprob: token_logprobs[index][place], top: [] }));
    const share = Math.exp(ll[index] - best) / total;
    const bar = element("span", { class: "bar" });
    bar.style.setProperty("--p", share.toFixed(3));
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, tokenRow(shown)),
      element("td", { class: "number" }, ll[index].toFixed(3)),
      element("td", { class: "number" }, (ll[index] / shown.length).toFixed(3)),
      element("td", { class: "share" }, bar, ` ${percent(Math.log(share))}`),
      element("td", {}, is_greedy[index] ? "yes" : "no"),
    );
  });
  find("scores").replaceChildren(...rows);
  find("score-table").hidden = false;
}
