"use strict";
/* Conversations in the browser's storage, each under a key of its own, so that tabs do not overwrite each other's.

   {id, title, model, updated, messages}; a message is {role, content} as in a request, and has besides

   reasoning   of an answer
   note        tokens and speed of an answer
   partial     the answer is being generated, or was when the page was closed
   stopped     the user has stopped it
   error       why there is no answer, or not all of it
   lost        its attachments did not fit into the storage */

const CONVERSATION = "mvllm.conversation.";

const newConversation = model =>
  ({ id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: "", model, updated: Date.now(), messages: [] });

function readStored(name) {
  try { return JSON.parse(local.getItem(name)) } catch { return null }
}

/* All conversations, the newest first. */
function storedConversations() {
  const found = Object.keys(local).filter(name => name.startsWith(CONVERSATION)).map(readStored);
  return found.filter(each => Array.isArray(each?.messages) && each.messages.every(message => message?.content !== undefined)).sort((a, b) => b.updated - a.updated);
}

const textOf = content => typeof content === "string" ? content : content.filter(part => part.type === "text").map(part => part.text).join("\n");
const attachmentsOf = content => typeof content === "string" ? [] : content.filter(part => part.type !== "text");

function withoutAttachments(conversation) {
  const cut = message => attachmentsOf(message.content).length ? { ...message, content: textOf(message.content), lost: true } : message;
  return { ...conversation, messages: conversation.messages.map(cut) };
}

/* Stores a conversation, without its attachments if there is no room for them. Returns whether it could. */
function store(conversation) {
  return [conversation, withoutAttachments(conversation)].some(each => keep(local, CONVERSATION + conversation.id, JSON.stringify(each)));
}

const remove = conversation => local.removeItem(CONVERSATION + conversation.id);

const titleOf = conversation => {
  const first = conversation.messages.find(message => message.role === "user");
  return conversation.title || (first && textOf(first.content).trim().slice(0, 60)) || (first ? "Attachment" : "New conversation");
};

/* The messages of a request. Questions without an answer are left out, since models expect turns; the last one stays. */
function turns(conversation, system) {
  const given = conversation.messages.filter(message => message.content.length);
  const kept = given.filter((message, i) => message.role === "assistant" ? given[i - 1]?.role === "user" : i === given.length - 1 || given[i + 1].role === "assistant");
  return [...(system ? [{ role: "system", content: system }] : []), ...kept.map(({ role, content }) => ({ role, content }))];
}
