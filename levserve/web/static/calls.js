// What surrounds the text of an answer: folded thoughts, and tool calls with a field for each result. All of it is
// text that a model wrote, and is shown as text.

import { button, element } from "./dom.js";
import { layOut } from "./structure.js";

/** The thoughts, closed until someone opens them. */
export function thoughtsView() {
  const text = element("div", { class: "thoughts-text" });
  const made = element("details", { class: "thoughts", hidden: true }, element("summary", {}, "Thoughts"), text);
  const show = (thoughts) => {
    made.hidden = !thoughts;
    text.textContent = thoughts ?? "";
  };
  return { element: made, show };
}

/** Each call as its name and arguments. */
export function callsView() {
  const made = element("div", { class: "calls" });
  const show = (calls) => made.replaceChildren(...(calls ?? []).map(callView));
  return { element: made, show };
}

/** A form with a field for each call's result; `onResults` gets the texts, in the order of the calls. */
export function resultsForm(calls, onResults) {
  const areas = calls.map(({ name }, index) =>
    element("textarea", { rows: 2, "aria-label": `Result of ${name}, call ${index + 1}`, placeholder: `Result of ${name}` }),
  );
  const send = button(calls.length > 1 ? "Send the results" : "Send the result", () => onResults(areas.map((area) => area.value)), {
    class: "primary",
  });
  return element("div", { class: "results" }, ...areas, send);
}

/** A result that was sent. */
export function resultView(message) {
  const head = element("div", { class: "call-head" }, `Result of ${message.name ?? "a tool"}`);
  const body = element("pre", { tabindex: "0" }, message.content);
  return { element: element("article", { class: "message tool", "aria-label": "Result of a tool" }, head, body) };
}

function callView({ name, arguments: text }) {
  const head = element("div", { class: "call-head" }, "Call of ", element("code", {}, name));
  return element("section", { class: "call", "aria-label": `Call of ${name}` }, head, element("pre", { tabindex: "0" }, layOut(text)));
}
