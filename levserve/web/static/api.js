// Calls the server that served this page. Every call carries the key, if there is one; after a 401 the user is asked
// for it and the call is repeated. The key stays in sessionStorage: it is forgotten when the tab is closed.

import { EventReader } from "./sse.js";

const KEY = "levserve.key";

export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }

  /** The message, with the field if it does not name it, and with the time to wait. */
  describe() {
    const field = this.param && !this.message.includes(this.param) ? ` (field ${this.param})` : "";
    const wait = this.retryAfter ? ` Try again in ${this.retryAfter} s.` : "";
    return this.message + field + wait;
  }
}

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // Without sessionStorage the key lasts as long as the page.
}

/** Set by key.js: shows a message, and resolves to whether there is a new key to try. */
let askForKey = async () => false;

export const onKeyNeeded = (ask) => (askForKey = ask);

export const hasKey = () => key !== "";

export function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(KEY, given);
  } catch {
    // Without sessionStorage the key lasts as long as the page.
  }
}

/** The response to a call that succeeded; throws `ApiError` otherwise. With `asks` false a 401 is an error at once. */
export async function call(path, { body, signal, asks = true } = {}) {
  while (true) {
    const usedKey = key;
    const response = await send(path, body, signal);
    if (response.ok) return response;
    const error = await readError(response);
    if (response.status !== 401 || !asks) throw error;
    // Another call may have got a key from the user meanwhile.
    const message = usedKey ? error.message : "This server asks for an API key. It is kept until this tab is closed.";
    if (usedKey === key && !(await askForKey(message))) throw error;
  }
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

/** The chunks of a streamed answer as they arrive. */
export async function* stream(path, body, signal) {
  const response = await call(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError("The connection ended before the answer did.");
      for (const data of events.push(value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
        yield chunk;
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? new ApiError("The connection to the server was lost.") : error;
  } finally {
    reader.cancel().catch(() => {}); // a reader that left early hangs up, which cancels the request
  }
}

async function send(path, body, signal) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  try {
    return await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (key && !/^[\x20-\x7e]+$/.test(key)) throw new ApiError("The API key contains characters that no key can have.");
    throw new ApiError("The server cannot be reached.");
  }
}

async function readError(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { ...error, status: response.status, retryAfter });
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, { status: response.status, retryAfter });
  }
}
