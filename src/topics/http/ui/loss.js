// The loss picture: the seq axis of a topic, and on it everything that became of its seqs.
// Cool is here, grey was removed on purpose, warm is lost. A loss is never thinner than three pixels.

import { h, s, add, say, set } from "./dom.js";
import { LOOKS, blocks, hatch, isLoss, lookOf, swatch, totals } from "./fates.js";
import { num, seqs, short } from "./format.js";

const PAD = 14;
const LANE = 52;
const ROW = 19;
const LETTER = 6.7;

// Labels on rows, so that none covers another.
function stagger(items, width, most = 3) {
  const ends = [];
  for (const item of [...items].sort((a, b) => a.x - b.x)) {
    const wide = item.text.length * LETTER + 12;
    item.left = Math.min(Math.max(item.x - wide / 2, 0), Math.max(width - wide, 0));
    item.wide = wide;
    let row = ends.findIndex((end) => end + 4 <= item.left);
    if (row < 0) row = ends.length < most ? ends.length : ends.indexOf(Math.min(...ends));
    ends[row] = item.left + wide;
    item.row = row;
  }
  return ends.length;
}

function ticks(from, to, width) {
  const wish = Math.max(Math.floor(width / 130), 2);
  const raw = Math.max((to - from) / wish, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) found.push(at);
  return found;
}

export function lossPicture(onZoom) {
  let topic = null;
  let ranges = [];
  let cursors = [];
  let jobs = [];
  let chosen = null;
  let width = 0;
  let drawn = "";

  const svg = s("svg", { class: "axis", tabindex: "0", role: "group" });
  const sums = h("ul", { class: "legend" });
  const tip = h("div", { class: "tip", hidden: true });
  const extent = h("span", { class: "extent" });
  const button = (text, label, act) =>
    h("button", { type: "button", class: "quiet", "aria-label": label, title: label, onclick: act }, text);
  const rows = h("tbody");
  const caption = h("summary", {}, "Ranges as a table");
  const table = h(
    "details",
    { class: "ranges", ontoggle: () => tabulate() },
    caption,
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["From", "To", "Seqs", "Fate", "Reason"].map((each) => h("th", { scope: "col" }, each)),
        ),
      ),
      rows,
    ),
  );
  const node = h(
    "section",
    { class: "card picture", "aria-label": "The seq axis" },
    h(
      "header",
      {},
      h("h2", {}, "Seq axis"),
      extent,
      h("span", { class: "space" }),
      button("Whole", "Show the whole axis", () => zoom(whole())),
      button("Kept", "Show what is kept", () => zoom(kept())),
      button("−", "Zoom out", () => scale(2)),
      button("+", "Zoom in", () => scale(0.5)),
    ),
    sums,
    h("div", { class: "stage" }, svg, tip),
    table,
  );

  const base = () => topic.config.seq_base;
  const word = (look) => (look === "deleted" && topic.queue ? "acked or deleted" : LOOKS[look].word);
  const whole = () => [base(), topic.head_seq + 1];
  function kept() {
    const [from, to] = [topic.evict_floor, topic.head_seq + 1];
    return from >= to ? whole() : [Math.max(from - Math.max((to - from) * 0.08, 1), base()), to];
  }
  // What was lost long ago must not squeeze what is kept into a line.
  const auto = () =>
    topic.head_seq >= topic.evict_floor && (topic.evict_floor - base()) / (topic.head_seq + 1 - base()) > 0.8
      ? kept()
      : whole();

  function domain() {
    if (!chosen) return auto();
    const [low, high] = whole();
    const size = Math.min(chosen[1] - chosen[0], high - low);
    const from = Math.min(Math.max(chosen[0], low), high - size);
    return [from, from + size];
  }

  function zoom(to) {
    if (!topic || topic.head_seq < base()) return;
    const [low, high] = whole();
    const middle = (to[0] + to[1]) / 2;
    const half = Math.max(Math.min((to[1] - to[0]) / 2, (high - low) / 2), 2);
    chosen = [middle - half, middle + half];
    draw();
    onZoom(domain());
  }

  function scale(by, about) {
    if (!topic) return;
    const [from, to] = domain();
    const middle = about ?? (from + to) / 2;
    zoom([middle - (middle - from) * by, middle + (to - middle) * by]);
  }

  const shift = (by) => {
    if (!topic) return;
    const [from, to] = domain();
    zoom([from + (to - from) * by, to + (to - from) * by]);
  };
  const keys = {
    "+": () => scale(0.5),
    "=": () => scale(0.5),
    "-": () => scale(2),
    0: () => zoom(whole()),
    ArrowLeft: () => shift(-0.2),
    ArrowRight: () => shift(0.2),
  };
  svg.addEventListener("keydown", (event) => {
    if (!Object.hasOwn(keys, event.key) || event.ctrlKey || event.metaKey) return;
    keys[event.key]();
    event.preventDefault();
    event.stopPropagation();
  });

  // -- drawing ----------------------------------------------------------------------------------------------------

  function shape(x, y, wide, high, look, range) {
    const group = s("g", {
      class: `range ${look}`,
      transform: `translate(${x.toFixed(2)} ${y})`,
      "data-first": range.first,
      "data-last": range.last,
      "data-look": look,
    });
    add(group, [
      s("rect", { width: wide.toFixed(2), height: high, class: `fill-${look}` }),
      look !== "live" && s("rect", { width: wide.toFixed(2), height: high, fill: `url(#${hatch(look)})` }),
    ]);
    return group;
  }

  function draw() {
    if (!topic || !width) return;
    const inner = width - 2 * PAD;
    if (topic.head_seq < base()) {
      set(
        svg,
        s(
          "text",
          { x: width / 2, y: 44, class: "nothing", "text-anchor": "middle" },
          `Nothing was written yet: the first record will be seq ${num(base())}.`,
        ),
      );
      svg.setAttribute("height", 80);
      svg.setAttribute("aria-label", "The seq axis is empty");
      say(extent, "");
      set(sums);
      return;
    }
    const [from, to] = domain();
    const key = JSON.stringify([
      ranges,
      cursors,
      jobs.map((job) => [job.$seq, job.state]),
      from,
      to,
      width,
      topic.head_seq,
      topic.earliest_seq,
      topic.evict_floor,
    ]);
    if (key === drawn) return;
    drawn = key;
    const place = (seq) => ((seq - from) / (to - from)) * inner;
    const inSight = ({ x }) => x >= -0.5 && x <= inner + 0.5;

    const marks = new Map();
    const mark = (seq, name) => marks.set(seq, [...(marks.get(seq) ?? []), name]);
    if (topic.evict_floor > base()) mark(topic.evict_floor, "evict_floor");
    mark(topic.earliest_seq, "earliest_seq");
    const flags = [...marks].map(([seq, names]) => ({
      x: place(seq),
      text: `${names.join(" = ")} ${num(seq)}`,
      kind: names.includes("evict_floor") ? "floor" : "earliest",
    }));
    flags.push({ x: place(topic.head_seq + 1), text: `head_seq ${num(topic.head_seq)}`, kind: "head" });
    const shownFlags = flags.filter(inSight);
    const flagRows = stagger(shownFlags, inner);
    const arrows = cursors
      .map((cursor) => ({ x: place(cursor.seq + 1), text: `${cursor.name} ${num(cursor.seq)}`, kind: cursor.kind }))
      .filter(inSight);
    const arrowRows = stagger(arrows, inner, 4);

    const laneY = flagRows * ROW + 7;
    const tickY = laneY + LANE;
    const arrowY = tickY + 20;
    const overY = arrowY + arrowRows * ROW + (arrowRows ? 8 : 4);
    const lane = s("g", { class: "lane", transform: `translate(${PAD} 0)` });
    add(lane, [s("rect", { class: "bed", y: laneY, width: inner, height: LANE })]);
    for (const [x, wide, look, range] of blocks(ranges, from, to, inner))
      lane.append(shape(x, laneY, wide, LANE, look, range));
    for (const at of ticks(from, to, inner)) {
      const x = place(at);
      add(lane, [
        s("path", { class: "tick", d: `M${x} ${tickY}v4` }),
        x > 12 &&
          x < inner - 12 &&
          !arrows.some((arrow) => Math.abs(arrow.x - x) < 22) &&
          s("text", { class: "ticks", x, y: tickY + 15, "text-anchor": "middle" }, short(at)),
      ]);
    }
    for (const flag of shownFlags) {
      const y = flag.row * ROW + 1;
      add(lane, [
        s("path", { class: `pole ${flag.kind}`, d: `M${flag.x} ${y + 15}V${tickY}` }),
        s("rect", { class: `plate ${flag.kind}`, x: flag.left, y, width: flag.wide, height: 16, rx: 4 }),
        s(
          "text",
          { class: `flag ${flag.kind}`, x: flag.left + flag.wide / 2, y: y + 12, "text-anchor": "middle" },
          flag.text,
        ),
      ]);
    }
    // Jobs that are out or set aside, where they stand.
    for (const job of jobs) {
      const x = place(job.$seq + 0.5);
      if (inSight({ x }))
        lane.append(
          s(
            "circle",
            { class: `job ${job.state}`, cx: x, cy: laneY + LANE / 2, r: 5, "data-seq": job.$seq },
            s("title", {}, `${job.$seq}: ${job.state.replace("_", " ")}`),
          ),
        );
    }
    for (const arrow of arrows) {
      add(lane, [
        s("path", { class: "stem", d: `M${arrow.x} ${laneY}V${arrowY + arrow.row * ROW + 2}` }),
        s("path", { class: "arrow", d: `M${arrow.x} ${tickY - 1}l-5 8h10z` }),
      ]);
    }
    for (const arrow of arrows) {
      const y = arrowY + arrow.row * ROW;
      add(lane, [
        s("rect", { class: "plate reader", x: arrow.left, y, width: arrow.wide, height: 16, rx: 4 }),
        s(
          "text",
          { class: "flag reader", x: arrow.left + arrow.wide / 2, y: y + 12, "text-anchor": "middle" },
          arrow.text,
        ),
      ]);
    }
    // The whole life in one line, and which part of it is shown.
    const [low, high] = whole();
    const over = s("g", { class: "over", transform: `translate(${PAD} 0)` });
    add(over, [s("rect", { class: "bed", y: overY, width: inner, height: 10 })]);
    for (const [x, wide, look, range] of blocks(ranges, low, high, inner))
      over.append(shape(x, overY, wide, 10, look, range));
    const left = ((from - low) / (high - low)) * inner;
    const right = ((to - low) / (high - low)) * inner;
    add(over, [
      s("rect", { class: "brush", x: left, y: overY - 3, width: Math.max(right - left, 4), height: 16, rx: 3 }),
      s("text", { class: "ticks", x: 0, y: overY + 27 }, short(low)),
      s("text", { class: "ticks", x: inner, y: overY + 27, "text-anchor": "end" }, short(topic.head_seq)),
      s("text", { class: "ticks", x: inner / 2, y: overY + 27, "text-anchor": "middle" }, "whole life"),
    ]);
    set(svg, lane, over);
    svg.dataset.lane = `${laneY} ${overY}`;
    svg.setAttribute("height", overY + 32);
    svg.setAttribute("viewBox", `0 0 ${width} ${overY + 32}`);
    const parts = totals(ranges);
    set(
      sums,
      parts.map(([look, count]) =>
        h("li", { title: LOOKS[look].more, "data-look": look }, swatch(look), h("b", {}, short(count)), word(look)),
      ),
    );
    svg.setAttribute(
      "aria-label",
      `Seqs ${num(base())} to ${num(topic.head_seq)}: ${parts.map(([look, count]) => `${num(count)} ${word(look)}`).join(", ")}`,
    );
    say(extent, `${num(Math.ceil(from))} – ${num(Math.min(Math.floor(to - 0.001), topic.head_seq))}`);
    tabulate();
  }

  function tabulate() {
    say(caption, `${num(ranges.length)} ${ranges.length === 1 ? "range" : "ranges"} as a table`);
    if (!table.open) return;
    set(
      rows,
      ranges.slice(0, 200).map((range) =>
        h(
          "tr",
          { class: isLoss(lookOf(range)) ? "loss" : "" },
          [num(range.first), num(range.last), num(range.last - range.first + 1), range.kind, range.reason ?? ""].map(
            (each) => h("td", {}, each),
          ),
        ),
      ),
    );
    if (ranges.length > 200) rows.append(h("tr", {}, h("td", { colspan: 5 }, `and ${num(ranges.length - 200)} more`)));
  }

  // -- pointing -----------------------------------------------------------------------------------------------------

  function under(event) {
    const box = svg.getBoundingClientRect();
    const [laneY, overY] = (svg.dataset.lane ?? "0 0").split(" ").map(Number);
    const y = event.clientY - box.top;
    const part = (event.clientX - box.left - PAD) / (width - 2 * PAD);
    const isOver = y >= overY - 4;
    const [from, to] = isOver ? whole() : domain();
    return {
      seq: from + part * (to - from),
      isOver,
      isLane: y >= laneY && y <= laneY + LANE,
      x: event.clientX - box.left,
    };
  }

  let drag = null;
  svg.addEventListener("pointerdown", (event) => {
    if (!topic || topic.head_seq < base()) return;
    drag = { ...under(event), domain: domain() };
    svg.setPointerCapture(event.pointerId);
    if (drag.isOver) {
      const half = (drag.domain[1] - drag.domain[0]) / 2;
      zoom([drag.seq - half, drag.seq + half]);
    }
  });
  svg.addEventListener("pointermove", (event) => {
    if (!topic || topic.head_seq < base()) return;
    const here = under(event);
    if (drag) {
      const half = (drag.domain[1] - drag.domain[0]) / 2;
      const by = ((drag.x - here.x) / (width - 2 * PAD)) * half * 2;
      zoom(drag.isOver ? [here.seq - half, here.seq + half] : [drag.domain[0] + by, drag.domain[1] + by]);
      return;
    }
    const seq = Math.floor(here.seq);
    const range = ranges.find((each) => each.first <= seq && seq <= each.last);
    tip.hidden = !(range && (here.isLane || here.isOver));
    if (tip.hidden) return;
    set(
      tip,
      h("b", {}, `seq ${num(seq)}`),
      h("span", {}, `${word(lookOf(range))}${range.reason ? ` (${range.reason})` : ""}`),
      h("span", {}, `${seqs(range.first, range.last)}: ${num(range.last - range.first + 1)} in a row`),
    );
    tip.style.setProperty("left", `${Math.min(Math.max(here.x, 90), width - 90)}px`);
  });
  svg.addEventListener("pointerup", () => (drag = null));
  svg.addEventListener("pointercancel", () => (drag = null));
  svg.addEventListener("pointerleave", () => (tip.hidden = true));
  svg.addEventListener("dblclick", (event) => {
    if (topic) scale(0.3, under(event).seq);
  });
  const watcher = new ResizeObserver(([entry]) => {
    width = Math.floor(entry.contentRect.width);
    draw();
  });
  watcher.observe(svg.parentNode ?? node);

  return {
    node,
    keys,
    domain: () => (topic && topic.head_seq >= base() ? domain() : null),
    update(state, found, readers, out = []) {
      topic = state;
      ranges = found;
      cursors = readers;
      jobs = out;
      draw();
    },
    close: () => watcher.disconnect(),
  };
}
