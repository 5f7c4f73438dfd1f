"use strict";
/* Draws Markdown. All text of a model's gets into the page as text nodes: nothing of it is ever read as HTML. */

const DEEPEST = 8;

function make(name, parent, text) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

const isWord = c => c !== undefined && /[\p{L}\p{N}_]/u.test(c);

function inline(text, parent, depth = 0) {
  const missing = new Set();
  let plain = "", i = 0;
  const flush = () => { if (plain) parent.append(plain); plain = "" };
  const find = (mark, from) => {
    if (missing.has(mark)) return -1;
    const at = text.indexOf(mark, from);
    if (at < 0) missing.add(mark);
    return at;
  };
  while (i < text.length) {
    const c = text[i];
    if (c === "\\" && /[\\`*_{}\[\]()#+\-.!~>|]/.test(text[i + 1] ?? "")) { plain += text[i + 1]; i += 2; continue }
    if (c === "`") {
      let mark = "`";
      while (text[i + mark.length] === "`") mark += "`";
      const end = find(mark, i + mark.length);
      if (end >= 0) { flush(); make("code", parent, text.slice(i + mark.length, end).trim()); i = end + mark.length; continue }
      plain += mark; i += mark.length; continue;
    }
    if ((c === "*" || c === "_") && depth < DEEPEST) {
      const mark = text[i + 1] === c ? c + c : c, begin = i + mark.length;
      let end = /\S/.test(text[begin] ?? "") && !(c === "_" && isWord(text[i - 1])) ? find(mark, begin + 1) : -1;
      if (mark.length === 1 && end >= 0 && text[end + 1] === c) end = find(mark, end + 2);
      if (end >= 0 && /\S/.test(text[end - 1]) && !(c === "_" && isWord(text[end + mark.length]))) {
        flush();
        inline(text.slice(begin, end), make(mark.length === 2 ? "strong" : "em", parent), depth + 1);
        i = end + mark.length; continue;
      }
      plain += mark; i += mark.length; continue;
    }
    plain += c; i += 1;
  }
  flush();
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", document.body, text);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/* A button that copies text and says so. */
function copyButton(parent, text) {
  const button = make("button", parent, "Copy");
  button.className = "quiet"; button.type = "button";
  button.addEventListener("click", async () => {
    await copy(text());
    button.textContent = "Copied";
    setTimeout(() => button.textContent = "Copy", 1500);
  });
  return button;
}

function codeBlock(lines, language, parent) {
  const box = make("div", parent), head = make("div", box);
  box.className = "code";
  make("span", head, language);
  copyButton(head, () => lines.join("\n")).setAttribute("aria-label", "Copy the code");
  make("code", make("pre", box), lines.join("\n"));
}

function markdown(text, parent, depth = 0) {
  const lines = text.split("\n");
  let paragraph = [], lists = [];
  const end = () => { if (paragraph.length) inline(paragraph.join("\n"), make("p", parent)); paragraph = [] };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], fence = /^\s*(`{3,}|~{3,})\s*([\w+#.\-]*)/.exec(line);
    if (fence && !line.slice(fence[0].length).includes("`")) {
      end();
      const code = [], indent = line.length - line.trimStart().length, close = fence[1];
      for (i++; i < lines.length; i++) {
        const closing = lines[i].trim();
        if (closing.startsWith(close) && !closing.replaceAll(close[0], "")) break;
        code.push(lines[i].slice(Math.min(indent, lines[i].length - lines[i].trimStart().length)));
      }
      codeBlock(code, fence[2], lists.length && indent ? lists.at(-1).list.lastChild : parent);
      continue;
    }
    const heading = /^ {0,3}(#{1,6})\s+(.*)$/.exec(line), item = /^(\s*)([-*+]|(\d{1,9})[.)])\s+(.*)$/.exec(line);
    if (!line.trim()) { end(); if (!/^\s*([-*+]|\d{1,9}[.)])\s|^\s+\S/.test(lines[i + 1] ?? "")) lists = []; continue }
    if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) { end(); lists = []; make("hr", parent); continue }
    if (heading) { end(); lists = []; inline(heading[2], make("h" + heading[1].length, parent)); continue }
    if (item) {
      end();
      const indent = item[1].length, name = item[3] === undefined ? "ul" : "ol";
      while (lists.length && lists.at(-1).indent > indent) lists.pop();
      if (lists.length && lists.at(-1).indent === indent && lists.at(-1).list.localName !== name) lists.pop();
      if (!lists.length || (lists.at(-1).indent < indent && lists.length < DEEPEST)) {
        const list = make(name, lists.length ? lists.at(-1).list.lastChild : parent);
        if (item[3] !== undefined) list.start = Number(item[3]);
        lists.push({ list, indent });
      }
      inline(item[4], make("li", lists.at(-1).list));
      continue;
    }
    if (line.startsWith(">") && depth < DEEPEST) {
      end(); lists = [];
      const quoted = [];
      for (; i < lines.length && lines[i].startsWith(">"); i++) quoted.push(lines[i].replace(/^> ?/, ""));
      i--;
      markdown(quoted.join("\n"), make("blockquote", parent), depth + 1);
      continue;
    }
    if (lists.length && !paragraph.length) { const last = lists.at(-1).list.lastChild; last.append(" "); inline(line.trim(), last); continue }
    paragraph.push(line);
  }
  end();
}
