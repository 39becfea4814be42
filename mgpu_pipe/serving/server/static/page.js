// Talks to the server that this page came from. Texts are set as text, never as HTML.
"use strict";
const at = (id) => document.getElementById(id);
let token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
let model = "", messages = [], running = null;

function show(kind, text) {
  const line = document.createElement("div");
  line.className = kind;
  line.textContent = text;
  at("talk").append(line);
  line.scrollIntoView();
  return line;
}

async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const signal = running?.signal;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers };
  const response = await fetch(path, options);
  if (response.ok) return response;
  const error = (await response.json().catch(() => ({}))).error;
  throw new Error(error ? error.message : response.statusText);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function send(text) {
  const isChat = at("chat").checked;
  const limits = { model, stream: true, temperature: +at("temperature").value, max_tokens: +at("tokens").value };
  const line = (show("user", text), show("answer", ""));
  const asked = [...messages, { role: "user", content: text }];
  running = new AbortController();
  at("send").disabled = !(at("stop").disabled = false);
  try {
    const response = isChat
      ? await call("/v1/chat/completions", { ...limits, messages: asked })
      : await call("/v1/completions", { ...limits, prompt: text });
    for await (const event of events(response)) {
      const choice = event.choices[0];
      line.textContent += (isChat ? choice.delta.content : choice.text) || "";
    }
    if (isChat) messages = [...asked, { role: "assistant", content: line.textContent }];
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  running = null;
  at("send").disabled = !(at("stop").disabled = true);
}

async function start() {
  for (;;) {
    try {
      model = (await (await call("/v1/models")).json()).data[0].id;
      at("name").textContent = model;
      return;
    } catch (error) {
      const given = prompt(`${error.message}. The token:`);
      if (given === null) return void show("error", error.message);
      token = given.trim();
    }
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value;
  if (running || !text) return;
  at("text").value = "";
  send(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("reset").addEventListener("click", () => { messages = []; at("talk").replaceChildren(); });
start();
