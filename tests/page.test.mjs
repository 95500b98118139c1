// The page's pure scripts in node, run by tests/pure/test_page_scripts.py beside a copy of them.

import assert from "node:assert/strict";
import { test } from "node:test";

import { describe } from "./static/generate.js";
import { parse } from "./static/markdown.js";
import { parseMetrics, summarize } from "./static/metrics.js";
import { curlCommand, pythonProgram } from "./static/snippets.js";
import { EventReader } from "./static/sse.js";
import { addCalls, layOut, readSchema, readTools, toSent } from "./static/structure.js";

const TAGS = new Set("a blockquote br code del em h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "));

/** A tree as short text: tag(children). */
function show(node) {
  if (typeof node === "string") return node;
  if (Array.isArray(node)) return node.map(show).join("");
  if (node.tag === "pre") return `pre:${node.lang}(${node.text})`;
  return `${node.tag}${node.href ? `:${node.href}` : ""}(${show(node.children)})`;
}

function* walk(nodes) {
  for (const node of nodes) {
    yield node;
    if (typeof node !== "string") yield* walk(node.children ?? []);
  }
}

function assertSafe(text) {
  for (const node of walk(parse(text))) {
    if (typeof node === "string") continue;
    assert.ok(TAGS.has(node.tag), text);
    if (node.tag === "a") assert.match(node.href, /^(https?:\/\/|mailto:)[^\s]+$/i, text);
  }
}

const CASES = {
  "plain text": "p(plain text)",
  "a\nb": "p(abr()b)",
  "**a** *b* ***c*** ~~d~~ `e`": "p(strong(a) em(b) strong(em(c)) del(d) code(e))",
  "**a *b* c**": "p(strong(a em(b) c))",
  "2 * 3 * 4, snake_case_name, **open": "p(2 * 3 * 4, snake_case_name, **open)",
  "`` a`b ``": "p(code(a`b))",
  "\\*not\\* \\`code\\`": "p(*not* `code`)",
  "# One\n### Three #": "h3(One)h5(Three)",
  "- a\n- b\n  - c\n\n  more\n- d": "ul(li(a)li(bul(li(c))p(more))li(d))",
  "3. x\n4. y": "ol(li(x)li(y))",
  "- **a**: b\n* c": "ul(li(strong(a): b)li(c))",
  "> a\n> > b": "blockquote(p(a)blockquote(p(b)))",
  "---": "hr()",
  "```py title\nx\n\n  y\n```\nz": "pre:py(x\n\n  y)p(z)",
  "1. a\n   ```\n   x\n   ```": "ol(li(apre:(x)))",
  "```\nnot closed": "pre:(not closed)",
  "t:\n| a | b |\n|---|:-:|\n| 1 | `|` |": "p(t:)table(thead(tr(th(a)th(b)))tbody(tr(td(1)td(`))))",
  "[a](https://x.example/b_(c) \"t\") [b](mailto:a@b.c)": "p(a:https://x.example/b_(c)(a) a:mailto:a@b.c(b))",
  "see https://x.example/y. (https://z.example) <https://q.example>":
    "p(see a:https://x.example/y(https://x.example/y). (a:https://z.example(https://z.example)) a:https://q.example(https://q.example))",
  "[https://a.example](https://b.example)": "p(a:https://b.example(https://a.example))",
  "![cat](https://x.example/cat.png)": "p(a:https://x.example/cat.png(cat))",
  "<b>html</b> &amp;": "p(<b>html</b> &amp;)",
  "[x](javascript:alert(1)) [y](/admin)": "p([x](javascript:alert(1)) [y](/admin))",
};

for (const [text, wanted] of Object.entries(CASES)) {
  test(`markdown ${JSON.stringify(text)}`, () => assert.equal(show(parse(text)), wanted));
}

test("whatever is written, only known tags and safe addresses come out", () => {
  const pieces = ["*", "**", "_", "`", "```", "[", "](", "]", "(", ")", "!", "<", ">", "\n", "\n\n", "- ", "1. ", "# ", "|", "|-|", " ",
    "\\", "~~", "javascript:x", "data:x", "https://a.b", "mailto:c@d", "word", "\u0000", "\t", "\r\n", "    "];
  let seed = 7;
  for (let round = 0; round < 4000; round += 1) {
    let text = "";
    for (let count = 0; count < 24; count += 1) {
      seed = (seed * 1103515245 + 12345) % 2 ** 31;
      text += pieces[seed % pieces.length];
    }
    assertSafe(text);
  }
});

test("every beginning of a text can be shown, as a stream shows it", () => {
  const text = Object.keys(CASES).join("\n\n");
  for (let end = 0; end < text.length; end += 1) assertSafe(text.slice(0, end));
});

test("long runs of marks take linear time", () => {
  for (const unit of ["*a ", "[", "[*a", "](", "![](", "`", "`` ` ", "> ", "- ", "a|b\n", "|-\n", "x* ", "~~a", "\\", "<h", "* a\n\n"]) {
    const times = [20_000, 80_000].map((length) => {
      const began = performance.now();
      parse("[a ".repeat(100) + unit.repeat(length / unit.length));
      return performance.now() - began;
    });
    // Four times the text; sixteen times the time would be quadratic. Small times say nothing on a busy machine.
    assert.ok(times[1] < 1000 || times[1] < 10 * times[0], `${unit}: ${times}`);
  }
});

test("marks inside of marks end somewhere", () => {
  for (const text of ["*a **b ".repeat(20_000) + "c** c* ".repeat(20_000), "> ".repeat(20_000), "- ".repeat(20_000)]) {
    assert.ok(JSON.stringify(parse(text)).includes("tag")); // deeper trees would overflow the stack, here and in the page
  }
});

test("events are the same however the bytes are cut", () => {
  const text = 'data: {"a": 1}\n\n: ping\n\ndata: two\r\n\r\ndata: [DONE]\n\n';
  for (let size = 1; size < text.length; size += 1) {
    const reader = new EventReader();
    const events = [];
    for (let at = 0; at < text.length; at += size) events.push(...reader.push(text.slice(at, at + size)));
    assert.deepEqual(events, ['{"a": 1}', "two", "[DONE]"]);
  }
});

test("metrics are summed by name, and rates follow from two readings", () => {
  const read = (tokens) =>
    parseMetrics(`# HELP x y\nlevserve_requests_running 3.0\nlevserve_kv_pages_used 4.0\nlevserve_kv_pages_cached 2.0
levserve_kv_pages_total 16.0\nlevserve_generated_tokens_total ${tokens}\nlevserve_prefill_tokens_total 1e+02
levserve_requests_total{route="/v1/models",status="200"} 2.0\nlevserve_requests_total{route="/",status="200"} 3.0\n`);
  assert.equal(read(0).levserve_requests_total, 5);
  const summary = summarize(read(150), read(50), 2);
  assert.deepEqual(summary, { running: 3, waiting: 0, kv: 25, cached: 12.5, decode: 50, prefill: 0 });
  assert.equal(summarize(read(0), read(50), 2).decode, 0); // the server was started again
  assert.equal(summarize(read(50), undefined, 0).decode, 0);
});

test("code names the key's variable and never a key", () => {
  const request = { origin: "https://host", path: "/v1/completions", body: { prompt: "it's", top_k: 3 }, needsKey: true };
  assert.match(curlCommand(request), /-H "Authorization: Bearer \$LEVSERVE_API_KEY"/);
  assert.match(curlCommand(request), /"it'\\''s"/);
  assert.match(pythonProgram(request), /api_key=os\.environ\["LEVSERVE_API_KEY"\]/);
  assert.match(pythonProgram(request), /extra_body=\{"top_k": 3\}/);
});

test("a note says what is known and no more", () => {
  const usage = { prompt_tokens: 5, completion_tokens: 7, prompt_tokens_details: { cached_tokens: 4 } };
  const whole = { usage, timings: { tokens_per_second: 12.34 }, ttft: 0.0501, finish: "length" };
  assert.equal(describe(whole), "5 tokens in (4 cached) · 7 out · TTFT 50 ms · 12.3 tok/s · reached max_tokens");
  assert.equal(describe({ finish: "stopped" }), "stopped by you");
});

test("a schema and tools become fields, and a mistake in them is told", () => {
  assert.deepEqual(readSchema("  "), {});
  const schema = { type: "object" };
  assert.deepEqual(readSchema(JSON.stringify(schema)).response_format.json_schema.schema, schema);
  const tool = { name: "add", parameters: schema };
  const wanted = { tools: [{ type: "function", function: tool }] };
  assert.deepEqual(readTools(JSON.stringify([tool])), wanted);
  assert.deepEqual(readTools(JSON.stringify(wanted.tools)), wanted);
  assert.deepEqual(readTools("[]"), {});
  for (const text of ["{", "[1]", "null", '"text"', "7"]) assert.throws(() => readSchema(text), Error, text);
  for (const text of ["[", "{}", "[{}]", "[null]", '[{"name": 1}]', '[{"function": {}}]']) {
    assert.throws(() => readTools(text), Error, text);
  }
  assert.throws(() => readSchema("{"), /not JSON/);
});

test("calls are joined from their pieces and sent back as they came", () => {
  const calls = [];
  addCalls(calls, [{ index: 0, id: "a", function: { name: "add", arguments: "" } }]);
  addCalls(calls, [{ index: 0, function: { arguments: '{"x": 1.' } }]);
  addCalls(calls, [{ index: 0, function: { arguments: "50}" } }, { index: 1, id: "b", function: { name: "stop" } }]);
  assert.deepEqual(calls, [
    { id: "a", name: "add", arguments: '{"x": 1.50}' },
    { id: "b", name: "stop", arguments: "" },
  ]);
  const sent = toSent({ role: "assistant", content: "", calls });
  assert.equal(sent.content, null);
  assert.equal(sent.tool_calls[0].function.arguments, '{"x": 1.50}');
  assert.deepEqual(toSent({ role: "tool", callId: "a", content: "" }), { role: "tool", tool_call_id: "a", content: "" });
  assert.equal(toSent({ role: "assistant", content: "" }), null);
  assert.deepEqual(toSent({ role: "user", content: "x", note: "y" }), { role: "user", content: "x" });
  assert.equal(layOut('{"x":1}'), '{\n  "x": 1\n}');
  assert.equal(layOut('{"x": "cut'), '{"x": "cut');
});
