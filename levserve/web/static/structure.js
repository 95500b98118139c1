// What a request says about the form of its answer: a JSON schema, and tools that the model may call. Pure text in,
// fields of the API out, so that tests need no browser.

/** The fields of a schema; none for an empty text. Throws an Error that says what is wrong. */
export function readSchema(text) {
  const schema = readJson(text);
  if (schema === undefined) return {};
  if (!isObject(schema)) throw new Error("A schema is an object, such as {\"type\": \"object\"}.");
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
}

/** The fields of a list of tools, each in the API's form or only its function; none for an empty text or list. */
export function readTools(text) {
  const given = readJson(text);
  if (given === undefined) return {};
  if (!Array.isArray(given)) throw new Error("Tools are a list: [{\"name\": ..., \"parameters\": ...}].");
  const tools = given.map((tool, index) => {
    const called = isObject(tool) && isObject(tool.function) ? tool.function : tool;
    if (typeof called?.name !== "string") throw new Error(`Tool ${index + 1} has no name.`);
    return { type: "function", function: called };
  });
  return tools.length ? { tools } : {};
}

/** Joins the pieces of calls from the chunks of a stream into [{id, name, arguments}]. */
export function addCalls(calls, pieces) {
  for (const { index, id, function: called } of pieces) {
    calls[index] ??= { id: "", name: "", arguments: "" };
    const call = calls[index];
    call.id = id ?? call.id;
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}

/** A message of a conversation as the API takes it; null for an empty answer, which is left out. */
export function toSent({ role, content, calls, callId }) {
  if (role === "tool") return { role, tool_call_id: callId, content };
  if (!calls?.length) return content ? { role, content } : null;
  const called = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content: content || null, tool_calls: called };
}

/** Arguments, indented if they are JSON; an answer that was cut may end within them. */
export function layOut(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function readJson(text) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
