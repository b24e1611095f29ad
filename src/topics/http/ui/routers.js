// Routers: the list as the API has it, the graph, and what is known of each.

import { $, h, add, dialog, redo, say, set, toast } from "./dom.js";
import { ApiError, get, poll, put, remove } from "./api.js";
import { num } from "./format.js";
import { confirmDialog, field, problemLine, sending } from "./forms.js";
import { STATES, drawing, end } from "./graph.js";

const MOST = 300;

// A server that knows no routers has none.
async function list(query) {
  try {
    return await get(`v0/routers?${new URLSearchParams(query)}`);
  } catch (problem) {
    if (problem instanceof ApiError && problem.code === "not_found") return { routers: [] };
    throw problem;
  }
}

const topicOf = (place) => (typeof place === "string" ? place : null);

export async function routersOf(topic) {
  const { routers } = await list({ source: topic, page_size: 50 });
  return routers.filter((router) => topicOf(router.source) === topic);
}

const tagOf = ({ state }) => (Object.hasOwn(STATES, state) ? `tag ${state}` : "tag");

// For each topic, how far the slowest of its routers is behind.
export async function routerLags() {
  const lags = new Map();
  const { routers } = await list({ page_size: 1000 });
  for (const { source, lag } of routers) {
    const topic = topicOf(source);
    if (topic !== null && Number.isInteger(lag)) lags.set(topic, Math.max(lags.get(topic) ?? 0, lag));
  }
  return lags;
}

// -- making and deleting --------------------------------------------------------------------------------------------

const routerPath = (name) => `v0/routers/${encodeURIComponent(name)}`;

function newRouter(done) {
  dialog("New router", (close) => {
    const form = h(
      "form",
      { class: "stack", novalidate: true },
      problemLine(),
      field(["router", "text", "Name", "letters, digits and . _ : - >"]),
      h(
        "div",
        { class: "pair" },
        field(["source", "text", "From topic", ""]),
        field(["dest", "text", "To topic", "made if it is not there"]),
      ),
      h(
        "div",
        { class: "pair" },
        field(["start", ["head", "earliest"], "Begins", "earliest: with what is retained"]),
        field(["filter", "text", "Only tags", "exactly this tag; or a prefix and a star: eu*"]),
      ),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
        h("button", { class: "main" }, "Create"),
      ),
    );
    return sending(form, async () => {
      const value = (name) => form.elements[name].value.trim();
      if (!value("router")) throw new Error("router: a name is required");
      const config = { source: value("source"), dest: value("dest") };
      if (value("start")) config.start = value("start");
      if (value("filter")) config.filter = ["tag", value("filter").endsWith("*") ? "Glob" : "Eq", value("filter")];
      await put(routerPath(value("router")), config);
      close();
      toast(`${value("router")} is made`);
      done();
    });
  });
  $("#field-router").focus();
}

// -- the view ---------------------------------------------------------------------------------------------------------

export function mountRouters(main) {
  let routers = [];
  let chosen = null;
  let shown = "";
  const total = h("span", { class: "note", role: "status" });
  const find = h("input", {
    type: "search",
    placeholder: "Find by prefix  /",
    "aria-label": "Find routers by the beginning of their names",
    autocomplete: "off",
    spellcheck: "false",
    oninput: () => poller.now(),
  });
  const create = h(
    "button",
    { type: "button", class: "main", onclick: () => newRouter(() => poller.now()) },
    "New router",
  );
  const stage = h("div", { class: "scroll graph-stage", tabindex: "0", "aria-label": "The graph, scrollable" });
  const facts = h("section", { class: "card facts", hidden: true, "aria-label": "Router" });
  const body = h("tbody");
  const table = h(
    "div",
    { class: "card scroll" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Router", "From", "To", "State", "Lag", "Cursor", "Forwarded", "Last error"].map((each, at) =>
            h("th", { scope: "col", class: at > 3 && at < 7 ? "number" : "" }, each),
          ),
        ),
      ),
      body,
    ),
  );
  const empty = h(
    "div",
    { class: "empty", hidden: true },
    h("h2", {}, "No routers"),
    h(
      "p",
      {},
      "A router copies what is written to one topic into another, exactly once, and passes every loss on as a hole.",
    ),
    h(
      "pre",
      {},
      'curl -X PUT localhost:4000/v0/routers/r1 \\\n  -H "content-type: application/json" \\\n  -d \'{"source": "orders", "dest": "audit"}\'',
    ),
  );
  add(main, [
    h(
      "div",
      { class: "page" },
      h("header", { class: "head" }, h("h1", {}, "Routers"), total, h("span", { class: "space" }), find, create),
      empty,
      h("div", { class: "card" }, stage),
      facts,
      table,
    ),
  ]);

  const link = (place) =>
    topicOf(place) === null ? end(place) : h("a", { href: `#/topics/${encodeURIComponent(place)}` }, place);

  const said = (problem) => (typeof problem === "string" ? problem : JSON.stringify(problem));

  function choose(router) {
    chosen = router?.router ?? null;
    facts.hidden = !router;
    if (router) redo(facts, router, () => describe(router));
    for (const edge of stage.querySelectorAll(".edge")) edge.classList.toggle("chosen", edge.dataset.router === chosen);
  }

  function describe(router) {
    const drop = () =>
      confirmDialog(`Delete ${router.router}?`, "What it has copied stays where it is.", router.router, async () => {
        await remove(routerPath(router.router));
        poller.now();
      });
    return [
      h(
        "header",
        {},
        h("h2", {}, router.router),
        h("span", { class: tagOf(router) }, STATES[router.state] ?? String(router.state)),
        h("span", { class: "space" }),
        h("button", { type: "button", class: "danger", onclick: drop }, "Delete"),
      ),
      router.last_error && h("p", { class: "problem" }, said(router.last_error)),
      h(
        "dl",
        { class: "config" },
        Object.entries(router)
          .filter(([name]) => name !== "router")
          .map(([name, value]) => [
            h("dt", {}, name),
            h("dd", {}, typeof value === "object" ? said(value) : String(value)),
          ]),
      ),
    ];
  }

  // A row stays as long as its router: its numbers change in place.
  function row(router) {
    return h(
      "tr",
      { "data-router": router.router },
      h(
        "td",
        {},
        h(
          "button",
          {
            type: "button",
            class: "quiet",
            onclick: () => choose(routers.find((each) => each.router === router.router)),
          },
          router.router,
        ),
      ),
      h("td", {}, link(router.source)),
      h("td", {}, link(router.dest)),
      h("td", {}, h("span")),
      h("td", { class: "number" }),
      h("td", { class: "number" }),
      h("td", { class: "number" }),
      h("td", { class: "problem" }),
    );
  }

  function update(line, router) {
    const tag = line.cells[3].firstChild;
    tag.className = tagOf(router);
    say(tag, STATES[router.state] ?? String(router.state));
    for (const [at, value] of [router.lag, router.cursor, router.forwarded_total].entries())
      say(line.cells[4 + at], Number.isInteger(value) ? num(value) : "–");
    say(line.cells[7], router.last_error ? said(router.last_error) : "");
  }

  function show() {
    empty.hidden = routers.length > 0;
    stage.parentNode.hidden = table.hidden = !routers.length;
    const mark = JSON.stringify(routers.map((each) => [each.router, each.source, each.dest, each.state, each.lag]));
    if (mark !== shown) {
      shown = mark;
      set(stage, routers.length ? drawing(routers.slice(0, MOST), choose) : "");
    }
    const some = routers.slice(0, MOST);
    redo(
      body,
      some.map((router) => [router.router, router.source, router.dest]),
      () => some.map(row),
    );
    for (const [at, router] of some.entries()) update(body.rows[at], router);
    if (chosen !== null) choose(routers.find((router) => router.router === chosen) ?? null);
  }

  const poller = poll(async () => {
    const query = { page_size: MOST };
    if (find.value.trim()) query.prefix = find.value.trim();
    const answer = await list(query);
    routers = answer.routers;
    say(total, routers.length ? `${num(routers.length)}${answer.next_cursor ? " of more: narrow by prefix" : ""}` : "");
    show();
  }, 2000);
  return { close: poller.stop, keys: { "/": () => find.focus(), n: () => create.click(), Escape: () => choose(null) } };
}
