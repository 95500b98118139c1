// Tokens as they were sampled, each coloured by its probability. Pointing at one, or moving to it with the arrow
// keys, shows what else it could have been. A token is {text, logprob, top: [{text, logprob}]}.

import { element, find } from "./dom.js";

export const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 10 ? `${value.toFixed(1)} %` : value >= 0.01 ? `${value.toFixed(2)} %` : "< 0.01 %";
};

/** Tokens as one row that the Tab key reaches once; arrow keys move inside. */
export function tokenRow(tokens) {
  const row = element("div", { class: "tokens", role: "list", "aria-label": "Tokens with their probabilities" });
  addTokens(row, tokens);
  row.addEventListener("keydown", moveFocus);
  row.addEventListener("focusin", (event) => showTip(event.target));
  row.addEventListener("focusout", hideTip);
  row.addEventListener("pointerover", (event) => event.target.classList.contains("token") && showTip(event.target));
  row.addEventListener("pointerout", hideTip);
  return row;
}

export function addTokens(row, tokens) {
  for (const token of tokens) {
    const shown = element("span", { class: "token", role: "listitem", tabindex: "-1" }, visible(token.text));
    if (token.logprob !== null) shown.style.setProperty("--p", Math.exp(token.logprob).toFixed(3));
    details.set(shown, token);
    if (!row.firstChild) shown.tabIndex = 0;
    row.append(shown);
  }
}

const details = new WeakMap();

/** Line breaks get a sign of their own: a token may consist of nothing else. */
const visible = (text) => text.replaceAll("\n", "⏎\n") || "∅";

/** The same for the tip, where spaces must be seen too. */
const quoted = (text) => text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "∅";

function moveFocus(event) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  const step = steps[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const tokens = [...event.currentTarget.children];
  const place = Math.min(Math.max(tokens.indexOf(event.target) + step, 0), tokens.length - 1);
  event.target.tabIndex = -1;
  tokens[place].tabIndex = 0;
  tokens[place].focus();
}

function showTip(shown) {
  const token = details.get(shown);
  if (!token) return;
  const tip = find("tip");
  const chosen = token.logprob === null ? "nothing comes before it" : `${percent(token.logprob)}, log ${token.logprob.toFixed(3)}`;
  const isListed = token.top.some((other) => other.text === token.text);
  const rows = token.top.filter((other) => other.logprob > -100).map((other) => tipRow(other, other.text === token.text));
  tip.replaceChildren(element("p", {}, element("b", {}, quoted(token.text)), ` ${chosen}`));
  if (rows.length) tip.append(element("table", {}, element("tbody", {}, ...rows)));
  if (!isListed && rows.length) tip.append(element("p", { class: "help" }, "It was not among the likeliest."));
  shown.setAttribute("aria-describedby", "tip");
  tip.hidden = false;
  placeTip(tip, shown.getBoundingClientRect());
}

function tipRow(other, isChosen) {
  const bar = element("span", { class: "bar" });
  bar.style.setProperty("--p", Math.exp(other.logprob).toFixed(3));
  const cells = [element("td", {}, quoted(other.text)), element("td", {}, percent(other.logprob)), element("td", {}, bar)];
  return element("tr", { class: isChosen ? "chosen" : null }, ...cells);
}

/** Places the tip below the token, or above it where there is no room below. */
function placeTip(tip, box) {
  const isRoomBelow = box.bottom + tip.offsetHeight + 12 < innerHeight;
  const top = isRoomBelow ? box.bottom + 6 : box.top - tip.offsetHeight - 6;
  tip.style.top = `${Math.max(4, top)}px`;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
}

function hideTip(event) {
  event.target.removeAttribute("aria-describedby");
  find("tip").hidden = true;
}
