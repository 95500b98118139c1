// The three tabs, and on narrow screens the panels at the sides.

import { find } from "./dom.js";

const NAMES = ["chat", "completion", "scoring"];

export const currentTab = () => NAMES.find((name) => find(`tab-${name}`).ariaSelected === "true");

export function showTab(name) {
  for (const other of NAMES) {
    const isShown = other === name;
    find(`tab-${other}`).ariaSelected = String(isShown);
    find(`tab-${other}`).tabIndex = isShown ? 0 : -1;
    find(`panel-${other}`).hidden = !isShown;
  }
  document.body.dataset.tab = name;
  // A reload comes back to the same tab.
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
}

export function mountTabs() {
  for (const name of NAMES) find(`tab-${name}`).addEventListener("click", () => showTab(name));
  find("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    const name = NAMES.at((NAMES.indexOf(currentTab()) + step) % NAMES.length);
    showTab(name);
    find(`tab-${name}`).focus();
  });
  const asked = location.hash.slice(1);
  showTab(NAMES.includes(asked) ? asked : "chat");
  mountDrawer("history");
  mountDrawer("settings");
}

/** A side panel that a narrow screen shows only on demand; the style sheet decides what is narrow. */
function mountDrawer(name) {
  const panel = find(name);
  const toggle = find(`${name}-toggle`);
  const open = (isOpen) => {
    panel.classList.toggle("open", isOpen);
    toggle.ariaExpanded = String(isOpen);
  };
  open(false);
  toggle.addEventListener("click", () => {
    open(!panel.classList.contains("open"));
    if (panel.classList.contains("open")) panel.querySelector("button, input, textarea").focus();
  });
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !panel.classList.contains("open")) return;
    open(false);
    toggle.focus();
  });
  document.querySelector("main").addEventListener("pointerdown", () => open(false));
  for (const chooser of ["conversations", "new-chat"]) find(chooser).addEventListener("click", () => open(false));
}
