// The frame around the views: where one is (the hash), colours, keys, and the question for an API key.

import { $, h, dialog, say, set } from "./dom.js";
import { changeKey, forgetKey, get, hasKey, hooks, poll } from "./api.js";
import { legend } from "./fates.js";
import { mountTopics } from "./topics.js";
import { mountRouters } from "./routers.js";
import { mountPipelines } from "./pipelines.js";
import { mountServer } from "./server.js";

const main = $("#main");
const VIEWS = { topics: mountTopics, routers: mountRouters, pipelines: mountPipelines, server: mountServer };
let shown = { view: null, close() {}, go() {}, keys: {} };

// -- where one is ---------------------------------------------------------------------------------------------------

function place() {
  const [view = "topics", name] = location.hash.replace(/^#\/?/, "").split("/");
  let topic = null;
  try {
    topic = name ? decodeURIComponent(name) : null;
  } catch {
    // A hash that somebody has broken is no place.
  }
  return { view: Object.hasOwn(VIEWS, view) ? view : "topics", topic };
}

function go() {
  const { view, topic } = place();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = topic ? `${topic} · topics` : `${view} · topics`;
  if (shown.view !== view) {
    shown.close();
    set(main);
    main.className = `view-${view}`;
    shown = { view, ...VIEWS[view](main, topic) };
  }
  shown.go?.(topic);
}

// -- how the server is ----------------------------------------------------------------------------------------------

const state = $("#state");
const WORDS = { ok: "connected", offline: "not reachable", locked: "needs a key" };

hooks.onState = (word, progress) => {
  if (word === "ok" && state.dataset.state === "read_only") return;
  state.dataset.state = word;
  say(state, word === "starting" ? `starting ${Math.round((progress ?? 0) * 100)} %` : WORDS[word]);
  $("#key").hidden = !(hasKey() || word === "locked");
};

poll(async () => {
  const ready = await get("v0/ready");
  if (ready.status === "read_only") {
    state.dataset.state = "read_only";
    say(state, "read-only");
    state.title = ready.reason ?? "";
  } else if (state.dataset.state === "read_only") {
    state.dataset.state = "ok";
    say(state, WORDS.ok);
    state.title = "";
  }
}, 5000);

// -- the key --------------------------------------------------------------------------------------------------------

hooks.askForKey = (wrong) =>
  new Promise((resolve) => {
    let given = null;
    dialog(
      "This server asks for a key",
      (close) => {
        const input = h("input", {
          type: "password",
          id: "key-input",
          autocomplete: "off",
          spellcheck: "false",
          required: true,
          "aria-describedby": "key-note",
        });
        const submit = (event) => {
          event.preventDefault();
          given = input.value.trim() || null;
          close();
        };
        return h(
          "form",
          { onsubmit: submit, class: "stack" },
          wrong && h("p", { class: "problem", role: "alert" }, wrong),
          h("label", { for: "key-input" }, "API key"),
          input,
          h(
            "p",
            { id: "key-note", class: "note" },
            "It stays in the memory of this page: in no storage, in no address, and it is gone when the page is.",
          ),
          h(
            "div",
            { class: "actions" },
            hasKey() &&
              h("button", { type: "button", class: "quiet", onclick: () => (forgetKey(), close()) }, "Forget it"),
            h("button", { class: "main" }, "Use this key"),
          ),
        );
      },
      { onclose: () => resolve(given) },
    );
    $("#key-input").focus();
  });
$("#key").addEventListener("click", async () => {
  if (await changeKey()) go();
});

// -- colours --------------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
const button = $("#theme");

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  say(button, { auto: "Auto", light: "Light", dark: "Dark" }[name]);
  button.setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
  button.dataset.theme = name;
}

function stored() {
  try {
    const name = localStorage.getItem("topics.theme");
    return THEMES.includes(name) ? name : "auto";
  } catch {
    return "auto";
  }
}

button.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(button.dataset.theme) + 1) % THEMES.length];
  theme(next);
  try {
    localStorage.setItem("topics.theme", next);
  } catch {
    // Then it holds for this page only.
  }
});
theme(stored());

// -- keys -----------------------------------------------------------------------------------------------------------

const HELP = [
  ["/", "find a topic by the beginning of its name"],
  ["↑ ↓  Home End", "move in the list"],
  ["Enter", "open"],
  ["Esc", "close, clear, back to the list"],
  ["n", "new topic"],
  ["w", "write records"],
  ["t", "start, pause or resume the tail"],
  ["+  −  0", "zoom the seq axis; ← → move it while it has the focus"],
  ["1 2 3 4", "Topics, Routers, Pipelines, Server"],
  ["?", "this help"],
];

function help() {
  if ($("dialog")) return;
  dialog("Keys and colours", () => [
    h(
      "dl",
      { class: "keys" },
      HELP.map(([keys, what]) => [
        h(
          "dt",
          {},
          keys.split(/\s+/).map((key) => h("kbd", {}, key)),
        ),
        h("dd", {}, what),
      ]),
    ),
    h("h3", {}, "What the colours of the seq axis mean"),
    legend(true),
  ]);
}

$("#help").addEventListener("click", help);
$("#skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
  if ($("dialog")) return;
  const act = shown.keys?.[event.key] ?? (event.key === "?" ? help : undefined);
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  if (act) {
    // What it opens must not get the letter too.
    if (act(event) !== false) event.preventDefault();
  } else if (view) location.hash = `#/${view}`;
});

addEventListener("hashchange", go);
go();
