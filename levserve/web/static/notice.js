// Short messages at the foot of the page, one at a time; screen readers speak them.

import { button, element, find } from "./dom.js";

const SHOWN_MS = 8000;
let timer = 0;

/** Shows a message for some seconds, with one button if an `action` is given. */
export function notify(message, action = null) {
  const place = find("notice");
  clearTimeout(timer);
  const undo = action && button(action.label, () => (hide(), action.run()));
  place.replaceChildren(element("span", {}, message), ...(undo ? [undo] : []));
  place.classList.add("shown");
  timer = setTimeout(hide, SHOWN_MS);
}

/** Says something to screen readers only. */
export function announce(message) {
  find("announcement").textContent = message;
}

function hide() {
  clearTimeout(timer);
  find("notice").classList.remove("shown");
  find("notice").replaceChildren();
}
