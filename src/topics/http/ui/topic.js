// One topic: its numbers, its seq axis with the readers on it, its jobs, its tail.

import { h, s, say, set, throttle } from "./dom.js";
import { ApiError, get, poll, topicPath } from "./api.js";
import { ago, bytes, num, rate, short } from "./format.js";
import { lossPicture } from "./loss.js";
import { mountTail } from "./tail.js";
import { mountQueue } from "./queue.js";
import { routersOf } from "./routers.js";
import { createDialog, deleteDialog, writeDialog } from "./forms.js";

const POLL = 1000;
const POINTS = 60;

export function sparkline(width = 120, height = 26) {
  const line = s("path", { class: "line" });
  const area = s("path", { class: "area" });
  const node = s(
    "svg",
    {
      class: "spark",
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    },
    area,
    line,
  );
  const show = (values) => {
    if (values.length < 2) return;
    const most = Math.max(...values, 1e-9);
    const points = values.map(
      (value, at) =>
        `${((at / (values.length - 1)) * width).toFixed(1)} ${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`,
    );
    line.setAttribute("d", `M${points.join("L")}`);
    area.setAttribute("d", `M0 ${height}L${points.join("L")}L${width} ${height}Z`);
  };
  return { node, show };
}

function tiles() {
  const spark = sparkline();
  const fields = new Map();
  const tile = (id, word, title, more) => {
    const value = h("b", {}, "–");
    fields.set(id, value);
    return h("li", { title, "data-field": id }, value, h("span", {}, word), more);
  };
  const node = h(
    "ul",
    { class: "tiles" },
    tile("rate", "written", "records a second, from one look to the next", spark.node),
    tile("count", "live records", "neither evicted, expired, deleted nor lost"),
    tile("bytes", "live bytes", "data and meta, as sent"),
    tile("head_seq", "head seq", "the highest seq that was given out"),
    tile("earliest_seq", "earliest seq", "the first live record"),
    tile("evict_floor", "evict floor", "below it live records were lost to a cap or the TTL"),
    tile("holes", "holes", "lost ranges inside the log"),
    tile("lag", "most lag", "of the readers on the axis"),
  );
  return { node, spark, fields };
}

export function mountTopic(section, name, onGone) {
  let topic = null;
  let ranges = { ranges: [] };
  let detail = null;
  let seen = null;
  let routers = [];
  let queue = null;
  const history = [];
  let before = null;

  const picture = lossPicture(() => zoomed());
  const tail = mountTail(
    name,
    // The tail may be ahead of the last look.
    throttle(() => (topic && tail.cursor() > topic.head_seq ? poller.now() : draw()), 400),
    (first, last) => [
      ...new Set(
        ranges.ranges
          .filter((range) => range.reason && range.first <= last && range.last >= first)
          .map((range) => range.reason),
      ),
    ],
  );
  const stats = tiles();
  const badges = h("span", { class: "badges" });
  const facts = h("p", { class: "note facts" });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const config = h("dl", { class: "config" });
  const write = () => writeDialog(name, () => poller.now());
  const button = (word, act, more) => h("button", { type: "button", onclick: act, ...more }, word);
  const head = h(
    "header",
    { class: "head" },
    h("a", { class: "back", href: "#/topics", "aria-label": "Back to the list" }, "←"),
    h("h1", { title: name }, name),
    badges,
    h("span", { class: "space" }),
    button("Write", write, { class: "main", "aria-keyshortcuts": "w" }),
    button("Change", () => topic && createDialog(topic)),
    button("Delete", () => topic && deleteDialog(topic, poller, onGone), { class: "danger" }),
  );
  const queuePlace = h("div", { class: "place" });
  const body = h(
    "div",
    { class: "stack" },
    stats.node,
    picture.node,
    queuePlace,
    tail.node,
    h("details", { class: "card" }, h("summary", {}, "Configuration"), config),
  );
  set(section, head, facts, problem, body);

  function readers() {
    const found = routers
      .map((router) => ({ seq: router.cursor, name: router.router, kind: "router" }))
      .filter((each) => Number.isInteger(each.seq));
    if (tail.cursor() !== null) found.push({ seq: tail.cursor(), name: "tail", kind: "tail" });
    if (queue) found.push(...queue.cursors(topic));
    return found;
  }

  // The ranges that are known, and the rest as what it is: not asked for.
  function known() {
    const found = ranges.ranges;
    const rest =
      ranges.complete === false ? [{ first: ranges.next_from_seq + 1, last: topic.head_seq, kind: "unknown" }] : [];
    if (!detail || rest.length === 0) return [...found, ...rest];
    const [from, to] = [detail.from + 1, detail.next_from_seq];
    const around = [...found, ...rest];
    const cut = (range, first, last) => (first <= last ? [{ ...range, first, last }] : []);
    return [
      ...around.flatMap((range) => cut(range, range.first, Math.min(range.last, from - 1))),
      ...detail.ranges,
      ...around.flatMap((range) => cut(range, Math.max(range.first, to + 1), range.last)),
    ];
  }

  function draw() {
    if (!topic) return;
    const found = readers();
    picture.update(topic, known(), found, queue?.jobs());
    const lag = found.length ? Math.max(...found.map((each) => topic.head_seq - each.seq), 0) : null;
    say(stats.fields.get("lag"), lag === null ? "–" : short(lag));
  }

  const ask = (query) => get(`${topicPath(name, "ranges")}?${new URLSearchParams(query)}`);

  // More ranges than one answer holds: those in sight are asked for on their own.
  let pending = null;
  function zoomed() {
    draw();
    if (ranges.complete !== false) return;
    clearTimeout(pending);
    pending = setTimeout(async () => {
      const [from, to] = picture.domain().map(Math.floor);
      try {
        detail = { from: from - 1, ...(await ask({ from_seq: Math.max(from - 1, 0), to_seq: to })) };
        draw();
      } catch {
        // The next look tries again.
      }
    }, 150);
  }

  function measure() {
    const now = performance.now();
    if (before && before.epoch === topic.epoch && now - before.at > 300) {
      history.push(Math.max(topic.head_seq - before.head, 0) / ((now - before.at) / 1000));
      if (history.length > POINTS) history.shift();
    }
    if (!before || now - before.at > 300) before = { epoch: topic.epoch, head: topic.head_seq, at: now };
  }

  function show() {
    measure();
    const { fields, spark, node } = stats;
    say(fields.get("rate"), rate(history.at(-1)));
    spark.show(history);
    say(fields.get("count"), short(topic.count));
    say(fields.get("bytes"), bytes(topic.bytes));
    for (const field of ["head_seq", "earliest_seq", "evict_floor", "holes"]) say(fields.get(field), num(topic[field]));
    node.querySelector("[data-field=evict_floor]").classList.toggle("bad", topic.evict_floor > topic.config.seq_base);
    node.querySelector("[data-field=holes]").classList.toggle("bad", topic.holes > 0);
    const words = [topic.type, topic.config.durability, `epoch ${topic.epoch}`];
    if (badges.textContent !== words.join(""))
      set(
        badges,
        words.map((word) => h("span", { class: "tag" }, word)),
      );
    say(
      facts,
      `written ${ago(topic.last_write_ts)} · read ${ago(topic.last_read_ts)} · priority ${Math.round(topic.effective_priority)}`,
    );
    const lines = JSON.stringify(topic.config);
    if (config.dataset.shown !== lines) {
      config.dataset.shown = lines;
      set(
        config,
        Object.entries(topic.config).map(([key, value]) => [h("dt", {}, key), h("dd", {}, String(value))]),
      );
    }
    if (topic.queue && !queue) {
      queue = mountQueue(name, () => poller.now());
      queuePlace.append(queue.node);
    }
    draw();
  }

  const poller = poll(async () => {
    try {
      topic = await get(`${topicPath(name)}?touch=false`);
    } catch (failure) {
      if (failure instanceof ApiError && failure.status !== 401) {
        problem.hidden = false;
        set(problem, failure.message, failure.code === "topic_not_found" && h("span", {}, " A write makes it."));
        body.hidden = true;
      }
      throw failure;
    }
    problem.hidden = true;
    body.hidden = false;
    const mark = JSON.stringify([
      topic.epoch,
      topic.head_seq,
      topic.earliest_seq,
      topic.evict_floor,
      topic.count,
      topic.holes,
    ]);
    if (mark !== seen) {
      const found = await ask({});
      ranges = found;
      seen = mark;
      // It may have moved between the two answers.
      for (const field of ["head_seq", "earliest_seq", "evict_floor"]) topic[field] = found[field];
      if (found.complete) detail = null;
      else if (detail) zoomed();
    }
    show();
    if (queue) {
      await queue.update(topic);
      draw();
    }
  }, POLL);
  const slow = poll(async () => {
    routers = await routersOf(name);
    draw();
  }, 5000);

  return {
    write,
    tail: () => tail.toggle(),
    close() {
      clearTimeout(pending);
      poller.stop();
      slow.stop();
      tail.close();
      picture.close();
    },
  };
}
