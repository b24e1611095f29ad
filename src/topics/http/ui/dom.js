// Elements from values. Text becomes text nodes and nothing else: no markup is ever made out of data.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return dress(document.createElement(tag), props, children);
}

export function s(tag, props, ...children) {
  return dress(document.createElementNS(SVG, tag), props, children);
}

function dress(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

export function add(node, children) {
  for (const child of children.flat(3)) {
    if (child !== undefined && child !== null && child !== false) node.append(child);
  }
  return node;
}

export function set(node, ...children) {
  node.replaceChildren();
  return add(node, children);
}

// Fills anew only when what is shown has changed: a button that stays keeps its focus, and a click that is half done.
const filled = new WeakMap();
export function redo(node, value, build) {
  const mark = JSON.stringify(value);
  if (filled.get(node) === mark) return;
  filled.set(node, mark);
  set(node, build());
}

// Changes text only where it differs: what stands still keeps its selection.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// At once, and then not again before so many milliseconds have passed; the last call is never lost.
export function throttle(work, ms) {
  let timer = 0;
  let isWanted = false;
  const run = () => {
    isWanted = false;
    timer = setTimeout(() => {
      timer = 0;
      if (isWanted) run();
    }, ms);
    work();
  };
  return () => {
    if (timer) isWanted = true;
    else run();
  };
}

export const $ = (selector, root = document) => root.querySelector(selector);

let made = 0;
export const fresh = (stem) => `${stem}-${++made}`;

const toasts = document.getElementById("toasts");

export function toast(text, kind = "good") {
  const node = h("p", { class: `toast ${kind}` }, text);
  toasts.append(node);
  while (toasts.children.length > 4) toasts.firstChild.remove();
  setTimeout(() => node.remove(), kind === "bad" ? 9000 : 4000);
}

// A modal dialog that is gone from the page when it is closed. `build` fills it and gets a function that closes it.
export function dialog(title, build, { wide = false, onclose } = {}) {
  const label = fresh("dialog");
  const close = () => node.close();
  const body = h("div", { class: "body" });
  const node = h(
    "dialog",
    { class: wide ? "wide" : "", "aria-labelledby": label },
    h(
      "header",
      {},
      h("h2", { id: label }, title),
      h("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: close }, "✕"),
    ),
    body,
  );
  node.addEventListener("close", () => {
    node.remove();
    onclose?.();
  });
  // A click on the backdrop is one on the dialog itself.
  node.addEventListener("mousedown", (event) => event.target === node && close());
  add(body, [build(close)]);
  document.body.append(node);
  node.showModal();
  return node;
}
