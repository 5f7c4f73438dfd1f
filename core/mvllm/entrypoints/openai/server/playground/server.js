"use strict";
/* Requests to the server. Its API key is asked for when it is needed, and kept in this tab only. */

const KEY = "mvllm.key";
const $ = id => document.getElementById(id);
let asking = null;

class ServerError extends Error {}

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
    const dialog = $("key-dialog"), form = $("key-form");
    $("key-text").textContent = text;
    $("key").value = "";
    const end = hasKey => {
      form.onsubmit = dialog.oncancel = $("cancel-key").onclick = asking = null;
      dialog.close();
      resolve(hasKey);
    };
    form.onsubmit = event => { event.preventDefault(); sessionStorage.setItem(KEY, $("key").value.trim()); end(true) };
    dialog.oncancel = event => { event.preventDefault(); end(false) };
    $("cancel-key").onclick = () => end(false);
    dialog.showModal();
    $("key").focus();
  });
  return asking;
}

/* fetch() with the key. With `asks`, a response that says that the key is missing or wrong opens the dialog. */
async function request(path, settings = {}, asks = true) {
  for (;;) {
    const key = sessionStorage.getItem(KEY), headers = { ...settings.headers };
    if (key) headers.Authorization = "Bearer " + key;
    const answer = await fetch(path, { ...settings, headers });
    if (answer.status !== 401) return answer;
    const text = await failure(answer);
    if (key !== sessionStorage.getItem(KEY)) continue;  // another request has asked in the meantime
    sessionStorage.removeItem(KEY);
    if (!asks || !await askForKey(key ? "The server does not accept this key. " + text : "This server needs an API key.")) throw new ServerError(text);
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

/* The pieces of an answer: objects with `content` or `reasoning`, and at the end `usage`. */
async function* streamChat(body, signal) {
  const settings = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const answer = await request("/v1/chat/completions", settings);
  if (!answer.ok) throw new ServerError(await failure(answer));
  for await (const event of events(answer)) {
    if (event.error) throw new ServerError(event.error.message);
    if (event.usage) yield { usage: event.usage };
    if (event.choices?.length) yield event.choices[0].delta;
  }
}
