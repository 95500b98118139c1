// Markdown as models write it, into elements. `parse` is pure: text in, a tree of plain objects out. `render` makes
// elements of the tree with createElement and text nodes. HTML in the text stays text, links lead only to web and
// mail addresses, and pictures are shown as links, so that an answer never makes the browser fetch anything.
//
// A node is a string or {tag, children} with `href` (a), `start` (ol), `align` (th, td), or {tag: "pre", lang, text}.
// Every loop here and in inline.js takes time linear in the text, whatever a model writes: there is no regular
// expression with nested repetition, and an unmatched mark is looked for only once.

import { copyButton, element } from "./dom.js";
import { parseInline } from "./inline.js";

const MAX_DEPTH = 10; // of nested quotes and lists; deeper ones stay text
const TAGS = new Set("a blockquote br code del em h3 h4 h5 h6 hr li ol p strong table tbody td th thead tr ul".split(" "));

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const QUOTE = /^ {0,3}> ?/;

export function parse(text) {
  return parseBlocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

/** Shows the text in the container. Blocks that have not changed keep their elements, and with them a selection. */
export function render(container, text) {
  const blocks = parse(text);
  blocks.forEach((block, index) => {
    const signature = JSON.stringify(block);
    const shown = container.childNodes[index];
    if (shown && signatures.get(shown) === signature) return;
    const made = build(block);
    signatures.set(made, signature);
    if (shown) shown.replaceWith(made);
    else container.append(made);
  });
  while (container.childNodes.length > blocks.length) container.lastChild.remove();
}

const signatures = new WeakMap();

function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.tag === "pre") return buildCode(node);
  if (!TAGS.has(node.tag)) throw new Error(`markdown makes no ${node.tag}`);
  const made = element(node.tag);
  for (const child of node.children) made.append(build(child));
  if (node.tag === "a") Object.assign(made, { href: node.href, target: "_blank", rel: "noopener noreferrer" });
  if (node.tag === "ol") made.start = node.start;
  if (node.align) made.classList.add(`align-${node.align}`);
  return node.tag === "table" ? element("div", { class: "table", tabindex: "0" }, made) : made;
}

function buildCode({ lang, text }) {
  const head = element("div", { class: "code-head" }, element("span", {}, lang || "text"), copyButton(() => text));
  const code = element("pre", { tabindex: "0" }, element("code", {}, text));
  return element("div", { class: "code" }, head, code);
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let index = 0;
  while (index < lines.length) {
    if (lines[index].trim() === "") {
      index += 1;
      continue;
    }
    const parsed =
      parseFence(lines, index) ??
      parseHeading(lines, index) ??
      parseRule(lines, index) ??
      (depth < MAX_DEPTH ? (parseQuote(lines, index, depth) ?? parseList(lines, index, depth)) : null) ??
      parseTable(lines, index) ??
      parseParagraph(lines, index);
    blocks.push(parsed.block);
    index = parsed.next;
  }
  return blocks;
}

function parseFence(lines, index) {
  const opening = FENCE.exec(lines[index]);
  if (!opening) return null;
  const [, fence, info] = opening;
  const indent = lines[index].indexOf(fence[0]);
  const body = [];
  let next = index + 1;
  // A fence that is not closed yet, in the middle of a stream, reaches to the end.
  for (; next < lines.length; next += 1) {
    const closing = lines[next].trim();
    if (closing.length >= fence.length && closing === fence[0].repeat(closing.length)) {
      next += 1;
      break;
    }
    body.push(lines[next].slice(Math.min(indent, leadingSpaces(lines[next]))));
  }
  return { block: { tag: "pre", lang: info.trim().split(/\s/)[0], text: body.join("\n") }, next };
}

function parseHeading(lines, index) {
  const found = HEADING.exec(lines[index]);
  if (!found) return null;
  const text = (found[2] ?? "").trimEnd().replace(/(^|[ \t])#+$/, "");
  // The page's own headings are h1 and h2.
  const tag = `h${Math.min(found[1].length + 2, 6)}`;
  return { block: { tag, children: parseInline(text) }, next: index + 1 };
}

function parseRule(lines, index) {
  const marks = lines[index].replaceAll(" ", "");
  const isRule = marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
  return isRule ? { block: { tag: "hr", children: [] }, next: index + 1 } : null;
}

function parseQuote(lines, index, depth) {
  const inner = [];
  let next = index;
  for (; next < lines.length && QUOTE.test(lines[next]); next += 1) inner.push(lines[next].replace(QUOTE, ""));
  if (next === index) return null;
  return { block: { tag: "blockquote", children: parseBlocks(inner, depth + 1) }, next };
}

function parseList(lines, index, depth) {
  const first = ITEM.exec(lines[index]);
  if (!first) return null;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let next = index;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next]);
    const isSibling = found && /\d/.test(found[2]) === isOrdered && found[1].length <= first[1].length + 1;
    if (!isSibling || parseRule(lines, next)) break;
    const item = takeItem(lines, next, found);
    items.push({ tag: "li", children: unwrapParagraph(parseBlocks(item.lines, depth + 1)) });
    next = item.next;
  }
  if (!items.length) return null;
  const block = { tag: isOrdered ? "ol" : "ul", children: items };
  if (isOrdered) block.start = parseInt(first[2], 10);
  return { block, next };
}

/** The lines of one item without their indent: those indented further than its mark, and continued paragraphs. */
function takeItem(lines, index, found) {
  const width = Math.min(found[0].length, found[1].length + found[2].length + 4);
  const isInside = (line) => leadingSpaces(line) > found[1].length + 1;
  const taken = [lines[index].slice(width)];
  let next = index + 1;
  while (next < lines.length) {
    if (lines[next].trim() === "") {
      while (next < lines.length && lines[next].trim() === "") next += 1;
      if (next === lines.length || !isInside(lines[next])) break;
      taken.push("");
    } else if (!isInside(lines[next]) && startsBlock(lines, next)) break;
    taken.push(lines[next].slice(Math.min(width, leadingSpaces(lines[next]))));
    next += 1;
  }
  return { lines: taken, next };
}

/** An item's first paragraph stands in the item itself, so that lists of short lines stay tight. */
function unwrapParagraph(blocks) {
  const [first, ...rest] = blocks;
  return first?.tag === "p" ? [...first.children, ...rest] : blocks;
}

function parseTable(lines, index) {
  if (!isTable(lines, index)) return null;
  const heads = splitRow(lines[index]);
  const aligns = splitRow(lines[index + 1]).map(readAlign);
  const row = (cells, tag) => ({
    tag: "tr",
    children: heads.map((_, column) => ({ tag, align: aligns[column], children: parseInline(cells[column] ?? "") })),
  });
  const body = [];
  let next = index + 2;
  for (; next < lines.length && lines[next].includes("|"); next += 1) body.push(row(splitRow(lines[next]), "td"));
  const children = [
    { tag: "thead", children: [row(heads, "th")] },
    { tag: "tbody", children: body },
  ];
  return { block: { tag: "table", children }, next };
}

/** Whether this line is a table's head: the next one is its rule, |---|---|, with as many cells. */
function isTable(lines, index) {
  if (index + 1 >= lines.length || !lines[index].includes("|") || !lines[index + 1].includes("-")) return false;
  const rules = splitRow(lines[index + 1]);
  return rules.length === splitRow(lines[index]).length && rules.every((rule) => /^:?-+:?$/.test(rule));
}

function readAlign(rule) {
  if (!rule.endsWith(":")) return null;
  return rule.startsWith(":") ? "center" : "right";
}

function splitRow(line) {
  const bare = line.trim().replace(/^\|/, "");
  const cells = bare.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  if (cells.length > 1 && cells.at(-1) === "") cells.pop();
  return cells;
}

function parseParagraph(lines, index) {
  let next = index + 1;
  while (next < lines.length && lines[next].trim() !== "" && !startsBlock(lines, next)) next += 1;
  const text = lines.slice(index, next).map((line) => line.trim()).join("\n");
  return { block: { tag: "p", children: parseInline(text) }, next };
}

function startsBlock(lines, index) {
  const isMarked = [FENCE, HEADING, QUOTE, ITEM].some((pattern) => pattern.test(lines[index]));
  return isMarked || parseRule(lines, index) !== null || isTable(lines, index);
}

function leadingSpaces(line) {
  return line.length - line.trimStart().length;
}
