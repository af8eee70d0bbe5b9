// The page of a server: a chat, and beside it what the policy reads.
"use strict";

const KEY = "jsparse-api-key";
const LONGEST_WAIT = 15; // seconds between attempts to connect again
const ROWS = 8; // requests listed
const ID_LENGTH = 8; // characters shown of their names, from the end

const $ = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const length = (share) => `${100 * share}%`; // of a bar
const number = (value) =>
  value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });

let model = null;
let continues = false; // without a chat template the model continues a text
let messages = [];
let answering = null; // the AbortController of the answer under way
let listening = new AbortController();

// ---- the server ----

class Refused extends Error {}

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401) {
    throw new Refused("The server wants an API key: enter it in the settings.");
  }
  const body = await response.json().catch(() => null);
  throw new Error(messageOf(body) || `The server answered with status ${response.status}.`);
}

function messageOf(body) {
  const error = body && (body.error || body.detail);
  return error && String(error.message || error);
}

// Yields the JSON of each server-sent event; returns whether the stream said that it is complete.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return false;
    buffer += value;
    const lines = buffer.split(/\r?\n/);
    buffer = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return true;
      yield JSON.parse(data);
    }
  }
}

// ---- the chat ----

function show(role, text) {
  $("empty").hidden = true;
  const article = document.createElement("article");
  article.className = role;
  const title = document.createElement("h3");
  title.textContent = role === "user" ? "You" : model || "Model";
  const body = document.createElement("p");
  body.textContent = text;
  article.append(title, body);
  $("messages").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

function remark(article, text) {
  const note = document.createElement("div");
  note.className = "note";
  note.textContent = text;
  article.append(note);
  note.scrollIntoView({ block: "nearest" });
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function setAnswering(controller) {
  answering = controller;
  const held = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  if (held) (controller ? $("stop") : $("text")).focus();
}

function request() {
  const body = { model, stream: true, max_tokens: $("max-tokens").valueAsNumber };
  if ($("temperature").value !== "") body.temperature = $("temperature").valueAsNumber;
  if (!continues) return ["v1/chat/completions", { ...body, messages }];
  return ["v1/completions", { ...body, prompt: messages.map((each) => each.content).join("\n") }];
}

async function send() {
  const content = $("text").value;
  if (answering || !content.trim()) return;
  if (!$("composer").checkValidity()) {
    $("settings").open = true;
    $("composer").reportValidity();
    return;
  }
  problem("");
  const controller = new AbortController();
  const chat = messages;
  setAnswering(controller);
  chat.push({ role: "user", content });
  const question = show("user", content);
  $("text").value = "";
  const article = show("assistant", "");
  article.setAttribute("aria-busy", "true");
  let answer = "";
  try {
    if (!model) await loadModel();
    const said = await stream(controller.signal, (piece) => {
      const log = $("messages");
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      answer += piece;
      article.querySelector("p").append(piece);
      if (follows) log.scrollTop = log.scrollHeight;
    });
    if (said === "length") remark(article, "Cut at the most new tokens of the settings.");
  } catch (error) {
    if (controller.signal.aborted) remark(article, "Stopped.");
    else problem(error.message);
  }
  article.removeAttribute("aria-busy");
  if (answer || controller.signal.aborted) {
    chat.push({ role: "assistant", content: answer });
  } else if (!$("problem").hidden) { // nothing came: the question goes back into its field
    chat.pop();
    question.remove();
    article.remove();
    $("text").value ||= content;
    $("empty").hidden = chat.length > 0;
  }
  if (answering === controller) setAnswering(null);
}

// Sends the conversation and hands on the pieces of the answer; returns why it ended.
async function stream(signal, onPiece) {
  const [path, body] = request();
  const response = await ask(path, { method: "POST", body: JSON.stringify(body), signal });
  let reason = null;
  const pieces = events(response);
  for (;;) {
    const { done, value } = await pieces.next().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The connection was lost.");
    });
    if (done && !value) throw new Error("The connection was lost before the answer was complete.");
    if (done) return reason;
    if (value.error) throw new Error(messageOf(value));
    for (const choice of value.choices || []) {
      const piece = continues ? choice.text : choice.delta.content;
      if (piece) onPiece(piece);
      reason = choice.finish_reason || reason;
    }
  }
}

function newChat() {
  if (answering) answering.abort();
  setAnswering(null);
  messages = [];
  document.querySelectorAll("article").forEach((each) => each.remove());
  $("empty").hidden = false;
  problem("");
  $("text").focus();
}

// ---- what is read ----

async function loadModel() {
  const listed = await (await ask("v1/models")).json();
  model = listed.data[0].id;
  continues = listed.data[0].chat_template === false;
  $("model").textContent = model;
  $("policy").textContent = listed.data[0].policy_short || listed.data[0].policy || "";
  document.title = `${model} · jsparse`;
}

function draw(live) {
  drawLayers(live.attended_by_layer);
  const bound = live.dense_bound_tokens_per_second;
  const most = Math.max(live.tokens_per_second, bound || 0) || 1;
  $("rate").textContent = number(live.tokens_per_second);
  $("rate-bar").style.width = length(live.tokens_per_second / most);
  // a bar says nothing without another one
  $("rate-bar").parentElement.hidden = $("dense").hidden = $("bound-bar").parentElement.hidden =
    bound === null;
  $("bound").textContent = bound === null ? "" : number(bound);
  $("bound-bar").style.width = length((bound || 0) / most);
  $("cache").textContent = percent(live.kv_cache_usage);
  $("cache-bar").style.width = length(live.kv_cache_usage);
  const asked = live.prefix_cache_queries;
  $("prefix").textContent = asked ? percent(live.prefix_cache_hits / asked) : "none asked for";
  drawRequests(live);
}

function drawLayers(shares) {
  const known = Boolean(shares && shares.length);
  $("layers").hidden = $("layers-ends").hidden = !known;
  if (!known) {
    $("attended-mean").textContent = "idle";
    return;
  }
  const bars = $("layers");
  while (bars.children.length < shares.length) bars.append(document.createElement("i"));
  while (bars.children.length > shares.length) bars.lastChild.remove();
  shares.forEach((share, layer) => {
    bars.children[layer].style.height = length(share);
    bars.children[layer].title = `layer ${layer}: ${percent(share)}`;
  });
  const mean = shares.reduce((sum, share) => sum + share, 0) / shares.length;
  const whole = mean > 0.9995 && !$("policy").textContent.startsWith("dense");
  $("attended-mean").textContent = whole ? "100 %, the text is short for this policy"
    : `${percent(mean)} on average`;
  $("last-layer").textContent = `layer ${shares.length - 1}`;
  bars.setAttribute(
    "aria-label",
    `Share of the tokens attended to: ${shares.map((s, l) => `layer ${l} ${percent(s)}`).join(", ")}`,
  );
}

function drawRequests(live) {
  $("counts").textContent = `${live.running} running, ${live.waiting} waiting`;
  const rows = live.requests.slice(0, ROWS).map((each) => {
    const row = document.createElement("tr");
    const id = each.id.slice(-ID_LENGTH);
    for (const value of [id, each.phase, number(each.prompt_tokens), number(each.tokens)]) {
      const cell = document.createElement("td");
      cell.textContent = value;
      row.append(cell);
    }
    row.title = each.id;
    row.children[2].className = row.children[3].className = "number";
    return row;
  });
  $("requests").replaceChildren(...rows);
  const more = live.requests.length - rows.length;
  $("more-requests").textContent = more > 0 ? `and ${more} more` : "";
}

async function listen() {
  let wait = 1;
  for (;;) {
    listening = new AbortController();
    const { signal } = listening;
    let said = "The connection to the server was lost.";
    try {
      if (!model) await loadModel();
      for await (const live of events(await ask("live", { signal }))) {
        $("connection").textContent = "";
        $("live").hidden = false;
        draw(live);
        wait = 1;
      }
    } catch (error) {
      if (error.name !== "TypeError") said = error.message; // that of a stream that breaks
    }
    if (signal.aborted) continue; // the key has changed
    $("live").hidden = true;
    $("connection").textContent = `${said} Trying again in ${wait} s.`;
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, 1000 * wait);
      signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); });
    });
    wait = signal.aborted ? 1 : Math.min(2 * wait, LONGEST_WAIT);
  }
}

// ---- the controls ----

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => answering && answering.abort());
$("new").addEventListener("click", newChat);
$("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, $("key").value.trim());
  problem("");
  listening.abort();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && answering) answering.abort();
});

$("key").value = sessionStorage.getItem(KEY) || "";
$("composer").noValidate = true; // send() asks for it, after it has opened the settings
listen();
