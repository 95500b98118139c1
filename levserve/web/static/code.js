// The dialog with the request on the screen as curl and as Python.

import { hasKey } from "./api.js";
import { copyButton, find } from "./dom.js";
import { curlCommand, pythonProgram } from "./snippets.js";

/** `getRequest` returns {path, body} of what is on the screen. */
export function mountCode(getRequest) {
  const dialog = find("code-dialog");
  for (const name of ["curl", "python"]) {
    find(`${name}-head`).append(copyButton(() => find(`${name}-code`).textContent));
  }
  find("code-open").addEventListener("click", () => {
    const request = { ...getRequest(), origin: location.origin, needsKey: hasKey() };
    find("curl-code").textContent = curlCommand(request);
    find("python-code").textContent = pythonProgram(request);
    find("code-hint").hidden = !request.needsKey;
    dialog.showModal();
  });
  find("code-close").addEventListener("click", () => dialog.close());
}
