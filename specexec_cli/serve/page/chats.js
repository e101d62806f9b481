// Conversations and settings, kept in this browser: one entry of localStorage each.

const CHAT = "specexec.chat.";
const SETTINGS = "specexec.settings";
const deleted = new Set(); // ids: a reply that is still coming must not bring its conversation back

export function newChat() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [], changed: Date.now() };
}

export function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user");
  return first ? first.content.trim().split("\n")[0].slice(0, 60) || "(empty)" : "New chat";
}

// Newest first. What cannot be read is left alone.
export function allChats() {
  const found = [];
  for (let index = 0; index < localStorage.length; index++) {
    const key = localStorage.key(index);
    if (!key.startsWith(CHAT)) continue;
    const chat = parsed(localStorage.getItem(key));
    if (chat && Array.isArray(chat.messages)) found.push(chat);
  }
  return found.sort((one, other) => other.changed - one.changed);
}

// Throws where the browser's room is used up. Deleted ones stay deleted.
export function saveChat(chat) {
  if (deleted.has(chat.id)) return;
  chat.changed = Date.now();
  localStorage.setItem(CHAT + chat.id, JSON.stringify(chat));
}

export function deleteChat(chat) {
  deleted.add(chat.id);
  localStorage.removeItem(CHAT + chat.id);
}

export function loadSettings() {
  return parsed(localStorage.getItem(SETTINGS)) || {};
}

export function saveSettings(settings) {
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
