// A live tail. The log is its buffer: paused, it keeps nothing; resumed, it is told everything, losses included.

import { h, say, set } from "./dom.js";
import { ApiError, events, get, post, topicPath } from "./api.js";
import { elements, indent, members, num, rate, record, seqs, time } from "./format.js";

const MOST = 500;
const SHOWN = 400;

const readId = (id) =>
  JSON.parse(
    new TextDecoder().decode(
      Uint8Array.from(atob(id.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0)),
    ),
  );

function recordRow(each) {
  const data = h("span", { class: "data" }, each.data.length > SHOWN ? `${each.data.slice(0, SHOWN)}…` : each.data);
  const row = h(
    "div",
    { class: "rec", role: "listitem", tabindex: "-1", "data-seq": each.seq },
    h("span", { class: "seq" }, num(each.seq)),
    h("time", {}, time(each.ts)),
    each.node !== undefined && h("span", { class: "tag node", title: "node" }, each.node),
    each.tag !== undefined && h("span", { class: "tag", title: "tag" }, each.tag),
    data,
  );
  row.addEventListener("click", () => {
    if (getSelection().toString()) return;
    const open = row.querySelector("pre");
    if (open) open.remove();
    else row.append(h("pre", {}, indent(each.data), each.meta ? `\n\nmeta ${indent(each.meta)}` : ""));
  });
  return row;
}

function lossRow(stone, reasons) {
  const count = stone.gap_to - stone.gap_from + 1;
  return h(
    "div",
    { class: "loss", role: "listitem", "data-from": stone.gap_from, "data-to": stone.gap_to },
    h("b", {}, `lost ${seqs(stone.gap_from, stone.gap_to)}`),
    h("span", {}, `${num(count)} ${count === 1 ? "seq" : "seqs"}`),
    h("span", { class: "reason" }, stone.reason),
    stone.reason === "from_seq_too_old" && h("span", {}, reasons.join(", ")),
  );
}

// `reasons` tells what is known of a lost range: a stream that begins below the floor is only told that it is too late.
export function mountTail(name, onMove, reasons) {
  let running = null;
  let session = null;
  let lastId = null;
  let cursor = null;
  let epoch;
  let waiting = [];
  let isDue = false;
  let drawn = 0;
  let gone = 0;
  let goneLosses = 0;
  let recent = [];

  const begin = h(
    "select",
    { "aria-label": "Where the tail begins" },
    [
      ["tail", "from now"],
      ["last", "the last 100"],
      ["zero", "everything, with every loss"],
      ["seq", "behind a seq"],
    ].map(([value, text]) => h("option", { value }, text)),
  );
  const from = h("input", {
    class: "from",
    type: "number",
    min: 0,
    value: "0",
    "aria-label": "Behind which seq",
    hidden: true,
  });
  begin.addEventListener("change", () => (from.hidden = begin.value !== "seq"));
  const toggleButton = h(
    "button",
    { type: "button", class: "main", "aria-keyshortcuts": "t", onclick: () => toggle() },
    "Start tail",
  );
  const state = h("span", { class: "note", role: "status" });
  const speed = h("span", { class: "note" });
  const above = h("p", { class: "above", hidden: true });
  const rows = h("div", { class: "records", role: "list", "aria-label": "Records", tabindex: "0" });
  const clear = h("button", { type: "button", class: "quiet", onclick: () => wipe() }, "Clear");
  const told = h("span", { class: "hidden", role: "alert" });
  const node = h(
    "section",
    { class: "card tail", "aria-label": "Live tail" },
    h(
      "header",
      {},
      h("h2", {}, "Live tail"),
      state,
      h("span", { class: "space" }),
      speed,
      begin,
      from,
      toggleButton,
      clear,
    ),
    above,
    rows,
    told,
  );
  const empty = () =>
    set(
      rows,
      h(
        "p",
        { class: "empty" },
        "Records appear here as they are committed. A loss appears in red, where it is, with its range and its reason.",
      ),
    );
  empty();

  function wipe() {
    waiting = [];
    gone = goneLosses = 0;
    above.hidden = true;
    empty();
  }

  // -- drawing: once a frame, the newest rows ---------------------------------------------------------------------

  function flush() {
    isDue = false;
    drawn = waiting.length;
    if (!waiting.length) return;
    rows.querySelector(".empty")?.remove();
    const isAtEnd = rows.scrollHeight - rows.scrollTop - rows.clientHeight < 40;
    let batch = waiting;
    waiting = [];
    if (batch.length > MOST) {
      // What flies by too fast is counted; losses are always drawn.
      const early = batch.slice(0, -MOST);
      const kept = early.filter((each) => each.stone).slice(-MOST);
      gone += early.filter((each) => each.text).length;
      batch = [...kept, ...batch.slice(-MOST)];
    }
    rows.append(
      ...batch.map((each) =>
        each.text
          ? recordRow(record(each.text))
          : each.stone
            ? lossRow(each.stone, reasons(each.stone.gap_from, each.stone.gap_to))
            : h("p", { class: "word", role: "listitem" }, each.word),
      ),
    );
    while (rows.children.length > MOST) {
      const first = rows.firstChild;
      if (first.classList.contains("loss")) goneLosses += 1;
      else if (first.classList.contains("rec")) gone += 1;
      first.remove();
    }
    above.hidden = !(gone || goneLosses);
    say(above, `Above: ${num(gone)} earlier records${goneLosses ? ` and ${num(goneLosses)} losses` : ""}.`);
    if (isAtEnd) rows.scrollTop = rows.scrollHeight;
  }

  // A frame for a few rows; for many, four times a second is all that one can follow.
  function show(entry) {
    waiting.push(entry);
    if (!isDue) {
      isDue = true;
      setTimeout(() => requestAnimationFrame(flush), waiting.length + drawn > 100 ? 250 : 0);
    }
    // A tab in the background draws no frames.
    if (waiting.length > 20_000) flush();
  }

  const ticker = setInterval(() => {
    const now = performance.now();
    recent = recent.filter(([at]) => now - at < 3000);
    say(speed, running ? rate(recent.reduce((sum, [, count]) => sum + count, 0) / 3) : "");
  }, 1000);

  // -- being told -------------------------------------------------------------------------------------------------

  function take({ kind, id, data }) {
    if (id !== undefined) {
      lastId = id;
      epoch = readId(id).$epoch?.[name] ?? epoch;
    }
    if (kind === "record") {
      const fields = members(data);
      const found = elements(fields.get("records"));
      for (const text of found) show({ text });
      recent.push([performance.now(), found.length]);
      cursor = JSON.parse(fields.get("to_seq"));
    } else if (kind === "tombstone") {
      const stone = JSON.parse(data);
      show({ stone });
      say(told, `Lost: seqs ${stone.gap_from} to ${stone.gap_to}, ${stone.reason}`);
      cursor = stone.gap_to;
    } else if (kind === "topic-deleted")
      show({ word: "The topic was deleted. If it is made again, the tail goes on." });
    else if (kind === "error") show({ word: `The stream ended: ${JSON.parse(data).error}` });
    else if (kind === "caught-up") say(state, "live");
    onMove();
  }

  async function where() {
    if (cursor !== null) return { from_seq: cursor, epoch };
    if (begin.value === "tail") return { tail: true };
    if (begin.value === "zero") return { from_seq: 0 };
    if (begin.value === "seq") return { from_seq: Math.max(Math.floor(Number(from.value)) || 0, 0) };
    const { head_seq } = await get(`${topicPath(name)}?touch=false`);
    return { from_seq: Math.max(head_seq - 100, 0) };
  }

  async function run(signal) {
    for (let pause = 1000; !signal.aborted; pause = Math.min(pause * 2, 15_000)) {
      try {
        if (!session) {
          say(state, "connecting");
          const made = await post("v0/watch", { topics: { [name]: await where() }, include_tags: true }, { signal });
          session = made.wid;
          lastId = null;
          cursor ??= made.topics[name].from_seq;
          onMove();
        }
        for await (const event of events(`v0/watch/${session}`, lastId, signal)) {
          pause = 1000;
          take(event);
        }
      } catch (problem) {
        if (signal.aborted) return;
        if (problem instanceof ApiError && problem.status === 404) {
          session = null;
          if (problem.code === "topic_not_found") {
            say(state, problem.message);
            return stop("Resume");
          }
        } else if (problem instanceof ApiError && problem.status < 429) {
          say(state, problem.message);
          return stop("Start tail");
        } else if (!(problem instanceof ApiError)) say(state, "not reachable, trying again");
      }
      await new Promise((go) => setTimeout(go, pause));
    }
  }

  function stop(word) {
    running?.abort();
    running = null;
    say(toggleButton, word);
    node.classList.remove("on");
  }

  function toggle() {
    if (running) {
      stop("Resume");
      say(state, `paused behind seq ${num(cursor ?? 0)}; the log keeps the rest`);
      return;
    }
    running = new AbortController();
    node.classList.add("on", "used");
    begin.disabled = from.disabled = true;
    say(toggleButton, "Pause");
    run(running.signal);
  }

  return {
    node,
    toggle,
    cursor: () => cursor,
    close() {
      stop("");
      clearInterval(ticker);
    },
  };
}
