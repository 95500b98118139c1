// Sets the theme before the page is drawn, so that it does not flash: a classic script in the head, not a module.
// Without a choice the style sheet follows the system.
"use strict";

{
  const THEMES = ["auto", "light", "dark"];
  const NAME = "levserve.theme";

  const read = () => {
    try {
      return localStorage.getItem(NAME) ?? "auto";
    } catch {
      return "auto"; // the browser keeps nothing for this page
    }
  };

  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  };

  show(read());

  document.addEventListener("DOMContentLoaded", () => {
    show(read());
    document.getElementById("theme").addEventListener("click", () => {
      const shown = document.documentElement.dataset.theme;
      const theme = THEMES[(THEMES.indexOf(shown) + 1) % THEMES.length];
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        // The choice then lasts until the page is closed.
      }
      show(theme);
    });
  });
}
