// The list of topics, however many: pages come as one scrolls, only what is in sight is in the DOM and polled.

import { h, add, redo, say, set } from "./dom.js";
import { get, poll } from "./api.js";
import { num, rate, short } from "./format.js";
import { Pages } from "./pages.js";
import { routerLags } from "./routers.js";
import { createDialog } from "./forms.js";
import { mountTopic } from "./topic.js";

const ROW = 54;
const OVERSCAN = 6;
const POLL = 2000;

// The whole axis as a strip, as far as watermarks tell it.
function strip() {
  const evicted = h("i", { class: "evicted" });
  const gone = h("i", { class: "deleted" });
  const live = h("i", { class: "live" });
  const node = h("span", { class: "strip", "aria-hidden": "true" }, evicted, gone, live);
  const show = (topic) => {
    const base = topic.config.seq_base;
    const parts = [
      topic.evict_floor - base,
      topic.earliest_seq - topic.evict_floor,
      topic.head_seq + 1 - topic.earliest_seq,
    ];
    for (const [at, part] of [evicted, gone, live].entries()) {
      part.style.setProperty("flex-grow", String(parts[at]));
      part.hidden = parts[at] <= 0;
    }
    node.classList.toggle("holes", topic.holes > 0);
    node.classList.toggle("blank", topic.head_seq < base);
  };
  return { node, show };
}

function makeRow() {
  const name = h("span", { class: "name" });
  const kind = h("span", { class: "tag" }, "queue");
  const speed = h("span", { class: "rate" });
  const bar = strip();
  const count = h("span", { class: "count" });
  const lag = h("span", { class: "lag" });
  const node = h(
    "div",
    { class: "row", role: "option" },
    h("div", { class: "line" }, name, kind, speed),
    h("div", { class: "line" }, bar.node, count, lag),
  );
  const show = (topic, index, total, lags, current) => {
    node.id = `row-${index}`;
    node.dataset.index = index;
    node.style.setProperty("transform", `translateY(${index * ROW}px)`);
    node.setAttribute("aria-posinset", index + 1);
    node.setAttribute("aria-setsize", total);
    node.classList.toggle("waiting", !topic);
    if (!topic) {
      for (const part of [name, speed, count, lag]) say(part, "");
      kind.hidden = true;
      return;
    }
    say(name, topic.topic);
    name.title = topic.topic;
    kind.hidden = topic.type !== "queue";
    say(speed, rate(topic.rate));
    speed.classList.toggle("moving", topic.rate > 0);
    say(count, `${short(topic.count)} live`);
    const lost = topic.evict_floor - topic.config.seq_base;
    const behind = topic.queue ? topic.queue.ready : lags.get(topic.topic);
    const words = [];
    if (behind !== undefined) words.push(topic.queue ? `${short(behind)} ready` : `lag ${short(behind)}`);
    if (lost > 0) words.push(`${short(lost)} lost`);
    if (topic.holes) words.push(`${short(topic.holes)} ${topic.holes === 1 ? "hole" : "holes"}`);
    say(lag, words.join(" · "));
    lag.classList.toggle("bad", lost > 0 || topic.holes > 0);
    bar.show(topic);
    const chosen = topic.topic === current;
    node.setAttribute("aria-selected", String(chosen));
  };
  return { node, show };
}

export function mountTopics(main) {
  const pages = new Pages();
  let lags = new Map();
  let current = null;
  let active = 0;
  let hasMoved = false;
  let detail = null;
  const pool = new Map();

  const search = h("input", {
    type: "search",
    id: "search",
    placeholder: "Find by prefix  /",
    "aria-label": "Find topics by the beginning of their names",
    "aria-controls": "topic-list",
    autocomplete: "off",
    spellcheck: "false",
  });
  const total = h("span", { class: "total", role: "status" });
  const spacer = h("div", { class: "spacer" });
  const list = h(
    "div",
    { class: "list", id: "topic-list", role: "listbox", tabindex: "0", "aria-label": "Topics" },
    spacer,
  );
  const none = h("div", { class: "empty", hidden: true });
  const create = h(
    "button",
    { type: "button", class: "main", "aria-keyshortcuts": "n", onclick: () => createDialog() },
    "New topic",
  );
  const aside = h(
    "aside",
    { "aria-label": "Topics" },
    h("div", { class: "tools" }, search, create),
    h("div", { class: "sums" }, total),
    list,
    none,
  );
  const section = h("section", { class: "detail", "aria-label": "Topic" });
  add(main, [aside, section]);

  // -- the rows in sight ----------------------------------------------------------------------------------------

  let top = 0;
  let height = 0;
  const sight = () => [Math.floor(top / ROW), Math.ceil((top + height) / ROW)];
  const size = () => (pages.isWhole ? pages.length : Math.max(pages.total ?? 0, pages.length));

  function paint() {
    const count = size();
    spacer.style.setProperty("height", `${count * ROW}px`);
    const [first, last] = sight();
    const from = Math.max(first - OVERSCAN, 0);
    const to = Math.min(last + OVERSCAN, count);
    for (const [index, row] of pool) {
      if (index < from || index >= to) {
        row.node.remove();
        pool.delete(index);
      }
    }
    for (let index = from; index < to; index += 1) {
      let row = pool.get(index);
      if (!row) {
        row = makeRow();
        pool.set(index, row);
        spacer.append(row.node);
      }
      row.show(pages.at(index), index, count, lags, current);
      row.node.classList.toggle("active", index === active);
    }
    list.setAttribute("aria-activedescendant", `row-${active}`);
    const whole = pages.isWhole ? num(count) : pages.total ? `about ${num(count)}` : `${num(pages.length)}+`;
    say(
      total,
      `${whole} ${count === 1 ? "topic" : "topics"}${pages.prefix ? ` beginning with “${pages.prefix}”` : ""}`,
    );
    none.hidden = count > 0;
    list.hidden = count === 0;
    const isLoading = !count && !pages.isWhole;
    if (isLoading) say(total, "");
    if (!count)
      set(none, isLoading ? "…" : pages.prefix ? "Nothing begins with that." : "No topics yet. Press n to make one.");
  }

  let frame = 0;
  function repaint() {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      paint();
      catchUp();
    });
  }

  // Loads pages until those in sight are there.
  let catching = false;
  async function catchUp() {
    if (catching) return;
    catching = true;
    try {
      while (!pages.isWhole && sight()[1] + 2 * OVERSCAN > pages.length) {
        await pages.more();
        paint();
      }
    } catch (problem) {
      if (problem instanceof TypeError) console.error(problem);
    } finally {
      catching = false;
    }
  }

  list.addEventListener("scroll", () => {
    top = list.scrollTop;
    repaint();
  });
  const watcher = new ResizeObserver(() => {
    height = list.clientHeight;
    repaint();
  });
  watcher.observe(list);

  function choose(index, open) {
    hasMoved = true;
    active = Math.min(Math.max(index, 0), Math.max(size() - 1, 0));
    const y = active * ROW;
    if (y < list.scrollTop) list.scrollTop = y;
    else if (y + ROW > list.scrollTop + height) list.scrollTop = y + ROW - height;
    top = list.scrollTop;
    repaint();
    const topic = pages.at(active);
    if (open && topic) location.hash = `#/topics/${encodeURIComponent(topic.topic)}`;
  }

  list.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) choose(Number(row.dataset.index), true);
  });
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, End: Infinity, Home: -Infinity };
  const move = (event) => {
    if (event.key === "Enter") choose(active, true);
    else if (Object.hasOwn(step, event.key)) choose(active + step[event.key], false);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  list.addEventListener("keydown", move);

  // -- finding ----------------------------------------------------------------------------------------------------

  let timer;
  async function find() {
    pages.reset(search.value.trim());
    active = 0;
    list.scrollTop = top = 0;
    pool.forEach((row) => row.node.remove());
    pool.clear();
    await poller.now();
  }
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => find().catch(() => {}), 120);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (search.value) {
        search.value = "";
        find();
      } else list.focus();
      event.stopPropagation();
    } else if (event.key !== "Home" && event.key !== "End") move(event);
  });

  // -- looking again and again --------------------------------------------------------------------------------------

  const poller = poll(async () => {
    if (!pages.prefix) pages.total = (await get("v0/ready")).topics;
    if (!pages.pages.length) await pages.more();
    else await pages.refresh(...sight());
    if (!hasMoved) active = Math.max(pages.indexOf(current), 0);
    paint();
    if (current === null) showWorst();
    document.documentElement.dataset.ready ??= Math.round(performance.now());
    catchUp();
  }, POLL);
  const lagging = poll(async () => {
    lags = await routerLags();
    repaint();
  }, 5000);

  // -- the topic that is open -----------------------------------------------------------------------------------------

  // Where most was lost, of the topics that are loaded.
  const worst = h("div", { class: "worst", hidden: true });
  function showWorst() {
    const lost = (topic) => topic.evict_floor - topic.config.seq_base;
    const all = pages.pages.flatMap((page) => page.topics);
    const found = all
      .filter((topic) => lost(topic) > 0 || topic.holes > 0)
      .sort((a, b) => lost(b) - lost(a) || b.holes - a.holes);
    worst.hidden = !found.length;
    const marks = found.slice(0, 8).map((topic) => [topic.topic, topic.evict_floor, topic.head_seq, topic.holes]);
    redo(worst, [found.length, all.length, marks], () => [
      h("h2", {}, `Something was lost in ${num(found.length)} of ${num(all.length)} topics`),
      found.slice(0, 8).map((topic) => {
        const bar = strip();
        bar.show(topic);
        const words = [
          lost(topic) > 0 && `${short(lost(topic))} lost`,
          topic.holes > 0 && `${num(topic.holes)} ${topic.holes === 1 ? "hole" : "holes"}`,
        ];
        return h(
          "a",
          { href: `#/topics/${encodeURIComponent(topic.topic)}` },
          bar.node,
          h("span", { class: "name" }, topic.topic),
          h("span", { class: "bad" }, words.filter(Boolean).join(" · ")),
        );
      }),
    ]);
  }

  function welcome() {
    set(
      section,
      h(
        "div",
        { class: "welcome" },
        h("h1", {}, "No loss is ever silent"),
        h(
          "p",
          {},
          "Open a topic to see its seq axis: what is alive, what was removed on purpose, and every range that was lost, with its reason. Tail it, write to it, or look after its jobs.",
        ),
        worst,
        h(
          "p",
          { class: "note" },
          h("kbd", {}, "/"),
          " finds, ",
          h("kbd", {}, "↓"),
          " ",
          h("kbd", {}, "Enter"),
          " opens, ",
          h("kbd", {}, "n"),
          " makes a topic, ",
          h("kbd", {}, "?"),
          " says the rest.",
        ),
      ),
    );
  }

  function go(topic) {
    main.classList.toggle("has-topic", topic !== null);
    if (topic !== null && topic === current && detail) return;
    detail?.close();
    detail = null;
    current = topic;
    set(section);
    if (topic === null) welcome();
    else {
      const index = pages.indexOf(topic);
      if (index >= 0) active = index;
      detail = mountTopic(section, topic, () => {
        location.hash = "#/topics";
        poller.now();
      });
    }
    repaint();
  }

  const onMade = () => poller.now();
  document.addEventListener("topics-changed", onMade);
  const keys = {
    "/": () => search.focus(),
    n: () => createDialog(),
    w: () => detail?.write(),
    t: () => detail?.tail(),
    ArrowDown: () => (list.focus(), choose(active + (document.activeElement === list ? 1 : 0), false)),
    ArrowUp: () => (list.focus(), choose(active - 1, false)),
    Enter: (event) => (event.target.closest("button, a, summary, [tabindex]") ? false : choose(active, true)),
    Escape: () => {
      if (current !== null) location.hash = "#/topics";
      list.focus();
    },
  };
  return {
    go,
    keys,
    close() {
      poller.stop();
      lagging.stop();
      detail?.close();
      watcher.disconnect();
      document.removeEventListener("topics-changed", onMade);
    },
  };
}
