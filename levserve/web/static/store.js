// Keeps JSON in the browser's localStorage. A browser may refuse it (private windows, a full disk): reads then
// give the fallback, and writes return false.

const PREFIX = "levserve.";

export function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function write(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function remove(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // There was nothing to remove.
  }
}

/** The names that begin with `start`. */
export function names(start) {
  try {
    const all = Object.keys(localStorage);
    return all.filter((name) => name.startsWith(PREFIX + start)).map((name) => name.slice(PREFIX.length));
  } catch {
    return [];
  }
}
