// The request on the screen as a curl command and as a Python program. Pure text, so that tests can run the result.
// The key is never written out: both read it from the environment.

const KEY_VARIABLE = "LEVSERVE_API_KEY";

// What OpenAI's SDK has arguments for; the rest goes into extra_body.
const SDK_FIELDS = new Set(
  `model messages prompt max_tokens temperature top_p presence_penalty frequency_penalty seed stop logprobs top_logprobs
   stream response_format tools tool_choice`.split(/\s+/),
);

/** A request is {origin, path, body, needsKey}. */
export function curlCommand({ origin, path, body, needsKey }) {
  const lines = [
    `curl ${body.stream ? "-N " : ""}${quote(origin + path)}`,
    "-H 'Content-Type: application/json'",
    ...(needsKey ? [`-H "Authorization: Bearer $${KEY_VARIABLE}"`] : []),
    `-d ${quote(JSON.stringify(body, null, 2))}`,
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

export function pythonProgram(request) {
  return request.path.startsWith("/v1/") ? sdkProgram(request) : plainProgram(request);
}

function sdkProgram({ origin, path, body, needsKey }) {
  const isChat = path.includes("chat");
  const own = Object.entries(body).filter(([name]) => SDK_FIELDS.has(name));
  const extra = Object.entries(body).filter(([name]) => !SDK_FIELDS.has(name));
  if (extra.length) own.push(["extra_body", Object.fromEntries(extra)]);
  const passed = own.map(([name, value]) => `    ${name}=${literal(value, 1)},\n`).join("");
  const text = isChat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(`${origin}/v1`)}, api_key=${keyExpression(needsKey)})
stream = client.${isChat ? "chat.completions" : "completions"}.create(
${passed})
for chunk in stream:
    if chunk.choices:
        print(${text} or "", end="", flush=True)
print()
`;
}

function plainProgram({ origin, path, body, needsKey }) {
  const key = needsKey ? `, "Authorization": "Bearer " + ${keyExpression(true)}` : "";
  return `import json
${needsKey ? "import os\n" : ""}import urllib.request

body = ${literal(body, 0)}
headers = {"Content-Type": "application/json"${key}}
request = urllib.request.Request(${literal(origin + path)}, json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as response:
    print(json.dumps(json.load(response), indent=2))
`;
}

function keyExpression(needsKey) {
  return needsKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"';
}

/** A value as Python writes it. JSON's strings and numbers are Python's too. */
function literal(value, depth = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const indent = "    ".repeat(depth + 1);
  const entries = Array.isArray(value)
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = open + entries.join(", ") + close;
  if (line.length <= 80 && !line.includes("\n")) return line;
  return `${open}\n${entries.map((entry) => `${indent}${entry},\n`).join("")}${"    ".repeat(depth)}${close}`;
}

/** A word for the shell: inside single quotes only a single quote is special. */
function quote(text) {
  return /^[\w:/.-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
