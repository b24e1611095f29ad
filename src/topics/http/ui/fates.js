// What can become of a seq, how each fate looks, and how ranges of them become blocks on a line.

import { h, s, fresh } from "./dom.js";

// From harmless to worst: of what falls on one pixel, the worst is drawn.
export const LOOKS = {
  live: { word: "live", more: "readers get these" },
  deleted: { word: "deleted", more: "removed on purpose (a delete, or an acked job): reads pass over it silently" },
  unknown: { word: "not asked for", more: "more ranges than one answer holds: zoom in" },
  ttl: { word: "expired", more: "lost: the TTL came" },
  cap: { word: "evicted", more: "lost: a cap was full" },
  mixed: { word: "evicted or expired", more: "lost to more than one of cap, TTL and restart" },
  source_trim: { word: "lost upstream", more: "a hole: a router or pipeline met a loss in its source" },
  restart: { word: "gone at a restart", more: "lost: an ephemeral topic keeps nothing over one" },
  crash: { word: "lost in a crash", more: "a hole: may hold seqs that were never given out" },
  corrupt: { word: "corrupt on disk", more: "a hole: the bytes are provably damaged" },
};
const ORDER = Object.keys(LOOKS);
export const lookOf = (range) =>
  range.kind === "evicted" || range.kind === "hole" ? (range.reason in LOOKS ? range.reason : "mixed") : range.kind;
export const isLoss = (look) => ORDER.indexOf(look) > 2;

export function legend(isLong = false) {
  return h(
    "ul",
    { class: isLong ? "legend long" : "legend" },
    Object.entries(LOOKS).map(([look, { word, more }]) =>
      h("li", {}, swatch(look), h("b", {}, word), isLong && h("span", {}, more)),
    ),
  );
}

export function swatch(look) {
  return s(
    "svg",
    { class: "swatch", width: 14, height: 14, "aria-hidden": "true" },
    s("rect", { width: 14, height: 14, rx: 3, class: `fill-${look}` }),
    ...strokes(look, 14, 14),
  );
}

// Marks that tell the colours apart for those who do not see them.
function strokes(look, width, height) {
  if (look === "live") return [];
  return [s("rect", { width, height, rx: 3, fill: `url(#${hatch(look)})` })];
}

const made = new Map();
let defs;
export function hatch(look) {
  if (!made.has(look)) {
    defs ??= document.body.appendChild(
      s("svg", { width: 0, height: 0, class: "defs", "aria-hidden": "true" }, s("defs")),
    ).firstChild;
    const id = fresh("hatch");
    const turn = { ttl: -45, cap: 45, mixed: 45, source_trim: 90, deleted: 0, unknown: 0 }[look] ?? 0;
    const lines = [s("path", { d: "M0 3H6", class: "hatch" })];
    if (look === "mixed" || look === "crash" || look === "corrupt")
      lines.push(s("path", { d: "M3 0V6", class: "hatch" }));
    if (look === "restart" || look === "unknown")
      lines.splice(0, 1, s("circle", { cx: 3, cy: 3, r: 1.1, class: "dot" }));
    defs.append(
      s(
        "pattern",
        { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${turn})` },
        lines,
      ),
    );
    made.set(look, id);
  }
  return made.get(look);
}

// What is drawn of ranges in a stretch of the axis: [x, width, look, range]. Thin ones share their pixel.
export function blocks(ranges, from, to, width) {
  const scale = width / (to - from);
  const out = [];
  let thin = null;
  for (const range of ranges) {
    if (range.last + 1 <= from || range.first >= to) continue;
    const x = (Math.max(range.first, from) - from) * scale;
    const end = (Math.min(range.last + 1, to) - from) * scale;
    const look = lookOf(range);
    if (end - x >= 1.5) {
      thin = null;
      out.push([x, end - x, look, range]);
    } else if (thin && Math.floor(x) === Math.floor(thin[0])) {
      thin[1] = Math.max(thin[1], end - thin[0]);
      if (ORDER.indexOf(look) > ORDER.indexOf(thin[2])) [thin[2], thin[3]] = [look, range];
    } else {
      thin = [x, end - x, look, range];
      out.push(thin);
    }
  }
  // Losses last, so that nothing covers one.
  return [
    ...out.filter((each) => !isLoss(each[2])),
    ...out
      .filter((each) => isLoss(each[2]))
      .map(([x, wide, look, range]) => [
        wide < 3 ? Math.max(x - (3 - wide) / 2, 0) : x,
        Math.max(wide, 3),
        look,
        range,
      ]),
  ];
}

export function totals(ranges) {
  const sums = new Map();
  for (const range of ranges) {
    const look = lookOf(range);
    sums.set(look, (sums.get(look) ?? 0) + range.last - range.first + 1);
  }
  return ORDER.filter((look) => sums.has(look)).map((look) => [look, sums.get(look)]);
}
