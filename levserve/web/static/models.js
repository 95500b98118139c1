// The model picker. While the server loads its first model, it shows how far that has come.

import { ApiError, getJson } from "./api.js";
import { element, find } from "./dom.js";
import { read, write } from "./store.js";

const RETRY_MS = 1000;
let models = [];

let connect = () => {};

/** `run` is called when a model is needed and none is known: the user may not have given the key. */
export const onModelNeeded = (run) => (connect = run);

export const currentModel = () => find("model").value;

/** Whether a model can be asked. If not, the page connects again, which asks for the key where one is needed. */
export function hasModel() {
  if (!currentModel()) connect();
  return currentModel() !== "";
}

export function mountModels() {
  find("model").addEventListener("change", () => {
    write("model", currentModel());
    showContext();
  });
}

/** Fills the picker; tries again until the server has a model. */
export async function loadModels() {
  while (true) {
    try {
      ({ data: models } = await getJson("/v1/models"));
      return showModels();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      showStatus(error.status === 503 ? await describeLoading() : error.message);
      if (error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function showModels() {
  const chosen = currentModel() || read("model", "");
  find("model").replaceChildren(
    ...models.map(({ id, status }) => {
      const label = status === "loaded" ? id : `${id} (${status === "loadable" ? "loads on first use" : status})`;
      return element("option", { value: id, selected: id === chosen }, label);
    }),
  );
  showContext();
  showStatus("");
}

function showContext() {
  const length = models.find((model) => model.id === currentModel())?.max_model_len;
  find("context").textContent = length ? `${length.toLocaleString("en")} tokens` : "";
}

async function describeLoading() {
  try {
    const response = await fetch("/readyz");
    const { status, progress } = await response.json();
    return `The server is not ready: ${status}${progress ? `, ${progress}` : ""}.`;
  } catch {
    return "The server cannot be reached.";
  }
}

function showStatus(message) {
  if (find("status").textContent !== message) find("status").textContent = message;
  find("status").hidden = !message;
}
