// Markdown inside a block: emphasis, code, links. Text in, a list of nodes out, as markdown.js describes them.

const MARKS = { "*": "em", "**": "strong", _: "em", __: "strong", "~~": "del" };
const SAFE_ADDRESS = /^(?:https?:\/\/|mailto:)[^\s\x00-\x1f]+$/i;
const BARE_ADDRESS = /https?:\/\/[^\s<>"'`[\]]+/iy;
const PLAIN = /[^\\`\n[!\]*_~hH<]+/y; // nothing in it can begin or end anything
const MAX_BRACKETS = 10; // nested, in an address
const MAX_OPEN = 50; // marks that are not closed yet, and so how deep the tree can get

export function parseInline(text) {
  return new Inline(text).parse();
}

/**
 * One pass over the text. Marks that may begin something are written as text and remembered in `openers`; the mark
 * that closes one moves what was written since into its own node. What is never closed stays text.
 */
class Inline {
  #text;
  #at = 0;
  #nodes = [];
  #openers = [];
  #numOpen = {}; // openers of each mark, so that a mark without one is not looked for
  #unclosedCode = new Set();

  constructor(text) {
    this.#text = text;
  }

  parse() {
    while (this.#at < this.#text.length) this.#step();
    return this.#nodes;
  }

  #step() {
    const character = this.#text[this.#at];
    if (character === "\\") this.#readEscape();
    else if (character === "`") this.#readCode();
    else if (character === "\n") this.#push({ tag: "br", children: [] }, 1);
    else if (character === "[") this.#open("[", 1);
    else if (character === "!" && this.#text[this.#at + 1] === "[") this.#open("[", 2);
    else if (character === "]") this.#closeLink();
    else if ("*_~".includes(character)) this.#readMarks(character);
    else if (!this.#readAddress()) this.#readPlain();
  }

  #readPlain() {
    PLAIN.lastIndex = this.#at;
    const text = PLAIN.exec(this.#text)?.[0] ?? this.#text[this.#at];
    this.#write(text, text.length);
  }

  #write(text, length) {
    // An opener's text must stay a separate node, which is removed when the opener is closed.
    const isAfterOpener = this.#openers.at(-1)?.place === this.#nodes.length - 1;
    if (typeof this.#nodes.at(-1) === "string" && !isAfterOpener) this.#nodes[this.#nodes.length - 1] += text;
    else this.#nodes.push(text);
    this.#at += length;
  }

  #push(node, length) {
    this.#nodes.push(node);
    this.#at += length;
  }

  #open(mark, length) {
    if (this.#openers.length === MAX_OPEN) {
      this.#write(this.#text.slice(this.#at, this.#at + length), length);
      return;
    }
    this.#openers.push({ mark, place: this.#nodes.length });
    this.#numOpen[mark] = (this.#numOpen[mark] ?? 0) + 1;
    this.#push(this.#text.slice(this.#at, this.#at + length), length);
  }

  #findOpener(mark) {
    return this.#numOpen[mark] ? this.#openers.findLastIndex((opener) => opener.mark === mark) : -1;
  }

  /** Forgets the opener and all after it: their marks stay text. */
  #forget(depth) {
    for (const { mark } of this.#openers.splice(depth)) this.#numOpen[mark] -= 1;
  }

  /** Removes and returns what was written since the opener. */
  #take(depth) {
    const { place } = this.#openers[depth];
    this.#forget(depth);
    const [, ...children] = this.#nodes.splice(place);
    return children;
  }

  #readEscape() {
    const next = this.#text[this.#at + 1];
    if (next !== undefined && /[!-/:-@[-`{-~]/.test(next)) this.#write(next, 2);
    else this.#write("\\", 1);
  }

  #readCode() {
    const length = this.#runLength("`");
    const start = this.#at + length;
    const end = this.#unclosedCode.has(length) ? -1 : this.#findCodeEnd(start, length);
    if (end < 0) {
      this.#unclosedCode.add(length);
      this.#write("`".repeat(length), length);
      return;
    }
    const code = this.#text.slice(start, end).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
    this.#push({ tag: "code", children: [isPadded ? code.slice(1, -1) : code] }, end + length - this.#at);
  }

  #findCodeEnd(start, length) {
    for (let at = this.#text.indexOf("`", start); at >= 0; at = this.#text.indexOf("`", at)) {
      let end = at;
      while (this.#text[end] === "`") end += 1;
      if (end - at === length) return at;
      at = end;
    }
    return -1;
  }

  #runLength(character) {
    let end = this.#at;
    while (this.#text[end] === character) end += 1;
    return end - this.#at;
  }

  #readMarks(character) {
    const length = this.#runLength(character);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + length] ?? " ";
    const isWord = (one) => /[\p{L}\p{N}]/u.test(one);
    const isInWord = character === "_" && isWord(before) && isWord(after); // snake_case has no emphasis
    const canOpen = after.trim() !== "" && !isInWord;
    const canClose = before.trim() !== "" && !isInWord;
    for (const size of this.#sizes(character, length)) {
      const mark = character.repeat(size);
      if (canClose && this.#closeMark(mark)) continue;
      if (canOpen && mark in MARKS) this.#open(mark, size);
      else this.#write(mark, size);
    }
  }

  /** *** opens ** and then *, and closes them in the reverse order. */
  #sizes(character, length) {
    if (length !== 3 || character === "~") return [length];
    return this.#openers.at(-1)?.mark === character ? [1, 2] : [2, 1];
  }

  #closeMark(mark) {
    const depth = this.#findOpener(mark);
    const isEmpty = depth >= 0 && this.#openers[depth].place === this.#nodes.length - 1;
    if (depth < 0 || isEmpty) return false;
    this.#push({ tag: MARKS[mark], children: this.#take(depth) }, mark.length);
    return true;
  }

  #closeLink() {
    const depth = this.#findOpener("[");
    const target = depth < 0 ? null : this.#readTarget();
    if (!target) {
      if (depth >= 0) this.#forget(depth);
      this.#write("]", 1);
      return;
    }
    // An address inside a link's text is not another link.
    const children = this.#take(depth).flatMap((child) => (child.tag === "a" ? child.children : child));
    this.#push({ tag: "a", href: target.href, children: children.length ? children : [target.href] }, target.length);
  }

  /** The (address "title") after a ], if the address is safe. */
  #readTarget() {
    if (this.#text[this.#at + 1] !== "(") return null;
    const end = this.#findTargetEnd(this.#at + 2);
    if (end < 0) return null;
    const [address] = this.#text.slice(this.#at + 2, end).trim().split(/\s/, 1);
    const href = address.replace(/^<(.*)>$/, "$1");
    return SAFE_ADDRESS.test(href) ? { href, length: end + 1 - this.#at } : null;
  }

  #findTargetEnd(start) {
    const limit = Math.min(this.#text.length, start + 2000);
    let depth = 0;
    for (let at = start; at < limit; at += 1) {
      if (this.#text[at] === "\n") return -1;
      if (this.#text[at] === "(" && ++depth > MAX_BRACKETS) return -1;
      if (this.#text[at] === ")" && depth-- === 0) return at;
    }
    return -1;
  }

  #readAddress() {
    if (!/[hH<]/.test(this.#text[this.#at]) || /\w/.test(this.#text[this.#at - 1] ?? "")) return false;
    const isBracketed = this.#text[this.#at] === "<";
    BARE_ADDRESS.lastIndex = this.#at + (isBracketed ? 1 : 0);
    const found = BARE_ADDRESS.exec(this.#text)?.[0];
    if (!found) return false;
    const isClosed = isBracketed && this.#text[BARE_ADDRESS.lastIndex] === ">";
    if (isBracketed && !isClosed) return false;
    const href = isClosed ? found : trimAddress(found);
    this.#push({ tag: "a", href, children: [href] }, href.length + (isClosed ? 2 : 0));
    return true;
  }
}

/** A full stop or a bracket after an address is rarely a part of it. */
function trimAddress(address) {
  const firstBracket = address.indexOf("(");
  let end = address.length;
  while (".,;:!?*_~)".includes(address[end - 1])) {
    const isOwnBracket = address[end - 1] === ")" && firstBracket >= 0 && firstBracket < end - 1;
    if (isOwnBracket) break;
    end -= 1;
  }
  return address.slice(0, end);
}
