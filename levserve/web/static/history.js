// The conversations that this browser keeps. Each has an entry of its own, so that two open pages do not overwrite
// each other's. A conversation that another page has changed since it was read is saved as a copy, so that both are kept.
// A conversation is {id, version, updated, system, messages}, where version changes with every save; a message is
// {role, content, note}, an answer may also have {thoughts, calls: [{id, name, arguments}]}, and the result of a tool has {callId, name}.

import { names, read, remove, write } from "./store.js";

const START = "chat.";
const TITLE_LENGTH = 60;

export function newConversation(system = "") {
  return { id: newId(), version: "", updated: Date.now(), system, messages: [] };
}

/** All conversations, the latest first; corrupt entries are left out. */
export function listConversations() {
  const found = names(START).map((name) => read(name, null));
  return found.filter(isConversation).sort((one, other) => other.updated - one.updated);
}

/** The conversation of this id as it is stored; null if there is none. */
export function readConversation(id) {
  const found = read(START + id, null);
  return isConversation(found) ? found : null;
}

/** Saves a conversation as the latest one; false if the browser has no room. */
export function saveConversation(conversation) {
  conversation.updated = Date.now();
  return restoreConversation(conversation);
}

/** Saves without making it the latest one. */
export function restoreConversation(conversation) {
  const stored = readConversation(conversation.id);
  if (stored && stored.version !== conversation.version) conversation.id = newId();
  const before = conversation.version;
  conversation.version = newId();
  const isSaved = write(START + conversation.id, conversation);
  if (!isSaved) conversation.version = before; // what is stored is still the one before
  return isSaved;
}

export function deleteConversation(conversation) {
  remove(START + conversation.id);
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  const line = (first?.content ?? "").trim().replace(/\s+/g, " ");
  if (!line) return "New conversation";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

function newId() {
  // randomUUID exists only over HTTPS and on localhost.
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
}

function isConversation(found) {
  const isMessage = (message) => typeof message?.content === "string" && typeof message.role === "string";
  return typeof found?.id === "string" && Array.isArray(found.messages) && found.messages.every(isMessage);
}
