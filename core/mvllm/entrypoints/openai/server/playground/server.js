"use strict";
/* Requests to the server. Its API key is asked for when it is needed, and kept in this tab only. */

const KEY = "mvllm.key";
const $ = id => document.getElementById(id);
let asking = null;

class ServerError extends Error {}
class KeyError extends ServerError {}

/* Stands in for a storage that the browser does not permit, until the page is closed. */
class PageStorage {
  getItem(name) { return this[name] ?? null }
  setItem(name, value) { this[name] = value }
  removeItem(name) { delete this[name] }
}

function storageOf(name) {
  try { return window[name] ?? new PageStorage() } catch { return new PageStorage() }
}

const local = storageOf("localStorage"), session = storageOf("sessionStorage");

/* Stores a string, and returns whether the browser could: its storage may be full. */
function keep(storage, name, value) {
  try { storage.setItem(name, value); return true } catch { return false }
}

/* What the server says about a response that failed. */
async function failure(answer) {
  try {
    const { error } = await answer.json();
    return error.message ?? String(error);
  } catch { return "The server answered with status " + answer.status + "." }
}

/* Shows the dialog for the key. Resolves to whether there is a new one. */
function askForKey(text) {
  asking ??= new Promise(resolve => {
    const dialog = $("key-dialog");
    let hasKey = false;
    $("key-text").textContent = text;
    $("key").value = "";
    $("key-form").onsubmit = event => { event.preventDefault(); hasKey = keep(session, KEY, $("key").value.trim()); dialog.close() };
    $("cancel-key").onclick = () => dialog.close();
    dialog.onclose = () => { asking = null; resolve(hasKey) };
    dialog.showModal();
    $("key").focus();
  });
  return asking;
}

/* fetch() with the key, of a path beside that of the page, which a proxy may have put below a prefix. With `asks`, a response that says that the key is missing or wrong opens the dialog. */
async function request(path, settings = {}, asks = true) {
  for (;;) {
    const key = session.getItem(KEY), headers = { ...settings.headers };
    if (key) headers.Authorization = "Bearer " + key;
    const answer = await fetch(path, { ...settings, headers });
    if (answer.status !== 401) return answer;
    if (key !== session.getItem(KEY)) continue;  // another request has asked in the meantime
    session.removeItem(KEY);
    const why = key ? "The server does not accept this key." : "This server needs an API key.";
    if (!asks || !await askForKey(why)) throw new KeyError(why);
  }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("The server closed the connection before the answer was complete.");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(data);
    }
  }
}

/* The pieces of an answer: objects with `content` or `reasoning`, and at the end `finish_reason` and `usage`. */
async function* streamChat(body, signal) {
  const settings = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const answer = await request("v1/chat/completions", settings);
  if (!answer.ok) throw new ServerError(await failure(answer));
  for await (const event of events(answer)) {
    if (event.error) throw new ServerError(event.error.message);
    if (event.usage) yield { usage: event.usage };
    for (const { delta, finish_reason } of event.choices ?? []) yield { ...delta, finish_reason };
  }
}
