// The page at /docs: every operation of /openapi.json with its fields, a command to copy and a form to try it.
// All text gets into the page as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A sentence in which `names` are code. */
function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));
}

function nameOf(reference) {
  return reference.split("/").pop();
}

/** The type of a value in a few words. */
function words(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.anyOf) {
    return schema.anyOf.filter((one) => one.type !== "null").map(words).join(" or ");
  }
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return schema.items ? `list of ${words(schema.items)}` : "list";
  return (schema.type ?? "anything") + bounds(schema);
}

function bounds(schema) {
  const huge = 2 ** 31 - 1; // only keeps a number inside its machine type
  const parts = [];
  if (schema.exclusiveMinimum !== undefined) parts.push(`above ${schema.exclusiveMinimum}`);
  if (schema.minimum > -huge) parts.push(`from ${schema.minimum}`);
  if (schema.maximum < huge) parts.push(`to ${schema.maximum}`);
  return parts.length ? ` ${parts.join(" ")}` : "";
}

/** A table of the fields of a schema, and tables of the objects in them. */
function fieldTables(schema, schemas, seen = new Set()) {
  const rows = [];
  const nested = [];
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const required = (schema.required ?? []).includes(name) ? ", required" : "";
    const given = field.default === undefined || field.default === null ? "" : JSON.stringify(field.default);
    const cells = [[make("code", {}, name)], [words(field) + required], [given], prose(field.description ?? "")];
    rows.push(make("tr", {}, ...cells.map((cell) => make("td", {}, ...cell))));
    for (const found of JSON.stringify(field).matchAll(/#\/components\/schemas\/([^"]+)/g)) nested.push(found[1]);
  }
  const head = make("tr", {}, ...["field", "value", "default", "meaning"].map((title) => make("th", {}, title)));
  const parts = rows.length ? [make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))] : [];
  for (const name of nested) {
    if (seen.has(name)) continue;
    seen.add(name);
    const inner = fieldTables(schemas[name], schemas, seen);
    if (inner.length) parts.push(make("h4", {}, name), ...inner);
  }
  return parts;
}

function schemaTables(title, content, schemas) {
  const schema = content?.schema;
  if (!schema?.$ref) return [];
  const tables = fieldTables(schemas[nameOf(schema.$ref)], schemas, new Set([nameOf(schema.$ref)]));
  if (!tables.length) return [];
  return [make("details", {}, make("summary", {}, title), ...tables)];
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** A curl command; `sent` are the words that describe the body. */
function command(method, path, sent, needsKey) {
  const words = ["curl"];
  if (method !== "GET") words.push(`-X ${method}`);
  words.push(quoted(location.origin + path));
  if (needsKey) words.push('-H "Authorization: Bearer $LEVSERVE_API_KEY"');
  return [...words, ...sent].join(" ");
}

/** What the user can enter of a JSON body: its elements, curl's words for it, and what fetch sends. */
function jsonBody(content, label) {
  const editor = make("textarea", { "aria-label": label, spellcheck: "false" });
  editor.value = JSON.stringify(content.example ?? {}, null, 2);
  const shortened = () => {
    try {
      return JSON.stringify(JSON.parse(editor.value));
    } catch {
      return editor.value; // incomplete JSON is shown as it is
    }
  };
  const words = () => (editor.value ? ["-H 'Content-Type: application/json'", `-d ${quoted(shortened())}`] : []);
  return { elements: [editor], inputs: [editor], words, body: () => editor.value, type: "application/json" };
}

/** The same of a form, which may have files. Fields that are empty are not sent. */
function formBody({ schema }) {
  const fields = Object.entries(schema.properties).map(([name, field]) => {
    const isFile = field.format === "binary";
    const input = make("input", { name, type: isFile ? "file" : "text", placeholder: field.description });
    if (!isFile) input.value = field.examples?.[0] ?? "";
    return { name, input, isFile };
  });
  const elements = fields.map(({ name, input }) => make("p", {}, make("label", {}, `${name} `, input)));
  const words = () =>
    fields
      .filter(({ input, isFile }) => isFile || input.value)
      .map(({ name, input, isFile }) => `-F ${quoted(`${name}=${isFile ? fileWord(input.files[0]) : input.value}`)}`);
  const body = () => {
    const form = new FormData();
    for (const { name, input, isFile } of fields) {
      const value = isFile ? input.files[0] : input.value;
      if (value) form.append(name, value);
    }
    return form;
  };
  return { elements, inputs: fields.map(({ input }) => input), words, body };
}

/** A file as curl's -F wants it; browsers do not tell its folder. */
function fileWord(file) {
  const name = file?.name ?? "FILE";
  return /[;,"\\]/.test(name) ? `@"${name.replace(/["\\]/g, "\\$&")}"` : `@${name}`;
}

const NO_BODY = { elements: [], inputs: [], words: () => [], body: () => undefined };

function bodyOf(operation, label) {
  const content = operation.requestBody?.content ?? {};
  if (content["application/json"]) return jsonBody(content["application/json"], label);
  if (content["multipart/form-data"]) return formBody(content["multipart/form-data"]);
  return NO_BODY;
}

async function send(method, path, { body, type }, output, button) {
  const headers = {};
  const key = byId("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (type) headers["Content-Type"] = type;
  output.textContent = "…";
  button.disabled = true;
  try {
    const reply = await fetch(path, { method, headers, body: body() });
    output.textContent = `${reply.status} ${reply.statusText}\n`;
    const reader = reply.body.getReader();
    const decoder = new TextDecoder();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      text += decoder.decode(part.value, { stream: true });
      output.textContent = `${reply.status} ${reply.statusText}\n${text}`;
    }
    if (reply.headers.get("Content-Type")?.startsWith("application/json")) {
      output.textContent = `${reply.status} ${reply.statusText}\n${JSON.stringify(JSON.parse(text), null, 2)}`;
    }
  } catch (error) {
    output.textContent = String(error);
  } finally {
    button.disabled = false;
  }
}

function tryForm(method, path, operation) {
  const parts = [];
  const fields = (operation.parameters ?? []).filter((one) => one.in !== "header");
  const inputs = fields.map((one) => make("input", { name: one.name, placeholder: one.description }));
  fields.forEach((one, index) => parts.push(make("p", {}, make("label", {}, `${one.name} `, inputs[index]))));
  const sent = bodyOf(operation, `Body of ${method} ${path}`);
  parts.push(...sent.elements);
  const copy = make("pre", {});
  const output = make("pre", { hidden: "", role: "status" });
  const button = make("button", { type: "button" }, "Send");
  const address = () => {
    let filled = path;
    const query = new URLSearchParams();
    fields.forEach((one, index) => {
      const value = inputs[index].value;
      if (one.in === "path") filled = filled.replace(`{${one.name}}`, value.split("/").map(encodeURIComponent).join("/"));
      else if (value) query.set(one.name, value);
    });
    return query.size ? `${filled}?${query}` : filled;
  };
  const show = () => (copy.textContent = command(method, address(), sent.words(), operation.security.length > 0));
  for (const input of [...sent.inputs, ...inputs]) input.addEventListener("input", show);
  button.addEventListener("click", () => {
    output.hidden = false;
    send(method, address(), sent, output, button);
  });
  show();
  return [make("h3", {}, "Try it"), ...parts, copy, button, output];
}

function operationElement(method, path, operation, schemas) {
  const title = make(
    "summary", {},
    make("span", { class: "method" }, method), make("code", {}, path), make("span", { class: "what" }, ...prose(operation.summary)),
  );
  const inside = make("div", {});
  const element = make("details", { class: "operation", id: operation.operationId }, title, inside);
  // Filled when it is first opened: all tables together are long.
  element.addEventListener("toggle", () => {
    if (inside.childElementCount) return;
    const body = operation.requestBody?.content["application/json"];
    const answers = operation.responses["200"]?.content ?? {};
    inside.append(
      ...schemaTables("Fields of the body", body, schemas),
      ...schemaTables("Fields of the answer", answers["application/json"], schemas),
      ...schemaTables("Fields of an event", answers["text/event-stream"], schemas),
      make("p", {}, `Answers: ${Object.keys(operation.responses).join(", ")}.`),
    );
    if (path !== "/v1/ws") inside.append(...tryForm(method, path, operation));
  });
  return element;
}

async function main() {
  const place = byId("operations");
  try {
    const reply = await fetch("/openapi.json");
    if (!reply.ok) throw new Error(`/openapi.json: ${reply.status} ${reply.statusText}`);
    const api = await reply.json();
    byId("version").textContent = api.info.version;
    byId("about").prepend(`${api.info.description} `);
    const groups = new Map();
    for (const [path, operations] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(operations)) {
        const tag = operation.tags[0];
        if (!groups.has(tag)) groups.set(tag, []);
        groups.get(tag).push(operationElement(method.toUpperCase(), path, operation, api.components.schemas));
      }
    }
    const order = ["models", "operations", "admin", "pages"];
    const sections = [...groups].sort(([one], [other]) => order.indexOf(one) - order.indexOf(other));
    place.replaceChildren(...sections.flatMap(([tag, elements]) => [make("h2", {}, tag), ...elements]));
  } catch (error) {
    place.replaceChildren(make("p", { class: "error" }, `The description could not be read: ${error.message}`));
  } finally {
    place.setAttribute("aria-busy", "false");
  }
}

main();
