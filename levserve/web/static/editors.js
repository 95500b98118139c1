// The editors for the form of an answer: its JSON schema and the tools. A text that cannot be sent is marked, and
// keeps the request from being sent.

import { find } from "./dom.js";
import { read, write } from "./store.js";
import { readSchema, readTools } from "./structure.js";

const EDITORS = { schema: readSchema, tools: (text) => withChoice(readTools(text)) };

export function mountEditors() {
  for (const name of Object.keys(EDITORS)) {
    find(name).value = read(name, "");
    find(name).addEventListener("input", () => {
      write(name, find(name).value);
      check(name);
    });
    check(name);
  }
  find("tool_choice").value = read("tool_choice", "auto");
  find("tool_choice").addEventListener("change", () => write("tool_choice", find("tool_choice").value));
}

/** The fields from these editors, or null if one cannot be sent; that editor then gets the focus. */
export function structureFields(...names) {
  const wrong = names.find((name) => check(name) === null);
  if (!wrong) return Object.assign({}, ...names.map(check));
  const isDrawer = getComputedStyle(find("settings-toggle")).display !== "none";
  if (isDrawer && !find("settings").classList.contains("open")) find("settings-toggle").click();
  find(wrong).focus();
  return null;
}

/** The fields that can be sent, for showing the request as code. */
export const soundFields = (...names) => Object.assign({}, ...names.map(check));

/** The fields of one editor, or null; shows what is wrong with it. */
function check(name) {
  const problem = find(`${name}-error`);
  let fields = null;
  problem.textContent = "";
  try {
    fields = EDITORS[name](find(name).value);
  } catch (error) {
    problem.textContent = error.message;
  }
  problem.hidden = fields !== null;
  find(name).ariaInvalid = String(fields === null);
  return fields;
}

/** The tools with the chosen `tool_choice`; the API's own default is left out. */
function withChoice(fields) {
  const choice = find("tool_choice").value;
  return fields.tools && choice !== "auto" ? { ...fields, tool_choice: choice } : fields;
}
