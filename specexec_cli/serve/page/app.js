// The chat page: what is on the screen, and what its buttons do.

import * as chats from "./chats.js";
import { rendered } from "./markdown.js";
import { allModels, askFor } from "./stream.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];

let settings = chats.loadSettings();
let chat = chats.allChats()[0] || chats.newChat();
let model = null; // facts about it, once the server has told them
let running = null; // AbortController of the reply that is coming, or null
let replied = Promise.resolve(); // when that reply, or the one before, has been put away

function show() {
  $("messages").replaceChildren(...chat.messages.map(messageNode));
  $("empty").hidden = chat.messages.length > 0;
  showChats();
  showButtons();
  scrollDown();
}

function showChats() {
  const saved = chats.allChats();
  const listed = saved.some((one) => one.id === chat.id) ? saved : [chat, ...saved];
  $("chat-list").replaceChildren(
    ...listed.map((one) => {
      const open = button(chats.titleOf(one), () => {
        stop();
        chat = one;
        closeChats();
        show();
        $("draft").focus();
      });
      open.setAttribute("aria-current", one.id === chat.id);
      const remove = button("✕", () => {
        if (one.id === chat.id) stop();
        chats.deleteChat(one);
        if (one.id === chat.id) chat = chats.allChats()[0] || chats.newChat();
        show();
        $("new-chat").focus();
      });
      remove.setAttribute("aria-label", `Delete ${chats.titleOf(one)}`);
      const item = document.createElement("li");
      item.append(open, remove);
      return item;
    }),
  );
}

function showButtons() {
  const last = chat.messages.at(-1);
  $("send").disabled = running !== null;
  $("stop").hidden = running === null;
  $("again").hidden = running !== null || !last;
}

function messageNode(message, index) {
  const item = document.createElement("li");
  item.className = message.role;
  const who = document.createElement("p");
  who.className = "who";
  who.textContent = message.role === "user" ? "You" : model ? model.id : "Model";
  item.append(who);
  if (message.thinking) {
    const details = document.createElement("details");
    details.className = "thinking";
    const summary = document.createElement("summary");
    summary.textContent = "Thinking";
    details.append(summary, message.thinking);
    item.append(details);
  }
  const body = document.createElement("div");
  body.className = "body";
  body.append(message.role === "user" ? message.content : formatted(message.content));
  const after = document.createElement("div");
  after.className = "after";
  if (message.role === "user") after.append(button("Edit", () => edit(index)));
  if (message.stats) after.append(message.stats);
  if (message.cut) {
    const cut = document.createElement("span");
    cut.className = "cut";
    cut.textContent = message.cut;
    after.append(cut);
  }
  item.append(body, after);
  return item;
}

// A reply that cannot be formatted is shown as it is: it must not break the page, at every load.
function formatted(text) {
  try {
    return rendered(text);
  } catch (error) {
    console.warn(error);
    return text;
  }
}

async function edit(index) {
  const mine = chat;
  stop();
  await replied; // the reply that was stopped shows every message anew
  const item = $("messages").children[index];
  if (chat !== mine || !item?.querySelector(".body")) return;
  const field = document.createElement("textarea");
  field.value = chat.messages[index].content;
  field.rows = Math.min(12, field.value.split("\n").length + 1);
  field.setAttribute("aria-label", "Edit the message");
  const row = document.createElement("div");
  row.className = "row";
  const send = button("Send again", () => {
    if (!field.value.trim()) return;
    chat.messages.length = index;
    chat.messages.push({ role: "user", content: field.value });
    reply();
  });
  row.append(send, button("Cancel", show));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show();
    else if (isSend(event)) {
      event.preventDefault();
      send.click();
    }
  });
  item.querySelector(".body").replaceWith(field);
  item.querySelector(".after").replaceWith(row);
  field.focus();
}

// Asks for a reply to the conversation as it stands, and shows it as it comes. `replaced` is the
// text of the one that it stands in for.
function reply(replaced = null) {
  replied = streamReply(replaced);
}

async function streamReply(replaced) {
  const [mine, control] = [chat, new AbortController()];
  const message = { role: "assistant", content: "", thinking: "" };
  const body = requestBody(mine);
  mine.messages.push(message);
  running = control;
  $("problem").textContent = "";
  $("said").textContent = "Waiting for the reply";
  if (model && !model.specexec.open) $("live").textContent = `${model.id} is being opened`;
  keep(mine);
  show();
  let node = $("messages").lastElementChild;
  let painting = false;
  const paint = () => {
    painting = false;
    if (chat !== mine || !node.isConnected) return;
    const follows = nearEnd();
    const next = messageNode(message, mine.messages.length - 1);
    const [before, details] = [node.querySelector("details"), next.querySelector("details")];
    if (before && details) details.open = before.open;
    node.replaceWith(next);
    node = next;
    if (follows) scrollDown();
  };
  try {
    await askFor(body, settings.key, control.signal, (chunk) => {
      take(chunk, message);
      if (!painting) {
        painting = true;
        requestAnimationFrame(paint);
      }
    });
    if (!model?.specexec.open) greet(); // it is open now
    $("said").textContent = `Reply: ${message.content.slice(0, 2000)}`;
    if (message.content === replaced) {
      $("problem").textContent = "The same again: at temperature 0 every seed gives it. Settings has another.";
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    message.cut = stopped ? "stopped" : "incomplete";
    $("said").textContent = stopped ? "Stopped" : "";
    if (!stopped) $("problem").textContent = error.message;
    if (!message.content && !message.thinking) mine.messages.splice(mine.messages.indexOf(message), 1);
  } finally {
    if (running === control) {
      running = null;
      $("live").textContent = "";
    }
    keep(mine);
    if (chat === mine) show();
    else {
      showChats();
      showButtons();
    }
  }
}

function requestBody(mine) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const messages = mine.messages.map(({ role, content }) => ({ role, content }));
  const body = {
    messages: [...system, ...messages],
    stream: true,
    stream_options: { include_usage: true, include_progress: true },
  };
  if (!$("models").hidden) body.model = model.id;
  for (const name of NUMBERS) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

function take(chunk, message) {
  for (const { delta, finish_reason: finish } of chunk.choices) {
    message.content += delta.content || "";
    message.thinking += delta.reasoning_content || "";
    if (finish === "length") message.cut = "cut at the most tokens";
  }
  const now = chunk.specexec;
  if (now) $("live").textContent = now.layer === undefined ? `waiting, ${now.queue} in the queue` : live(now);
  if (chunk.usage) message.stats = statistics(chunk.usage.specexec[0]);
}

function live(now) {
  const facts = [`pass ${now.pass}`, `layer ${now.layer} of ${now.layers}`];
  if (now.bytes_per_s) facts.push(`${(now.bytes_per_s / 1e9).toFixed(2)} GB/s`);
  if (now.draft_nodes) facts.push(`${now.draft_nodes} draft nodes`);
  if (now.tokens_per_pass) facts.push(`${now.tokens_per_pass.toFixed(1)} tokens per pass`);
  if (now.tokens_per_s) facts.push(`${now.tokens_per_s.toFixed(2)} tokens/s`);
  return facts.join(" · ");
}

function statistics(stats) {
  return [
    `${stats.generated_tokens} tokens`,
    `${stats.generation_rate.toFixed(1)} a pass`,
    `${stats.tokens_per_s.toFixed(2)} tokens/s`,
    `seed ${stats.seed}`,
  ].join(" · ");
}

function stop() {
  if (running) running.abort();
}

function keep(one) {
  try {
    chats.saveChat(one);
  } catch {
    $("problem").textContent = "The browser has no room left: delete conversations to keep this one.";
  }
}

function button(text, act) {
  const node = document.createElement("button");
  node.type = "button";
  node.textContent = text;
  node.addEventListener("click", act);
  return node;
}

function nearEnd() {
  const box = $("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function scrollDown() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

function closeChats() {
  $("chats").classList.remove("shown");
  $("show-chats").setAttribute("aria-expanded", "false");
}

function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

async function greet() {
  try {
    const found = await allModels(settings.key);
    model = found.find(({ id }) => id === settings.model) || found.find((one) => one.specexec.open) || found[0];
    $("models").replaceChildren(...found.map(({ id }) => new Option(id, id, false, id === model.id)));
    $("models").hidden = found.length < 2;
    $("model").textContent = `${model.id} · specexec`;
    document.title = `${model.id} · specexec`;
    $("problem").textContent = "";
  } catch (error) {
    $("problem").textContent = error.message;
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("draft").value;
  if (!text.trim() || running) return;
  if (chat.messages.at(-1)?.role === "user") chat.messages.pop(); // it was never answered
  chat.messages.push({ role: "user", content: text });
  $("draft").value = "";
  reply();
});
$("draft").addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => {
  stop();
  $("draft").focus();
});
$("again").addEventListener("click", () => {
  const before = chat.messages.at(-1).role === "assistant" ? chat.messages.pop() : null;
  if (chat.messages.length) reply(before ? before.content : null);
});
$("new-chat").addEventListener("click", () => {
  stop();
  chat = chats.newChat();
  closeChats();
  show();
  $("draft").focus();
});
$("show-chats").addEventListener("click", () => {
  const shown = $("chats").classList.toggle("shown");
  $("show-chats").setAttribute("aria-expanded", String(shown));
});
$("show-settings").addEventListener("click", () => {
  for (const field of $("settings").querySelectorAll("[name]")) field.value = settings[field.name] ?? "";
  $("settings").showModal();
});
$("settings").addEventListener("close", () => {
  const form = new FormData($("settings").querySelector("form"));
  settings = { ...Object.fromEntries(form.entries()), model: settings.model };
  chats.saveSettings(settings);
  greet();
});
// The conversation goes on with the other model, which the next message has opened.
$("models").addEventListener("change", () => {
  settings.model = $("models").value;
  chats.saveSettings(settings);
  greet();
  $("draft").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if ($("chats").classList.contains("shown")) {
    closeChats();
    $("show-chats").focus();
  } else stop();
});

show();
greet();
$("draft").focus();
