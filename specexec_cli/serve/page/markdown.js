// Markdown as nodes of the document. Text becomes text nodes, so that nothing in a reply is ever
// read as HTML; pictures become links, since this page fetches nothing from elsewhere. Replies are
// rendered anew with each of their parts, so the work grows no faster than the text: no pattern here
// tries a stretch of it more than once.

export function rendered(text) {
  const into = document.createDocumentFragment();
  blocks(text.split("\n"), into);
  return into;
}

const DEEPEST = 20; // of quotes and lists in each other; what is deeper is text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+/;

function blocks(lines, into, depth = 0) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      let end = at + 1;
      while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
      into.append(code(lines.slice(at + 1, end).join("\n"), fence[2]));
      at = end + 1;
    } else if (heading) {
      // the page's own title is the only h1
      const level = Math.min(heading[1].length + 1, 6);
      into.append(element(`h${level}`, inline(title(line.slice(heading[0].length)))));
      at += 1;
    } else if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) {
      into.append(document.createElement("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(line) && depth < DEEPEST) {
      at = quote(lines, at, into, depth);
    } else if (ITEM.test(line) && depth < DEEPEST) {
      at = list(lines, at, into, depth);
    } else if (line.includes("|") && isRule(lines[at + 1] || "")) {
      at = table(lines, at, into);
    } else {
      at = paragraph(lines, at, into);
    }
  }
}

// Text behind the marks of a heading, without those that may close it.
function title(text) {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return text.slice(0, end).trimEnd();
}

// Whether a line parts a table's head from its body.
function isRule(line) {
  return line.includes("-") && /^[\s|:-]+$/.test(line);
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
    const inner = [lines[at].slice(item[0].length)];
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

// What may begin at a character: given the text as Spans, it tells where that ends and what it is.
const INLINE = {
  "`": codeSpan,
  "!": (spans, at) => (spans.text[at + 1] === "[" ? linkSpan(spans, at + 1) : null),
  "[": linkSpan,
  "*": (spans, at) => strongSpan(spans, at) || starSpan(spans, at),
  _: (spans, at) => strongSpan(spans, at) || lowLineSpan(spans, at),
  h: addressSpan,
};

function inline(text) {
  const into = document.createDocumentFragment();
  const spans = new Spans(text);
  const starts = /[`![*_h]/g;
  let told = 0; // what stands before is in the fragment
  for (let mark; (mark = starts.exec(text)); ) {
    spans.fresh = mark.index === told;
    const found = INLINE[mark[0]](spans, mark.index);
    if (!found) continue;
    starts.lastIndex = found.end;
    if (!found.node) continue;
    into.append(text.slice(told, mark.index), found.node);
    told = found.end;
  }
  into.append(text.slice(told));
  return into;
}

// A text that is asked, from its beginning to its end, where something comes next.
class Spans {
  constructor(text) {
    this.text = text;
    this.fresh = true; // what begins now follows a span, or nothing
    this.places = new Map();
  }

  // Where `what` comes next, the text's length if nowhere; `from` never gets smaller.
  next(what, from, fits = () => true) {
    let at = this.places.get(what) ?? -1;
    while (at < from || (at < this.text.length && !fits(at))) {
      at = this.text.indexOf(what, Math.max(at + 1, from));
      if (at < 0) at = this.text.length;
    }
    this.places.set(what, at);
    return at;
  }

  // Where the next white space is, as next().
  space(from) {
    let at = this.places.get(" ") ?? -1;
    if (at < from) {
      const found = /\s/g;
      found.lastIndex = from;
      at = found.exec(this.text)?.index ?? this.text.length;
      this.places.set(" ", at);
    }
    return at;
  }

  // For each run of backticks, by where it begins, where the next one of its length does.
  get runs() {
    if (!this.found) {
      this.found = new Map();
      const last = new Map();
      for (const run of [...this.text.matchAll(/`+/g)].reverse()) {
        this.found.set(run.index, { length: run[0].length, closes: last.get(run[0].length) });
        last.set(run[0].length, run.index);
      }
    }
    return this.found;
  }

  // Whether a character is there that `pattern` fits.
  has(at, pattern) {
    return at < this.text.length && pattern.test(this.text[at]);
  }
}

function codeSpan(spans, at) {
  const { length, closes } = spans.runs.get(at);
  if (closes === undefined) return { end: at + length }; // not a shorter run of them either
  const inner = spans.text.slice(at + length, closes);
  const padded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
  return { end: closes + length, node: element("code", padded ? inner.slice(1, -1) : inner) };
}

function linkSpan(spans, at) {
  const label = spans.next("]", at);
  if (spans.text[label + 1] !== "(") return null;
  const begins = label + 2;
  const space = spans.space(begins);
  let ends = spans.next(")", begins);
  let behind = ends;
  if (space < ends) {
    ends = space;
    behind = titleEnd(spans, space);
  }
  if (ends === begins || behind === null || behind >= spans.text.length) return null;
  const address = spans.text.slice(begins, ends);
  return { end: behind + 1, node: link(spans.text.slice(at + 1, label) || address, address) };
}

// Where the parenthesis closes behind a title in quotes that follows the white space at `at`, or null.
function titleEnd(spans, at) {
  if (spans.title?.at !== at) {
    spans.title = { at, end: null };
    const opens = /\s+"/y;
    opens.lastIndex = at;
    if (opens.test(spans.text)) {
      const closes = spans.next('"', opens.lastIndex);
      if (spans.text[closes + 1] === ")") spans.title.end = closes + 1;
    }
  }
  return spans.title.end;
}

function strongSpan(spans, at) {
  const mark = spans.text.slice(at, at + 2);
  if (mark[0] !== mark[1] || !spans.has(at + 2, /\S/)) return null;
  const closes = spans.next(mark, at + 3, (place) => /\S/.test(spans.text[place - 1]));
  if (closes >= spans.text.length) return null;
  return { end: closes + 2, node: element("strong", inline(spans.text.slice(at + 2, closes))) };
}

function starSpan(spans, at) {
  if ((!spans.fresh && spans.has(at - 1, /[\w*]/)) || !spans.has(at + 1, /[^\s*]/)) return null;
  const closes = spans.next("*", at + 1);
  if (closes >= spans.text.length || /\s/.test(spans.text[closes - 1])) return null;
  if (spans.text[closes + 1] === "*") return null;
  return { end: closes + 1, node: element("em", inline(spans.text.slice(at + 1, closes))) };
}

function lowLineSpan(spans, at) {
  if ((!spans.fresh && spans.has(at - 1, /\w/)) || !spans.has(at + 1, /[^\s_]/)) return null;
  const closes = spans.next("_", at + 1);
  if (closes >= spans.text.length || /\s/.test(spans.text[closes - 1])) return null;
  if (spans.has(closes + 1, /\w/)) return null;
  return { end: closes + 1, node: element("em", inline(spans.text.slice(at + 1, closes))) };
}

function addressSpan(spans, at) {
  if (!spans.fresh && spans.has(at - 1, /\w/)) return null;
  const whole = /https?:\/\/[^\s<>)\]]+/y;
  whole.lastIndex = at;
  const found = whole.exec(spans.text);
  if (!found) return null;
  let end = whole.lastIndex;
  while (/[.,;:!?'"]/.test(spans.text[end - 1])) end -= 1;
  const address = spans.text.slice(at, end);
  return /:\/\/[^]{2}/.test(address) ? { end, node: link(address, address) } : null;
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
