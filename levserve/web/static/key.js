// The dialog for the API key. Calls that need a key wait for it: `api.js` asks here, and all that ask while the
// dialog is open get the same answer.

import { hasKey, onKeyNeeded, setKey } from "./api.js";
import { find } from "./dom.js";

let waiting = null;

/** Opens the dialog; resolves to whether the user gave a key. */
function askForKey(message) {
  if (waiting) return waiting;
  const dialog = find("key-dialog");
  find("key-message").textContent = message;
  find("key-input").value = "";
  dialog.showModal();
  waiting = new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "saved"), { once: true });
  }).finally(() => (waiting = null));
  return waiting;
}

/** `onChange` runs after each change of the key, whoever asked for it. */
export function mountKey(onChange) {
  const dialog = find("key-dialog");
  const show = () => (find("key-open").textContent = hasKey() ? "API key: set" : "API key");
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(find("key-input").value.trim());
    show();
    dialog.close("saved");
    onChange();
  });
  find("key-cancel").addEventListener("click", () => dialog.close("cancelled"));
  dialog.addEventListener("cancel", () => (dialog.returnValue = "cancelled"));
  find("key-open").addEventListener("click", () => {
    askForKey("The key is kept until this tab is closed. Leave it empty to forget it.");
  });
  onKeyNeeded(askForKey);
  show();
}
