// The server itself: is it well, how busy, what has it told readers they lost.

import { h, add, say, set } from "./dom.js";
import { get, poll } from "./api.js";
import { bytes, num, rate, short, span } from "./format.js";
import { sparkline } from "./topic.js";

const PRESSURE = ["none", "coalescing pushes", "pausing low priorities", "throttling"];
const POINTS = 60;

const sampleOf = (metrics, name, suffix = "") =>
  metrics[name]?.samples.filter((each) => each.name === name + suffix) ?? [];
const value = (metrics, name, suffix = "") =>
  sampleOf(metrics, name, suffix).reduce((sum, each) => sum + each.value, 0);

// The time that so many of the observations stayed below, as far as the buckets tell.
function quantile(metrics, name, part, labels = {}) {
  const buckets = sampleOf(metrics, name, "_bucket").filter((each) =>
    Object.entries(labels).every(([key, want]) => each.labels[key] === want),
  );
  const total = buckets.at(-1)?.value ?? 0;
  if (!total) return null;
  const found = buckets.find((each) => each.value >= total * part);
  return found.labels.le === "+Inf" ? Infinity : Number(found.labels.le) * 1000;
}

const ms = (time) => (time === null ? "–" : time === Infinity ? "> 10 s" : `≤ ${time < 1 ? time.toFixed(2) : time} ms`);

export function mountServer(main) {
  const values = new Map();
  const sparks = new Map();
  const histories = new Map();
  let before = null;
  const tile = (id, word, title, hasSpark = false) => {
    const count = h("b", {}, "–");
    const node = h("li", { title, "data-field": id }, count, h("span", {}, word));
    if (hasSpark) {
      const spark = sparkline();
      sparks.set(id, spark);
      histories.set(id, []);
      node.append(spark.node);
    }
    values.set(id, [count, node]);
    return node;
  };
  const facts = h("span", { class: "note" });
  const level = h(
    "div",
    { class: "levels", role: "meter", "aria-valuemin": 0, "aria-valuemax": 3, "aria-label": "Pressure" },
    [0, 1, 2, 3].map((each) => h("i", { class: `level-${each}` })),
  );
  const levelWord = h("p", {});
  const losses = h("div", {});
  const routes = h("tbody");
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  add(main, [
    h(
      "div",
      { class: "page" },
      h("header", { class: "head" }, h("h1", {}, "Server"), facts),
      problem,
      h(
        "ul",
        { class: "tiles" },
        tile("written", "records written a second", "appended, from one look to the next", true),
        tile("read", "records read a second", "delivered by diff", true),
        tile("wal", "log bytes a second", "written to the WAL", true),
        tile("requests", "requests a second", "all routes", true),
      ),
      h(
        "ul",
        { class: "tiles" },
        tile("topics", "topics", ""),
        tile("records", "live records", ""),
        tile("bytes", "live bytes", ""),
        tile("connections", "connections", ""),
        tile("streams", "streams", "watches, workers and WebSockets"),
        tile("fsync", "fsync, 99 of 100", "of the WAL"),
        tile("delay", "loop delay", "how late the event loop is"),
        tile("throttled", "throttled", "requests answered with 429"),
      ),
      h(
        "div",
        { class: "grid" },
        h(
          "section",
          { class: "card", "aria-label": "Pressure" },
          h("header", {}, h("h2", {}, "Pressure")),
          level,
          levelWord,
        ),
        h(
          "section",
          { class: "card", "aria-label": "Losses told" },
          h("header", {}, h("h2", {}, "Losses told to readers")),
          losses,
        ),
      ),
      h(
        "section",
        { class: "card scroll routes", "aria-label": "Routes" },
        h(
          "table",
          {},
          h("caption", {}, "Requests by route"),
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Route", "Requests", "Refused", "Half within", "99 of 100 within"].map((each, at) =>
                h("th", { scope: "col", class: at ? "number" : "" }, each),
              ),
            ),
          ),
          routes,
        ),
      ),
    ),
  ]);

  const put = (id, text, isBad = false) => {
    say(values.get(id)[0], text);
    values.get(id)[1].classList.toggle("bad", isBad);
  };

  function speed(id, now, total, shown) {
    const history = histories.get(id);
    if (before) {
      history.push(Math.max(total - before[id], 0) / ((now - before.at) / 1000));
      if (history.length > POINTS) history.shift();
      put(id, shown(history.at(-1)));
      sparks.get(id).show(history);
    }
    return total;
  }

  function show(health, ready, metrics) {
    const now = performance.now();
    before = {
      at: now,
      written: speed("written", now, value(metrics, "topics_records_appended", "_total"), rate),
      read: speed("read", now, value(metrics, "topics_records_read", "_total"), rate),
      wal: speed("wal", now, value(metrics, "topics_wal_bytes", "_total"), (n) => `${bytes(n)}/s`),
      requests: speed("requests", now, value(metrics, "topics_requests", "_total"), rate),
    };
    say(facts, `version ${health.version} · up ${span(health.uptime_ms)}`);
    problem.hidden = ready.status !== "read_only";
    say(
      problem,
      ready.status === "read_only"
        ? `Read-only: ${ready.reason ?? "a write or a sync failed"}. Reads go on; a restart brings writes back.`
        : "",
    );
    put("topics", num(ready.topics));
    put("records", short(value(metrics, "topics_records")));
    put("bytes", bytes(value(metrics, "topics_bytes")));
    put("connections", num(value(metrics, "topics_connections")));
    put("streams", num(value(metrics, "topics_streams")));
    put("fsync", ms(quantile(metrics, "topics_wal_fsync_seconds", 0.99)));
    const delay = value(metrics, "topics_loop_delay_seconds") * 1000;
    put("delay", `${delay < 10 ? delay.toFixed(1) : Math.round(delay)} ms`);
    const throttled = value(metrics, "topics_throttled", "_total");
    put("throttled", num(throttled), throttled > 0);
    const pressure = value(metrics, "topics_pressure");
    level.dataset.level = pressure;
    level.setAttribute("aria-valuenow", pressure);
    level.setAttribute("aria-valuetext", PRESSURE[pressure] ?? String(pressure));
    say(levelWord, `${pressure}: ${PRESSURE[pressure] ?? "?"}. The server sheds cost, never data.`);

    const told = sampleOf(metrics, "topics_tombstones", "_total");
    const most = Math.max(...told.map((each) => each.value), 1);
    if (!told.length) set(losses, h("p", { class: "note" }, "No reader had to be told of a loss since the start."));
    else
      set(
        losses,
        h(
          "ul",
          { class: "bars" },
          told.map((each) =>
            h(
              "li",
              {},
              h("span", {}, each.labels.reason),
              h("i", { class: `fill-${each.labels.reason}`, style: { width: `${(each.value / most) * 60}%` } }),
              h("b", {}, num(each.value)),
            ),
          ),
        ),
      );

    const rows = new Map();
    for (const { labels, value: count } of sampleOf(metrics, "topics_requests", "_total")) {
      const row = rows.get(labels.route) ?? [0, 0];
      row[0] += count;
      if (Number(labels.status) >= 400) row[1] += count;
      rows.set(labels.route, row);
    }
    set(
      routes,
      [...rows]
        .sort((a, b) => b[1][0] - a[1][0])
        .map(([route, [count, refused]]) =>
          h(
            "tr",
            {},
            h("td", {}, route),
            h("td", { class: "number" }, num(count)),
            h("td", { class: "number" }, refused ? num(refused) : ""),
            [0.5, 0.99].map((part) =>
              h("td", { class: "number" }, ms(quantile(metrics, "topics_request_seconds", part, { route }))),
            ),
          ),
        ),
    );
  }

  const poller = poll(async () => {
    const [health, ready, { metrics }] = [await get("v0/health"), await get("v0/ready"), await get("v0/metrics")];
    show(health, ready, metrics);
  }, 2500);
  return { close: poller.stop, keys: {} };
}
