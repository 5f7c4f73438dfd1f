"use strict";
/* The page: the conversation that is shown, those of the list, and the state of the server. */

const NUMBERS = ["temperature", "top_p", "top_k", "seed", "max_tokens"];
const SETTINGS = [...NUMBERS, "reasoning_effort", "system"];
const SETTINGS_KEY = "mvllm.settings", MODEL_KEY = "mvllm.model", SHOWN_KEY = "mvllm.shown";
const GENERAL = ["What can you help me with?", "Explain a KV cache in three sentences.",
  "Write a Python function that tests whether a number is prime.", "Tell me a short story about a lighthouse."];
const ABOUT_A_PICTURE = "What is in the picture?";
const SAMPLE_RATE = 16000, WAV_HEADER = 44;
const answering = new Map();  // by id, the conversations that are being answered: {asked, controller}
const boxes = new Map();  // elements of the shown messages
let conversation = newConversation(""), cards = [], attachments = [], recorder = null, phase = null, leaves = false;

const card = () => cards.find(each => each.id === $("model").value);
const can = capability => !card()?.capabilities || card().capabilities.includes(capability);
const takes = modality => Boolean(card()?.input_modalities?.includes(modality));

function button(parent, text, run, kind = "quiet") {
  const made = make("button", parent, text);
  made.type = "button"; made.className = kind;
  made.addEventListener("click", run);
  return made;
}

/* The conversation */

function showAttachments(parts, parent, remove) {
  parent.replaceChildren();
  parts.forEach((part, i) => {
    const place = remove ? button(parent, "", () => remove(i), "") : parent;
    if (remove) place.setAttribute("aria-label", "Remove attachment " + (i + 1));
    if (part.type === "image_url") {
      const image = make("img", place);
      image.setAttribute("src", part.image_url.url);
      image.alt = "picture " + (i + 1);
    } else {
      const seconds = (part.input_audio.data.length * 3 / 4 - WAV_HEADER) / 2 / SAMPLE_RATE;
      make("span", place, part.input_audio.format === "wav" ? `voice, ${seconds.toFixed(1)} s` : "audio").className = "chip";
    }
  });
}

function setAttachments(parts) {
  attachments = parts;
  showAttachments(parts, $("attachments"), i => setAttachments(attachments.filter((_, j) => j !== i)));
}

/* Draws a message anew. */
function drawMessage(message) {
  const box = boxes.get(message);
  if (!box) return;
  const last = conversation.messages.at(-1) === message, busy = answering.has(conversation.id);
  box.replaceChildren();
  box.className = "message " + message.role;
  box.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  box.setAttribute("aria-busy", Boolean(message.partial && busy));
  const parts = attachmentsOf(message.content);
  if (parts.length) { const row = make("div", box); row.className = "attachments"; showAttachments(parts, row) }
  if (message.reasoning) {
    const details = make("details", box);
    details.className = "reasoning";
    details.open = !message.content;
    make("summary", details, "Reasoning");
    make("div", details, message.reasoning);
  }
  const body = make("div", box), text = textOf(message.content);
  body.className = "body";
  if (message.role === "user") body.textContent = text; else markdown(text, body);
  if (message.partial && busy && !text && !message.reasoning) body.classList.add("waiting");
  if (message.error) make("div", box, message.error).className = "error";
  if (message.partial && busy) return;
  const foot = make("footer", box);
  const note = message.note ?? (message.stopped ? "stopped" : message.partial ? "broken off" : message.lost ? "its attachments did not fit into the browser's storage" : "");
  if (note) make("span", foot, note);
  if (text) copyButton(foot, () => text).setAttribute("aria-label", "Copy the message");
  if (message.role === "assistant" && last) button(foot, "Retry", retry).setAttribute("aria-label", "Retry: generate this answer again");
  if (message.role === "user" && !busy && message === conversation.messages.findLast(each => each.role === "user")) button(foot, "Edit", edit).setAttribute("aria-label", "Edit this message");
}

const isAtEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
const scrollToEnd = () => { $("log").scrollTop = $("log").scrollHeight };

function showConversation() {
  boxes.clear();
  $("log").replaceChildren();
  for (const message of conversation.messages) boxes.set(message, make("article", $("log")));
  conversation.messages.forEach(drawMessage);
  if (!conversation.messages.length) showEmpty();
  if (conversation.model && cards.some(each => each.id === conversation.model)) $("model").value = conversation.model;
  showAbilities();
  showList();
  scrollToEnd();
}

function showEmpty() {
  const empty = make("div", $("log"));
  empty.id = "empty";
  if (!cards.length) return make("p", empty, phase === "loading" ? "The model is being loaded." : "");
  if (!can("chat")) {
    const other = can("completion") ? "It has no chat template. POST /v1/completions continues text with it."
      : can("embedding") ? "It makes embeddings: POST /v1/embeddings." : "It classifies or ranks texts: POST /classify, /v1/score or /v1/rerank.";
    return make("p", empty, `The model ${$("model").value} does not chat. ${other}`);
  }
  const state = card()?.status?.value;
  make("p", empty, state && state !== "loaded" ? "This model is loaded when it gets the first message." : "Ask the model something, or begin with an example.");
  const row = make("div", empty);
  for (const content of card()?.example_messages?.length ? card().example_messages : GENERAL) {
    const example = button(row, "", () => send(content));
    for (const part of attachmentsOf(content)) {
      const image = make("img", example);
      image.setAttribute("src", part.image_url.url);
      image.alt = "";
    }
    make("span", example, textOf(content));
  }
  if (takes("image") && !card().example_messages?.length) button(row, "Ask about a picture", () => { $("text").value ||= ABOUT_A_PICTURE; $("file").click() });
}

/* Shows what the model can do, and hides the rest. */
function showAbilities() {
  const busy = answering.has(conversation.id);
  $("attach").hidden = !takes("image");
  $("record").hidden = !takes("audio");
  $("reasoning-label").hidden = !card()?.capabilities?.includes("reasoning");
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").disabled = !busy && !can("chat");
  $("text").disabled = !can("chat");
  const changed = SETTINGS.some(name => $(name).value !== "");
  $("open-settings").classList.toggle("changed", changed);
  $("open-settings").setAttribute("aria-label", changed ? "Settings (changed)" : "Settings");
}

function save() {
  if (!conversation.messages.length) return;
  const stored = store(conversation) && !(local instanceof PageStorage);
  $("stored").textContent = stored ? "Stored in this browser only." : "Not stored: the browser's storage is full, or not permitted.";
  if (!stored) announce($("stored").textContent);
  showList();
}

function announce(text) { $("announcement").textContent = text }

function send(content) {
  if (answering.has(conversation.id)) return;
  conversation.messages.push({ role: "user", content });
  answer();
}

function sendForm() {
  const text = $("text").value.trim();
  if (answering.has(conversation.id) || !can("chat") || !(text || attachments.length)) return;
  if (!$("settings-form").checkValidity()) { openSettings(); $("settings-form").reportValidity(); return }
  const content = attachments.length ? [...attachments, ...(text ? [{ type: "text", text }] : [])] : text;
  $("text").value = "";
  setAttachments([]);
  send(content);
}

function retry() {
  if (answering.has(conversation.id)) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  answer();
}

/* Takes back the last message of the user and its answer, to be changed. */
function edit() {
  const i = conversation.messages.findLastIndex(message => message.role === "user"), [{ content }] = conversation.messages.splice(i);
  $("text").value = textOf(content);
  setAttachments(attachmentsOf(content));
  if (conversation.messages.length) save(); else remove(conversation);
  showConversation();
  $("text").focus();
}

const duration = ms => ms < 2000 ? Math.round(ms) + " ms" : (ms / 1000).toFixed(1) + " s";

function requestBody(asked) {
  const body = { model: asked.model || undefined, messages: turns(asked, $("system").value.trim()), stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if (!$("reasoning-label").hidden && $("reasoning_effort").value) body.reasoning_effort = $("reasoning_effort").value;
  return body;
}

/* Generates the answer to the last message. It goes on when another conversation is shown. */
async function answer() {
  const asked = conversation, controller = new AbortController(), begun = performance.now();
  Object.assign(asked, { model: $("model").value, updated: Date.now() });
  const body = requestBody(asked), message = { role: "assistant", content: "", partial: true };
  asked.messages.push(message);
  answering.set(asked.id, { asked, controller });
  save();
  showConversation();
  announce("The model answers.");
  let first = 0, usage = null, reason = null, drawing = null, stored = begun;
  const draw = () => {
    drawing = null;
    const follows = isAtEnd();
    drawMessage(message);
    if (follows && asked === conversation) scrollToEnd();
    if (performance.now() - stored > 2000) { stored = performance.now(); store(asked) }
  };
  try {
    for await (const piece of streamChat(body, controller.signal)) {
      usage = piece.usage ?? usage;
      reason = piece.finish_reason ?? reason;
      if (piece.content || piece.reasoning) first ||= performance.now();
      if (piece.reasoning) message.reasoning = (message.reasoning ?? "") + piece.reasoning;
      if (piece.content) message.content += piece.content;
      drawing ??= setTimeout(draw, 40 + message.content.length / 100);
    }
  } catch (error) {
    if (leaves) return;  // the browser ends requests of a page that is closed
    if (error.name === "AbortError") message.stopped = true;
    else message.error = error instanceof ServerError ? error.message : "The server cannot be reached.";
  }
  clearTimeout(drawing);
  delete message.partial;
  if (usage && first) {
    const seconds = Math.max((performance.now() - first) / 1000, 1e-3), rate = (usage.completion_tokens / seconds).toFixed(0);
    message.note = `${usage.completion_tokens} tokens, the first after ${duration(first - begun)}, then ${rate} tokens/s`;
    if (reason === "length") message.note += ", cut off at the limit of tokens";
  }
  answering.delete(asked.id);
  if (storedConversations().some(each => each.id === asked.id)) store(asked);  // unless it has been deleted
  if (asked === conversation) {
    const follows = isAtEnd();
    asked.messages.slice(-2).forEach(drawMessage);
    if (follows) scrollToEnd();
    showAbilities();
    announce(message.error ?? (message.stopped ? "Stopped." : message.content));
  }
  if (!card()?.capabilities) await listModels().catch(() => {});  // a model that the request has loaded
}

/* The list of conversations */

/* A conversation of the list as it is at present: the object that an answer is being added to, or that of the storage. */
const current = each => each.id === conversation.id ? conversation : answering.get(each.id)?.asked ?? readStored(CONVERSATION + each.id) ?? each;

function openConversation(next) {
  conversation = next;
  keep(session, SHOWN_KEY, next.id);
  if (isNarrow()) showSide(false);
  showConversation();
  if (!isNarrow()) $("text").focus();
}

function showList() {
  if ($("list").querySelector("input")) return;  // a name is being changed
  const all = storedConversations();
  $("list").replaceChildren();
  for (const each of all) {
    const row = make("li", $("list")), name = button(row, titleOf(each), () => openConversation(current(each)), "");
    name.title = titleOf(each);
    row.classList.toggle("current", each.id === conversation.id);
    if (each.id === conversation.id) name.setAttribute("aria-current", "true");
    const actions = make("span", row);
    actions.className = "actions";
    button(actions, "Rename", () => rename(row, each), "").setAttribute("aria-label", "Rename " + titleOf(each));
    const sure = button(actions, "Delete", () => {
      if (sure.textContent === "Delete") { sure.textContent = "Sure?"; setTimeout(() => sure.textContent = "Delete", 4000); return }
      answering.get(each.id)?.controller.abort();
      remove(each);
      if (each.id === conversation.id) openConversation(newConversation($("model").value)); else showList();
    }, "");
    sure.setAttribute("aria-label", "Delete " + titleOf(each));
  }
}

function rename(row, each) {
  const input = document.createElement("input"), before = titleOf(each);
  input.value = before;
  input.setAttribute("aria-label", "Name of the conversation");
  row.firstChild.replaceWith(input);
  input.select();
  const end = keep => {
    input.onblur = null;
    input.remove();
    const renamed = current(each);
    if (keep && input.value.trim() && input.value !== before) { renamed.title = input.value.trim(); store(renamed) }
    showList();
  };
  input.onblur = () => end(true);
  input.onkeydown = event => { if (event.key === "Enter" || event.key === "Escape") { event.stopPropagation(); end(event.key === "Enter") } };
}

/* Pictures and voice */

function readAsURL(file) {
  const reader = new FileReader();
  return new Promise((done, failed) => {
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

async function attach(files) {
  for (const file of files) {
    const [modality, kind] = file.type.split("/");
    if (modality === "image" && takes("image")) {
      const part = { type: "image_url", image_url: { url: await readAsURL(file) } };
      setAttachments([...attachments, part]);
    } else if (modality === "audio" && takes("audio")) {
      const data = (await readAsURL(file)).split(",")[1], format = kind.replace("x-", "").replace("mpeg", "mp3");
      setAttachments([...attachments, { type: "input_audio", input_audio: { data, format } }]);
    }
  }
}

/* A recording as a WAV file: 16 kHz, one channel, 16 bits. */
async function toWav(recording) {
  const context = new OfflineAudioContext(1, 1, SAMPLE_RATE), sound = await context.decodeAudioData(await recording.arrayBuffer());
  const samples = sound.getChannelData(0), view = new DataView(new ArrayBuffer(WAV_HEADER + 2 * samples.length));
  const put = (at, text) => [...text].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  put(0, "RIFF"); put(8, "WAVEfmt "); put(36, "data");
  view.setUint32(4, 36 + 2 * samples.length, true);
  [[16, 16, 4], [20, 1, 2], [22, 1, 2], [24, SAMPLE_RATE, 4], [28, 2 * SAMPLE_RATE, 4], [32, 2, 2], [34, 16, 2], [40, 2 * samples.length, 4]]
    .forEach(([at, value, bytes]) => bytes === 4 ? view.setUint32(at, value, true) : view.setUint16(at, value, true));
  samples.forEach((sample, i) => view.setInt16(WAV_HEADER + 2 * i, 32767 * Math.max(-1, Math.min(1, sample)), true));
  return new File([view], "voice.wav", { type: "audio/wav" });
}

async function record() {
  const failed = error => {
    recorder = null;
    $("record").textContent = "No recording";
    $("record").title = navigator.mediaDevices ? error.message : "Browsers give a page the microphone only over HTTPS, or on this machine.";
    announce($("record").title);
  };
  if (recorder) return recorder.stop();
  $("record").disabled = true;
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true }), pieces = [];
    recorder = new MediaRecorder(stream);
    recorder.ondataavailable = event => pieces.push(event.data);
    recorder.onstop = async () => {
      stream.getTracks().forEach(track => track.stop());
      recorder = null;
      $("record").textContent = "Voice";
      await toWav(new Blob(pieces)).then(file => attach([file])).catch(failed);
    };
    recorder.start();
    $("record").textContent = "End recording";
  } catch (error) { failed(error) }
  $("record").disabled = false;
}

/* The state of the server */

async function listModels(asks) {
  const answer = await request("v1/models", {}, asks);
  if (!answer.ok) throw new ServerError(await failure(answer));
  const before = JSON.stringify(cards), chosen = $("model").value || conversation.model || local.getItem(MODEL_KEY);
  cards = (await answer.json()).data;
  if (JSON.stringify(cards) === before) return;
  $("model").replaceChildren();
  for (const each of cards) make("option", $("model"), each.id).value = each.id;
  if (cards.some(each => each.id === chosen)) $("model").value = chosen;
  $("model").hidden = false;
  if (conversation.messages.length) showAbilities(); else showConversation();
}

/* Shows a value of the server's state, and hides it where the server has none. */
function showState(name, text) {
  for (const place of document.querySelectorAll(`[data-state=${name}]`)) {
    place.textContent = text ?? "-";
    place.parentElement.hidden = text === undefined;
  }
}

async function look(asks) {
  try {
    const answer = await request("load", {}, asks), load = answer.ok ? await answer.json() : {};
    const changed = phase !== load.phase;
    phase = load.phase;
    showState("phase", load.phase ?? "-");
    showState("running", load.num_requests_running);
    showState("waiting", load.num_requests_waiting);
    showState("cache", load.kv_cache_usage === undefined ? undefined : (100 * load.kv_cache_usage).toFixed(1) + " %");
    showState("rate", load.generation_tokens_per_second?.toFixed(0));
    const { models } = load, isLoading = models?.[$("model").value]?.state === "loading";  // of a router
    for (const place of document.querySelectorAll(".waiting")) place.dataset.why = isLoading ? "The model is being loaded " : "";
    if (changed || !cards.length) await listModels(asks);
  } catch (error) {
    phase = null;
    if (error instanceof KeyError || !(error instanceof ServerError)) showState("phase", error instanceof KeyError ? "no key" : "away");
  }
  setTimeout(look, document.hidden ? 5000 : 1000, false);
}

/* Settings */

function openSettings() { $("change-key").hidden = !session.getItem(KEY) && phase !== null; $("settings").showModal() }

function readSettings() {
  const stored = readStored(SETTINGS_KEY) ?? {};
  for (const name of SETTINGS) $(name).value = stored[name] ?? "";
}

function settingsChanged() {
  keep(local, SETTINGS_KEY, JSON.stringify(Object.fromEntries(SETTINGS.map(name => [name, $(name).value]))));
  showAbilities();
}

/* Events */

const narrow = matchMedia("(max-width: 48rem)");
const isNarrow = () => narrow.matches;

function showSide(shown) {
  document.body.classList.toggle("closed", !shown);
  $("menu").setAttribute("aria-expanded", shown);
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (answering.has(conversation.id)) answering.get(conversation.id).controller.abort(); else sendForm();
});
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); sendForm() }
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (isNarrow() && !document.body.classList.contains("closed")) showSide(false); else answering.get(conversation.id)?.controller.abort();
});
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => { await attach($("file").files); $("file").value = ""; $("text").focus() });
$("record").addEventListener("click", record);
$("text").addEventListener("paste", event => {
  const { files } = event.clipboardData;
  if (files.length && !event.clipboardData.getData("text")) { event.preventDefault(); attach(files) }  // office programs offer text as a picture, too
});
for (const name of ["dragover", "dragleave", "drop"]) document.body.addEventListener(name, event => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  document.body.classList.toggle("over", name === "dragover" && (takes("image") || takes("audio")));
  if (name === "drop") attach(event.dataTransfer.files);
});
$("model").addEventListener("focus", () => listModels(false).catch(() => {}));
$("model").addEventListener("change", () => {
  keep(local, MODEL_KEY, $("model").value);
  conversation.model = $("model").value;
  setAttachments(attachments.filter(part => takes(part.type === "image_url" ? "image" : "audio")));
  if (conversation.messages.length) showAbilities(); else showConversation();
});
$("new").addEventListener("click", () => { setAttachments([]); openConversation(newConversation($("model").value)) });
$("menu").addEventListener("click", event => { event.stopPropagation(); showSide(document.body.classList.contains("closed")) });
document.addEventListener("click", event => { if (isNarrow() && event.target.isConnected && !$("side").contains(event.target)) showSide(false) });
$("open-settings").addEventListener("click", openSettings);
$("settings-form").addEventListener("submit", event => { event.preventDefault(); $("settings").close() });
$("settings-form").addEventListener("input", settingsChanged);
$("defaults").addEventListener("click", () => { for (const name of SETTINGS) $(name).value = ""; settingsChanged() });
$("change-key").addEventListener("click", async () => {
  $("settings").close();
  if (await askForKey("The key for this server.")) await listModels().catch(() => {});
});
addEventListener("storage", event => {  // another tab has changed something
  if (!event.key?.startsWith(CONVERSATION)) return;
  const changed = event.newValue && event.key === CONVERSATION + conversation.id && readStored(event.key);
  if (changed && !answering.has(changed.id) && !changed.messages.at(-1)?.partial) { conversation = changed; showConversation() } else showList();
});
addEventListener("pagehide", () => { leaves = true; for (const { asked } of answering.values()) store(asked) });
addEventListener("pageshow", event => { if (event.persisted) location.reload() });

narrow.addEventListener("change", () => showSide(!isNarrow()));
readSettings();
showSide(!isNarrow());
conversation = storedConversations().find(each => each.id === session.getItem(SHOWN_KEY)) ?? conversation;
keep(session, SHOWN_KEY, conversation.id);
showConversation();
look(true);
if (!matchMedia("(pointer: coarse)").matches) $("text").focus();
