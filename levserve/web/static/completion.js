// The completion tab: a text, and how the model continues it.

import { ApiError } from "./api.js";
import { find } from "./dom.js";
import { soundFields, structureFields } from "./editors.js";
import { describe, describeTimings, generate } from "./generate.js";
import { currentModel, hasModel } from "./models.js";
import { announce } from "./notice.js";
import { numAlternatives, samplingFields } from "./sampling.js";
import { read, write } from "./store.js";
import { addTokens, tokenRow } from "./tokens.js";

const PATH = "/v1/completions";
const DEFAULT_MAX_TOKENS = 64; // OpenAI's own 16 is hardly a sentence

let controller = null;
let text = "";

export function mountCompletion() {
  find("prompt").value = read("prompt", "Once upon a time");
  find("prompt").addEventListener("input", () => write("prompt", find("prompt").value));
  find("completion-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (controller) controller.abort();
    else complete();
  });
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !controller) complete();
  });
  find("panel-completion").addEventListener("keydown", (event) => event.key === "Escape" && controller?.abort());
  find("append").addEventListener("click", () => {
    find("prompt").value += text;
    write("prompt", find("prompt").value);
    clear();
    find("prompt").focus();
  });
}

export function completionRequest() {
  return { path: PATH, body: { ...completionBody(), stream: true } };
}

function completionBody() {
  const count = numAlternatives();
  const logprobs = count === null ? {} : { logprobs: count };
  const fields = { max_tokens: DEFAULT_MAX_TOKENS, ...samplingFields(), ...soundFields("schema"), ...logprobs };
  return { model: currentModel(), prompt: find("prompt").value, ...fields };
}

async function complete() {
  if (!hasModel() || !structureFields("schema")) return;
  clear();
  controller = new AbortController();
  showRunning();
  announce("Completing");
  const { show, end } = makeOutput();
  try {
    const result = await generate(PATH, completionBody(), controller.signal, show);
    find("completion-note").textContent = describe(result);
    find("completion-note").title = describeTimings(result.timings);
    announce(`The completion is finished. ${describe(result)}`);
  } catch (error) {
    if (error.name === "AbortError") find("completion-note").textContent = describe({ finish: "stopped" });
    else if (error instanceof ApiError) showError(error);
    else throw error;
  } finally {
    controller = null;
    end();
    showRunning();
  }
}

/** Tokens where there are any, else plain text. */
function makeOutput() {
  const output = find("completion");
  let row = null;
  const show = (piece, tokens) => {
    text += piece;
    if (tokens.length && !row) {
      row = tokenRow([]);
      output.replaceChildren(row);
    }
    if (row) addTokens(row, tokens);
    else output.append(piece);
  };
  const end = () => (find("append").hidden = text === "");
  return { show, end };
}

function clear() {
  text = "";
  find("completion").replaceChildren();
  find("completion-note").textContent = "";
  find("completion-error").hidden = true;
  find("append").hidden = true;
}

function showError(error) {
  find("completion-error").textContent = error.describe();
  find("completion-error").hidden = false;
}

function showRunning() {
  find("complete").textContent = controller ? "Stop" : "Complete";
  find("complete").classList.toggle("stop", controller !== null);
  find("completion").ariaBusy = String(controller !== null);
}
