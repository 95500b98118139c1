// The chat tab: conversations, their messages, and the answer that is being written. One answer is written at a
// time; another conversation may be looked at meanwhile.

import { ApiError } from "./api.js";
import { callsView, resultsForm, resultView, thoughtsView } from "./calls.js";
import { button, copyButton, element, find } from "./dom.js";
import { soundFields, structureFields } from "./editors.js";
import { describe, describeTimings, generate } from "./generate.js";
import {
  deleteConversation,
  listConversations,
  newConversation,
  readConversation,
  restoreConversation,
  saveConversation,
  titleOf,
} from "./history.js";
import { render } from "./markdown.js";
import { currentModel, hasModel } from "./models.js";
import { announce, notify } from "./notice.js";
import { numAlternatives, samplingFields } from "./sampling.js";
import { read, write } from "./store.js";
import { addCalls, toSent } from "./structure.js";
import { tokenRow } from "./tokens.js";

const PATH = "/v1/chat/completions";
const SAVE_MS = 1000; // while an answer is written, so that a reload loses little of it

let conversation = newConversation(read("system", ""));
let running = null; // {conversation, message, controller} of the answer that is being written
const deleted = new Set(); // ids of conversations that an answer, still being written, must not bring back
const views = new WeakMap(); // the view of each message that is on the screen
let setAside = ""; // what was in the composer when a question was moved there; it comes back after Send
let edited = ""; // the question that was moved there
const tokensOf = new WeakMap(); // kept until the page is closed: they would fill the browser's storage

export function mountChat(showTab) {
  find("composer-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) stop();
    else send();
  });
  find("composer").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) send();
    }
  });
  find("composer").addEventListener("input", fitComposer);
  find("panel-chat").addEventListener("keydown", (event) => event.key === "Escape" && stop());
  find("system").addEventListener("input", () => {
    conversation.system = find("system").value;
    write("system", conversation.system);
    if (conversation.messages.length) save(conversation);
  });
  find("new-chat").addEventListener("click", () => {
    open(newConversation(read("system", "")));
    showTab("chat");
    find("composer").focus();
  });
  find("conversations").addEventListener("click", () => showTab("chat"));
  find("delete-all").addEventListener("click", deleteAll);
  addEventListener("storage", takeChanges); // another tab has changed a conversation
  addEventListener("pagehide", () => running && keep(running.conversation));
  const known = listConversations();
  open(known.find(({ id }) => id === read("open", "")) ?? conversation);
}

/** The request that Send would send, or that led to the last answer. */
export function chatRequest() {
  const draft = find("composer").value.trim();
  const { messages } = conversation;
  const lastQuestion = messages.findLastIndex(isAsked);
  const shown = draft ? [...messages, { role: "user", content: draft }] : messages.slice(0, lastQuestion + 1);
  const asked = shown.length ? shown : [{ role: "user", content: "Hello!" }];
  return { path: PATH, body: { ...chatBody(conversation.system, asked), stream: true } };
}

/** Whether a message is the user's, or the result of a tool, which wants an answer as well. */
const isAsked = ({ role }) => role !== "assistant";

function chatBody(system, messages) {
  const sent = messages.map(toSent).filter(Boolean);
  if (system.trim()) sent.unshift({ role: "system", content: system });
  const count = numAlternatives();
  const logprobs = count === null ? {} : { logprobs: true, top_logprobs: count };
  return { model: currentModel(), messages: sent, ...samplingFields(), ...soundFields("schema", "tools"), ...logprobs };
}

// What the user does

function send() {
  const content = find("composer").value.trim();
  if (!content || !hasModel() || !structureFields("schema", "tools")) return;
  const message = { role: "user", content };
  conversation.messages.push(message);
  find("composer").value = setAside;
  setAside = edited = "";
  fitComposer();
  find("messages").querySelector(".error")?.remove();
  show(message);
  answer();
}

/** Continues after tool calls, with the results that the user entered. */
function sendResults({ calls }, texts) {
  if (running || !hasModel() || !structureFields("schema", "tools")) return;
  const results = calls.map(({ id, name }, index) => ({ role: "tool", callId: id, name, content: texts[index] }));
  conversation.messages.push(...results);
  showMessages();
  answer();
}

function stop() {
  running?.controller.abort();
}

function tryAgain() {
  if (running || !hasModel() || !structureFields("schema", "tools")) return;
  const lastQuestion = conversation.messages.findLastIndex(isAsked);
  conversation.messages.length = lastQuestion + 1;
  showMessages();
  answer();
}

/** Moves a question back into the composer and removes everything after it. A draft there is set aside. */
function edit(message) {
  if (running?.conversation === conversation) stop();
  const draft = find("composer").value;
  if (draft.trim() && draft !== edited) setAside = setAside ? `${setAside}\n${draft}` : draft;
  find("composer").value = edited = message.content;
  conversation.messages.length = conversation.messages.indexOf(message);
  save(conversation);
  showMessages();
  fitComposer();
  find("composer").focus();
}

function remove(unwanted) {
  erase(unwanted);
  if (unwanted.id === conversation.id) open(newConversation(read("system", "")));
  showList();
  find("new-chat").focus();
  const undo = () => {
    restore(unwanted);
    open(unwanted);
  };
  notify(`Deleted “${titleOf(unwanted)}”.`, { label: "Undo", run: undo });
}

function deleteAll() {
  const all = listConversations();
  if (!all.length) return;
  all.forEach(erase);
  open(newConversation(read("system", "")));
  const undo = () => {
    all.forEach(restore);
    showList();
  };
  notify(`Deleted ${all.length} conversations.`, { label: "Undo", run: undo });
}

function erase(unwanted) {
  deleted.add(unwanted.id);
  if (running?.conversation.id === unwanted.id) stop();
  deleteConversation(unwanted);
}

function restore(wanted) {
  deleted.delete(wanted.id);
  restoreConversation(wanted);
}

// The answer

async function answer() {
  const answered = conversation;
  const message = { role: "assistant", content: "", note: "" };
  const controller = new AbortController();
  const body = chatBody(answered.system, answered.messages);
  answered.messages.push(message);
  running = { conversation: answered, message, controller };
  save(answered);
  show(message);
  showRunning();
  announce("Answering");
  const timer = setInterval(() => keep(answered), SAVE_MS);
  try {
    const result = await generate(PATH, body, controller.signal, (...piece) => grow(message, ...piece));
    message.note = describe(result);
    message.detail = describeTimings(result.timings);
    announce(`The answer is finished. ${message.note}`);
  } catch (error) {
    if (error.name === "AbortError") {
      message.note = describe({ finish: "stopped" });
      announce("Stopped");
    } else if (error instanceof ApiError) message.error = error;
    else throw error;
  } finally {
    clearInterval(timer);
    running = null;
    end(answered, message);
  }
}

function grow(message, text, tokens, delta) {
  message.content += text;
  if (delta.reasoning_content) message.thoughts = (message.thoughts ?? "") + delta.reasoning_content;
  if (delta.tool_calls) addCalls((message.calls ??= []), delta.tool_calls);
  if (tokens.length && !tokensOf.has(message)) tokensOf.set(message, []);
  tokensOf.get(message)?.push(...tokens);
  const view = views.get(message);
  if (!view || view.isDue) return;
  view.isDue = true;
  requestAnimationFrame(() => {
    view.isDue = false;
    if (running?.message === message) view.showText();
  });
}

/** Ends an answer: leaves out an empty one, and shows the error if there was one. Thoughts alone are kept. */
function end(answered, message) {
  const { error } = message;
  delete message.error;
  const isEmpty = message.content === "" && !message.calls && !message.thoughts;
  if (isEmpty) answered.messages = answered.messages.filter((other) => other !== message);
  save(answered);
  showRunning();
  if (answered !== conversation) return;
  show(message);
  if (error) showError(error);
}

function save(changed) {
  if (!keep(changed)) notify("This browser has no room for the conversation. Delete some others to keep it.");
  showList();
}

/** Saves a conversation that was not deleted; false if the browser has no room. */
function keep(changed) {
  if (deleted.has(changed.id)) return true;
  const isSaved = saveConversation(changed);
  if (changed === conversation) write("open", changed.id); // saving may have made it a copy
  return isSaved;
}

/** Shows what another tab has written to the open conversation, unless an answer is being written to it here. */
function takeChanges() {
  const stored = readConversation(conversation.id);
  if (stored && stored.version !== conversation.version && running?.conversation !== conversation) {
    const { messages } = conversation;
    const isSame = (message, index) => JSON.stringify(message) === JSON.stringify(messages[index]);
    const firstNew = stored.messages.findIndex((message, index) => !isSame(message, index));
    const numSame = firstNew < 0 ? stored.messages.length : firstNew;
    messages.slice(numSame).forEach((message) => views.get(message)?.element.remove());
    stored.messages.splice(0, numSame, ...messages.slice(0, numSame));
    conversation = stored;
    find("system").value = conversation.system ?? "";
    conversation.messages.slice(Math.max(0, numSame - 1)).forEach(show); // the last one that stays has other buttons
    find("welcome").hidden = conversation.messages.length > 0;
  }
  showList();
}

// What is shown

function open(chosen) {
  conversation = running?.conversation.id === chosen.id ? running.conversation : chosen;
  write("open", conversation.id);
  find("system").value = conversation.system ?? "";
  showMessages();
  showList();
}

function showList() {
  const all = listConversations();
  const focused = document.activeElement.dataset.id;
  find("delete-all").hidden = all.length < 2;
  find("no-conversations").hidden = all.length > 0;
  find("conversations").replaceChildren(
    ...all.map((one) => {
      const title = titleOf(one);
      const isOpen = one.id === conversation.id;
      const current = isOpen ? "true" : null;
      const choose = button(title, () => open(one), { class: "choose", "data-id": one.id, "aria-current": current });
      const erasing = button("×", () => remove(one), { class: "erase quiet", "aria-label": `Delete “${title}”` });
      return element("li", {}, choose, erasing);
    }),
  );
  // The button that had the focus has been replaced by another.
  if (focused) find("conversations").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

function showMessages() {
  find("messages").replaceChildren();
  find("welcome").hidden = conversation.messages.length > 0;
  conversation.messages.forEach(show);
}

/** Shows a message, in its place if it has one: screen readers speak what is new in the transcript, and only that. */
function show(message) {
  const before = views.get(message)?.element;
  const isShown = before?.isConnected ?? false;
  if (!conversation.messages.includes(message)) {
    before?.remove(); // an empty answer
    return;
  }
  const view = (VIEWS[message.role] ?? answerView)(message);
  views.set(message, view);
  if (isShown) before.replaceWith(view.element);
  else find("messages").append(view.element);
  find("welcome").hidden = true;
  find("transcript").scrollTop = find("transcript").scrollHeight;
}

const VIEWS = { user: questionView, assistant: answerView, tool: resultView };

function questionView(message) {
  const body = element("div", { class: "body" }, message.content);
  const foot = element("footer", {}, button("Edit", () => edit(message), { class: "quiet" }), copyButton(() => message.content));
  return { element: element("article", { class: "message user", "aria-label": "You" }, body, foot) };
}

function answerView(message) {
  const isRunning = running?.message === message;
  const body = element("div", { class: "body markdown" });
  const foot = element("footer", {}, element("span", { class: "note", title: message.detail || null }, message.note || ""));
  const thoughts = thoughtsView();
  const calls = callsView();
  const parts = [thoughts.element, body, calls.element];
  const made = element("article", { class: "message assistant", "aria-label": "Answer" }, ...parts);
  made.ariaBusy = String(isRunning);
  made.classList.toggle("running", isRunning);
  const showText = () => {
    const isAtEnd = isScrolledToEnd();
    thoughts.show(message.thoughts);
    render(body, message.content);
    calls.show(message.calls);
    if (isAtEnd) find("transcript").scrollTop = find("transcript").scrollHeight;
  };
  showText();
  if (!isRunning) {
    const isLast = conversation.messages.at(-1) === message;
    if (message.calls && isLast) made.append(resultsForm(message.calls, (texts) => sendResults(message, texts)));
    if (tokensOf.has(message)) foot.append(tokensButton(message, body, showText));
    foot.append(copyButton(() => message.content));
    foot.append(button("Try again", tryAgain, { class: "again quiet" }));
    made.append(foot);
  }
  return { element: made, showText, isDue: false };
}

/** Switches between the text and its tokens. */
function tokensButton(message, body, showText) {
  const toggle = button("Tokens", () => {
    const isOn = toggle.ariaPressed !== "true";
    toggle.ariaPressed = String(isOn);
    body.replaceChildren();
    if (isOn) body.append(tokenRow(tokensOf.get(message)));
    else showText();
  });
  toggle.className = "quiet";
  toggle.ariaPressed = "false";
  return toggle;
}

function showError(error) {
  const again = button("Try again", tryAgain);
  const made = element("div", { class: "error", role: "alert" }, element("p", {}, error.describe()), again);
  find("messages").append(made);
  find("transcript").scrollTop = find("transcript").scrollHeight;
}

function showRunning() {
  find("send").textContent = running ? "Stop" : "Send";
  find("send").classList.toggle("stop", Boolean(running));
  if (document.activeElement === document.body) find("composer").focus(); // the button with the focus is gone
}

function isScrolledToEnd() {
  const { scrollTop, scrollHeight, clientHeight } = find("transcript");
  return scrollHeight - scrollTop - clientHeight < 60;
}

/** Makes the composer as high as its text, up to a third of the window. */
function fitComposer() {
  const area = find("composer");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 3)}px`;
}
