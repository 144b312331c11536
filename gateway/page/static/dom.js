// Builds elements. All text goes in as text: nothing here, and nothing that uses it, parses markup.

/** A new element with attributes, listeners (onclick) and children; strings become text. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** The element of an id of index.html. */
export const byId = (id) => document.getElementById(id);

/** Sets an element's text, if it is another one: what is equal costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const INLINE = /(`+)([\s\S]+?)\1|\*\*([^\s*](?:[\s\S]*?[^\s*])?)\*\*/g;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^ {0,3}(?:([-*+])|\d{1,9}[.)])\s+(.*)$/;

function inline(parent, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(end, match.index));
    parent.append(match[1] ? el("code", {}, match[2]) : el("strong", {}, match[3]));
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
}

/** Shows an answer: paragraphs, lists, code in fences, `code` and **bold**; all else is as it is. */
export function showText(parent, text) {
  const blocks = [];
  let fence = null, code = null, paragraph = [], list = null;
  const flush = () => {
    if (paragraph.length) {
      const made = el("p");
      inline(made, paragraph.join("\n"));
      blocks.push(made);
    }
    paragraph = [];
    list = null;
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      if (mark && mark[1].startsWith(fence) && !mark[2].trim()) fence = null;
      else code.append(line + "\n");
      continue;
    }
    const item = ITEM.exec(line);
    if (mark) {
      flush();
      fence = mark[1];
      code = el("code");
      blocks.push(el("pre", { tabindex: "0" }, code));
    } else if (item) {
      const kind = item[1] ? "ul" : "ol";
      if (!list || list.localName !== kind) {
        flush();
        blocks.push((list = el(kind)));
      }
      const made = el("li");
      inline(made, item[2]);
      list.append(made);
    } else if (!line.trim()) flush();
    else {
      if (list) flush();
      paragraph.push(line);
    }
  }
  flush();
  parent.replaceChildren(...blocks);
}
