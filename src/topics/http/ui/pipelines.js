// Pipelines, by what they publish to `pipelines.progress`: the newest word of each, and how fast it has been.

import { h, add, say, set } from "./dom.js";
import { get, poll, records, topicPath } from "./api.js";
import { ago, date, num, rate, seqs, short } from "./format.js";
import { sparkline } from "./topic.js";

const TOPIC = "pipelines.progress";
const BACK = 500;
const POINTS = 80;
const MOST = 200;
const FRESH = 30_000;
// Said in places of their own; everything else is listed as it is.
const KNOWN = new Set([
  "pipeline",
  "name",
  "ts",
  "state",
  "stage",
  "records",
  "records_per_s",
  "lag",
  "lost",
  "error",
]);

const text = (value) => (typeof value === "string" ? value : (JSON.stringify(value) ?? ""));
// What is left out is nothing: pipelines say only what is not.
const count = (value) => (typeof value === "number" ? short(value) : text(value ?? 0).slice(0, 80));

function card(id) {
  const spark = sparkline(260, 46);
  const name = h("h2", {});
  const kind = h("span", { class: "tag" });
  const state = h("span", { class: "note" });
  const values = new Map();
  const tile = (id, word) => {
    const value = h("b", {}, "–");
    const node = h("li", { "data-field": id }, value, h("span", {}, word));
    values.set(id, [value, node]);
    return node;
  };
  const problem = h("p", { class: "problem", hidden: true });
  const rest = h("dl", { class: "config" });
  const node = h(
    "article",
    { class: "card pipeline", "data-pipeline": id },
    h("header", {}, name, kind, h("span", { class: "space" }), state),
    problem,
    h(
      "ul",
      { class: "tiles" },
      tile("speed", "records/s"),
      tile("records", "records"),
      tile("lag", "lag"),
      tile("lost", "lost"),
    ),
    spark.node,
    rest,
  );
  const history = [];

  function show(data, ts) {
    const said = Number.isFinite(data.ts) ? data.ts : ts;
    const speed = Number(data.records_per_s ?? 0);
    if (Number.isFinite(speed)) history.push(speed);
    if (history.length > POINTS) history.shift();
    spark.show(history);
    say(name, text(data.name ?? data.pipeline ?? ""));
    name.title = name.textContent;
    say(kind, text(data.pipeline ?? "pipeline"));
    node.dataset.said = said;
    const word = text(data.state ?? "running");
    node.dataset.word = word === "running" && data.stage ? text(data.stage).slice(0, 80) : word;
    const put = (id, value, isBad = false) => {
      say(values.get(id)[0], value);
      values.get(id)[1].classList.toggle("bad", isBad);
    };
    put("speed", Number.isFinite(speed) ? rate(speed).replace("/s", "") : "–");
    put("records", count(data.records));
    put("lag", data.lag === undefined || data.lag === null ? "–" : count(data.lag));
    put("lost", count(data.lost), Boolean(data.lost));
    problem.hidden = !data.error;
    say(problem, data.error ? text(data.error) : "");
    set(
      rest,
      Object.entries(data)
        .filter(([field]) => !KNOWN.has(field))
        .slice(0, 40)
        .map(([field, value]) => [h("dt", {}, field), h("dd", {}, text(value).slice(0, 300))]),
    );
  }

  function age() {
    const said = Number(node.dataset.said);
    const word = node.dataset.word;
    node.classList.toggle("stale", Date.now() - said > FRESH);
    say(state, `${word ? `${word} · ` : ""}${ago(said)}`);
    state.title = date(said);
  }
  return { node, show, age };
}

export function mountPipelines(main) {
  const cards = new Map();
  let cursor = null;
  let epoch;
  const total = h("span", { class: "note", role: "status" });
  const told = h("div", {});
  const grid = h("div", { class: "grid" });
  const empty = h(
    "div",
    { class: "empty", hidden: true },
    h("h2", {}, "No pipeline has said anything yet"),
    h(
      "p",
      {},
      "Pipelines publish their progress to the topic ",
      h("code", {}, TOPIC),
      ". Run one, and it appears here:",
    ),
    h("pre", {}, "topics pipeline tier ./lake --topic orders"),
  );
  add(main, [
    h("div", { class: "page" }, h("header", { class: "head" }, h("h1", {}, "Pipelines"), total), empty, told, grid),
  ]);

  function take(record) {
    let data;
    try {
      data = JSON.parse(record.data);
    } catch {
      return;
    }
    if (data === null || typeof data !== "object" || Array.isArray(data)) return;
    const id = `${text(data.pipeline ?? "pipeline")} ${text(data.name ?? "")}`.trim().slice(0, 200);
    if (!cards.has(id)) {
      if (cards.size >= MOST) return;
      cards.set(id, card(id));
      grid.append(cards.get(id).node);
    }
    cards.get(id).show(data, record.ts);
  }

  const poller = poll(async () => {
    const found = await get(`v0/topics?${new URLSearchParams({ prefix: TOPIC, page_size: 1 })}`);
    const topic = found.topics.find((each) => each.topic === TOPIC);
    if (topic && cursor === null) {
      cursor = Math.max(topic.head_seq - BACK, topic.earliest_seq - 1);
      epoch = topic.epoch;
    }
    for (let more = Boolean(topic), turn = 0; more && turn < 10; turn += 1) {
      const answer = await records(topicPath(TOPIC, "diff"), { from_seq: cursor, epoch, limit: 1000 });
      answer.records.forEach(take);
      if (answer.tombstone)
        set(
          told,
          h(
            "p",
            { class: "loss" },
            h("b", {}, `lost ${seqs(answer.tombstone.gap_from, answer.tombstone.gap_to)}`),
            h("span", { class: "reason" }, answer.tombstone.reason),
            " of what pipelines have said",
          ),
        );
      cursor = answer.next_from_seq;
      epoch = answer.epoch;
      more = !answer.caught_up;
    }
    for (const each of cards.values()) each.age();
    empty.hidden = cards.size > 0;
    say(total, cards.size ? num(cards.size) : "");
  }, 1500);
  return { close: poller.stop, keys: {} };
}
