// Makes elements. Strings become text nodes and nothing here parses markup, so what a model writes stays text.

export const find = (id) => document.getElementById(id);

/** An element with attributes, listeners (names that begin with "on") and children; null children are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export function button(label, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, label);
}

/** A button that copies the text that `getText` returns, and says so for a moment. */
export function copyButton(getText, label = "Copy") {
  const made = button(label, async () => {
    made.textContent = (await copy(getText())) ? "Copied" : "Copying failed";
    setTimeout(() => (made.textContent = label), 1500);
  });
  made.className = "quiet";
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine browsers hide the clipboard; the old way still works.
    const area = element("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    const focused = document.activeElement;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isCopied;
  }
}
