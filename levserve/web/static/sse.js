// Splits a stream of server-sent events into the data of each event. Only `data:` lines matter here: levserve sends
// no other fields, and comment lines (": ping") only keep the connection open.

export class EventReader {
  #rest = "";
  #data = [];

  /** The events that this piece of text completes. */
  push(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      const bare = line.endsWith("\r") ? line.slice(0, -1) : line;
      if (bare.startsWith("data:")) this.#data.push(bare.slice(bare[5] === " " ? 6 : 5));
      if (bare === "" && this.#data.length) events.push(this.#data.splice(0).join("\n"));
    }
    return events;
  }
}
