// A queue: how many jobs are where, who holds which until when, and what became poison.

import { h, redo, say, toast } from "./dom.js";
import { get, post, records, topicPath } from "./api.js";
import { ago, num, short, span } from "./format.js";

const TILES = [
  ["ready", "ready", "a claim would get these"],
  ["in_flight", "in flight", "somebody holds these"],
  ["delayed", "delayed", "given back for later"],
  ["blocked", "blocked", "poison, set aside until somebody unblocks it"],
  ["dead_lettered", "dead-lettered", "delivered too often, so far"],
  ["lost", "lost", "taken by a cap, a TTL or a crash, so far"],
];
const BAD = new Set(["blocked", "dead_lettered", "lost"]);
const PAGE = 50;

export function mountQueue(name, refresh) {
  const counts = new Map();
  let out = [];
  const tiles = h(
    "ul",
    { class: "tiles" },
    TILES.map(([field, word, title]) => {
      const count = h("b", {}, "–");
      const tile = h("li", { title, "data-field": field }, count, h("span", {}, word));
      counts.set(field, [count, tile]);
      return tile;
    }),
  );
  const bar = h(
    "div",
    { class: "jobs", "aria-hidden": "true" },
    ["in_flight", "ready", "delayed", "blocked"].map((field) => h("i", { class: field })),
  );
  const facts = h("p", { class: "note" });
  const body = h("tbody");
  const foot = h("p", { class: "note" });
  const table = h(
    "table",
    { class: "leases" },
    h("caption", {}, "Leases and jobs that are set aside"),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        ["Seq", "State", "Held by", "Until", "Deliveries", ""].map((each) => h("th", { scope: "col" }, each)),
      ),
    ),
    body,
  );
  const poison = h("div", { class: "poison", hidden: true });
  const node = h(
    "section",
    { class: "card queue", "aria-label": "Queue" },
    h("header", {}, h("h2", {}, "Queue"), facts),
    tiles,
    bar,
    poison,
    h("div", { class: "scroll" }, table),
    foot,
  );

  async function act(work, word) {
    try {
      toast(word(await work()));
    } catch (problem) {
      toast(problem.message, "bad");
    }
    refresh();
  }

  const unblock = (seqs) =>
    act(
      () => post(topicPath(name, "unblock"), { seqs }),
      (done) => `${num(done.unblocked)} back in line${done.skipped ? `, ${num(done.skipped)} were not blocked` : ""}`,
    );

  // -- who holds what -------------------------------------------------------------------------------------------------

  function leaseRow(lease, most) {
    return h(
      "tr",
      { class: lease.state, "data-seq": lease.$seq },
      h("td", {}, num(lease.$seq)),
      h("td", {}, h("span", { class: `tag ${lease.state}` }, lease.state.replace("_", " "))),
      h("td", { class: "who", title: lease.lease_id ?? "" }, lease.node ?? ""),
      h("td", {}),
      h("td", {}, most ? `${num(lease.deliveries)} of ${num(most)}` : num(lease.deliveries)),
      h(
        "td",
        {},
        lease.state === "blocked" && h("button", { type: "button", onclick: () => unblock([lease.$seq]) }, "Unblock"),
      ),
    );
  }

  function left(lease) {
    const until = lease.state === "delayed" ? lease.not_before : lease.deadline;
    if (until === null || until === undefined) return "";
    return until > Date.now() ? `in ${span(until - Date.now())}` : `${span(Date.now() - until)} over`;
  }

  function showLeases(leases, most) {
    const still = leases.map((lease) => [lease.$seq, lease.state, lease.node, lease.lease_id, lease.deliveries]);
    const none = () =>
      h("tr", {}, h("td", { colspan: 6, class: "none" }, "Nobody holds a job, and none is set aside."));
    redo(body, [still, most], () => (leases.length ? leases.map((lease) => leaseRow(lease, most)) : none()));
    for (const [at, lease] of leases.entries()) say(body.rows[at].cells[3], left(lease));
  }

  // Whether jobs came here as poison: what stands first says so. Asked once, for a read is a use.
  let letters = null;
  function holdsLetters(topic) {
    if (!topic.count) return false;
    letters ??= records(topicPath(name, "diff"), { from_seq: topic.earliest_seq - 1, limit: 1 }).then(
      (found) => Boolean(found.records[0]?.meta?.includes('"$dead_letter_from"')),
      () => (letters = null),
    );
    return letters;
  }

  // -- poison -----------------------------------------------------------------------------------------------------------

  async function showPoison(topic, leases) {
    const { dead_letter: dead, ordering_required: inOrder } = topic.config;
    const blocked = leases.filter((lease) => lease.state === "blocked").map((lease) => lease.$seq);
    const found = dead ? (await get(`v0/topics?${new URLSearchParams({ prefix: dead, page_size: 1 })}`)).topics : [];
    const letters = found.find((each) => each.topic === dead)?.count ?? 0;
    const came = (await holdsLetters(topic)) ? topic.count : 0;
    poison.hidden = !(topic.queue.blocked || letters || came);
    redo(poison, [topic.queue.blocked, blocked, inOrder, dead, letters, came], () => [
      topic.queue.blocked > 0 &&
        h(
          "p",
          {},
          h(
            "b",
            {},
            `${num(topic.queue.blocked)} poison ${topic.queue.blocked === 1 ? "job is" : "jobs are"} set aside`,
          ),
          inOrder && "in front of the line, which stops.",
          blocked.length > 1 &&
            h("button", { type: "button", onclick: () => unblock(blocked) }, `Unblock these ${num(blocked.length)}`),
        ),
      letters > 0 &&
        h(
          "p",
          {},
          h("b", {}, `${num(letters)} dead ${letters === 1 ? "letter" : "letters"}`),
          "in",
          h("a", { href: `#/topics/${encodeURIComponent(dead)}` }, dead),
          redriveButton(dead, Math.min(letters, 1000)),
        ),
      came > 0 && h("p", {}, "Jobs that became poison elsewhere come here.", redriveButton(name, Math.min(came, 1000))),
    ]);
  }

  const redriveButton = (from, max) =>
    h(
      "button",
      {
        type: "button",
        class: "redrive",
        onclick: () =>
          act(
            () => post(topicPath(from, "redrive"), { max }),
            (done) =>
              `${num(done.moved)} moved back, ${num(done.unblocked)} unblocked${done.skipped ? `, ${num(done.skipped)} skipped` : ""}`,
          ),
      },
      `Redrive ${num(max)}`,
    );

  // -- trying it ------------------------------------------------------------------------------------------------------------

  const who = h("input", { value: "page", "aria-label": "Node", size: 8, autocomplete: "off" });
  const howMany = h("input", { type: "number", value: "1", min: 1, max: 100, "aria-label": "How many" });
  const held = h("ul", { class: "held" });
  const claim = async (event) => {
    event.preventDefault();
    try {
      const found = await records(topicPath(name, "claim"), { node: who.value, max: Number(howMany.value) }, "claimed");
      if (!found.records.length)
        toast(
          found.tombstone ? `Nothing is ready. ${num(found.lost)} jobs of this queue were lost.` : "Nothing is ready.",
        );
      for (const job of found.records) held.append(heldJob(job));
    } catch (problem) {
      toast(problem.message, "bad");
    }
    refresh();
  };
  function heldJob(job) {
    const row = h(
      "li",
      { "data-seq": job.seq },
      h("b", {}, num(job.seq)),
      h("code", {}, job.data.slice(0, 200)),
      h("span", { class: "note" }, `delivery ${num(job.deliveries)}`),
    );
    const verb = (word, path, after) => {
      const settle = (done) => {
        if (path !== "extend" || done.skipped) row.remove();
        return done.skipped ? `${num(job.seq)} is not held any more` : `${num(job.seq)} ${after}`;
      };
      const ask = () => post(topicPath(name, path), { lease_id: job.lease, seqs: [job.seq] });
      return h("button", { type: "button", onclick: () => act(ask, settle) }, word);
    };
    row.append(
      verb("Ack", "ack", "is done"),
      verb("Nack", "nack", "is back in line"),
      verb("Extend", "extend", "is held longer"),
    );
    return row;
  }
  node.append(
    h(
      "form",
      { class: "try", onsubmit: claim },
      h("b", {}, "Try it"),
      h("label", {}, "as ", who),
      h("label", {}, "up to ", howMany),
      h("button", {}, "Claim"),
      held,
    ),
  );

  return {
    node,
    async update(topic) {
      const queue = topic.queue;
      for (const [field] of TILES) {
        const [count, tile] = counts.get(field);
        say(count, short(queue[field]));
        tile.classList.toggle("bad", BAD.has(field) && queue[field] > 0);
      }
      for (const part of bar.children) {
        part.style.setProperty("flex-grow", String(queue[part.className]));
        part.hidden = !queue[part.className];
      }
      say(
        facts,
        [
          `acked through ${num(queue.ack_floor)}`,
          queue.ack_holes ? `${num(queue.ack_holes)} ack ${queue.ack_holes === 1 ? "hole" : "holes"}` : "",
          queue.oldest_ready_ts ? `oldest ready ${ago(queue.oldest_ready_ts)}` : "",
          topic.config.ordering_required ? "in order" : "",
        ]
          .filter(Boolean)
          .join(" · "),
      );
      const { leases, total } = await get(`${topicPath(name, "leases")}?page_size=${PAGE}`);
      out = leases;
      showLeases(leases, topic.config.max_deliveries);
      say(foot, total > leases.length ? `${num(total - leases.length)} more are not shown.` : "");
      await showPoison(topic, leases);
    },
    jobs: () => out,
    cursors: (topic) => [{ seq: topic.queue.ack_floor, name: "ack floor", kind: "queue" }],
  };
}
