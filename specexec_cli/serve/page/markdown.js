// Markdown as nodes of the document. Text becomes text nodes, so that nothing in a reply is ever
// read as HTML; pictures become links, since this page fetches nothing from elsewhere.

export function rendered(text) {
  const into = document.createDocumentFragment();
  blocks(text.split("\n"), into);
  return into;
}

const DEEPEST = 20; // of quotes and lists in each other; what is deeper is text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;

function blocks(lines, into, depth = 0) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      let end = at + 1;
      while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
      into.append(code(lines.slice(at + 1, end).join("\n"), fence[2]));
      at = end + 1;
    } else if (heading) {
      // the page's own title is the only h1
      into.append(element(`h${Math.min(heading[1].length + 1, 6)}`, inline(heading[2])));
      at += 1;
    } else if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) {
      into.append(document.createElement("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(line) && depth < DEEPEST) {
      at = quote(lines, at, into, depth);
    } else if (ITEM.test(line) && depth < DEEPEST) {
      at = list(lines, at, into, depth);
    } else if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[at + 1] || "")) {
      at = table(lines, at, into);
    } else {
      at = paragraph(lines, at, into);
    }
  }
}

function closes(line, fence) {
  const stripped = line.trim();
  return stripped.length >= fence.length && stripped.replaceAll(fence[0], "") === "";
}

function quote(lines, at, into, depth) {
  const inner = [];
  while (at < lines.length && /^ {0,3}>/.test(lines[at])) inner.push(lines[at++].replace(/^ {0,3}> ?/, ""));
  const node = document.createElement("blockquote");
  blocks(inner, node, depth + 1);
  into.append(node);
  return at;
}

function list(lines, at, into, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const node = document.createElement(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(mark, 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || item[1].length < indent.length) break;
    if (/\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    at += 1;
    // what is indented behind the mark belongs to the item, and so do lines that go on with it
    while (at < lines.length) {
      const next = lines[at];
      const deeper = next.startsWith(indent + "  ");
      const goesOn = next.trim() && !ITEM.test(next) && !FENCE.test(next) && lines[at - 1].trim();
      const gap = !next.trim() && (lines[at + 1] || "").startsWith(indent + "  ");
      if (!deeper && !goesOn && !gap) break;
      inner.push(next.startsWith(indent) ? next.slice(indent.length).replace(/^ {1,4}/, "") : next);
      at += 1;
    }
    const entry = document.createElement("li");
    if (inner.length === 1) entry.append(inline(inner[0]));
    else blocks(inner, entry, depth + 1);
    node.append(entry);
    if (!(lines[at] || "").trim() && ITEM.test(lines[at + 1] || "")) at += 1;
  }
  into.append(node);
  return at;
}

function table(lines, at, into) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, kind) => {
    const node = document.createElement("tr");
    for (const cell of cells(line)) node.append(element(kind, inline(cell)));
    return node;
  };
  const node = document.createElement("table");
  node.append(element("thead", row(lines[at], "th")));
  const body = document.createElement("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|"); at++) body.append(row(lines[at], "td"));
  node.append(body);
  into.append(node);
  return at;
}

function paragraph(lines, at, into) {
  const inner = [lines[at++]];
  const ends = (line) => !line.trim() || FENCE.test(line) || ITEM.test(line) || /^ {0,3}(#{1,6}\s|>)/.test(line);
  while (at < lines.length && !ends(lines[at])) inner.push(lines[at++]);
  into.append(element("p", inline(inner.join("\n"))));
  return at;
}

function code(text, language) {
  const head = document.createElement("div");
  head.append(element("span", language || "code"));
  // browsers give pages of other machines no clipboard without TLS
  if (navigator.clipboard) head.append(copyButton(text));
  const box = element("pre", element("code", text));
  box.tabIndex = 0; // it may be wider than the screen, and is moved by keys then
  const node = element("div", head);
  node.className = "code";
  node.append(box);
  return node;
}

function copyButton(text) {
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  return copy;
}

const INLINE = [
  [/(`+)([^]*?[^`])\1(?!`)/, (found) => element("code", found[2].replace(/^ (.+) $/, "$1"))],
  [/!?\[([^\]]*)\]\((\S+?)(?:\s+"[^"]*")?\)/, (found) => link(found[1] || found[2], found[2])],
  [/(\*\*|__)(?=\S)([^]*?\S)\1/, (found) => element("strong", inline(found[2]))],
  [/(?<![\w*])\*(?=[^\s*])([^*]*[^\s*])\*(?!\*)/, (found) => element("em", inline(found[1]))],
  [/(?<!\w)_(?=[^\s_])([^_]*[^\s_])_(?!\w)/, (found) => element("em", inline(found[1]))],
  [/\bhttps?:\/\/[^\s<>)\]]+[^\s<>)\].,;:!?'"]/, (found) => link(found[0], found[0])],
];

function inline(text) {
  const into = document.createDocumentFragment();
  while (text) {
    let first = null;
    for (const [pattern, make] of INLINE) {
      const found = pattern.exec(text);
      if (found && (!first || found.index < first.found.index)) first = { found, make };
    }
    if (!first) break;
    into.append(text.slice(0, first.found.index), first.make(first.found));
    text = text.slice(first.found.index + first.found[0].length);
  }
  into.append(text);
  return into;
}

function link(text, address) {
  if (!/^(https?:|mailto:)/i.test(address)) return document.createTextNode(`${text} (${address})`);
  const node = element("a", text);
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function element(name, inner) {
  const node = document.createElement(name);
  node.append(inner);
  return node;
}
