// Routers as a drawing: topics in layers from left to right. Cycles are allowed: an edge that closes one goes back below.

import { s, add } from "./dom.js";
import { num, short } from "./format.js";

const BOX = { width: 172, height: 38, right: 96, below: 24 };
const LETTERS = 21;

export const STATES = { running: "running", catching_up: "catching up", blocked: "blocked" };

// The end of a router: a topic here, or one on another server.
export const end = (place) => (typeof place === "string" ? place : `${place?.topic ?? "?"} @ ${place?.url ?? "?"}`);

// Which edges close a cycle, by a walk in depth without recursion.
function closing(names, out) {
  const state = new Map();
  const back = new Set();
  for (const start of names) {
    if (state.has(start)) continue;
    const path = [[start, 0]];
    state.set(start, "open");
    while (path.length) {
      const top = path.at(-1);
      const edge = out.get(top[0])[top[1]++];
      if (!edge) {
        state.set(top[0], "done");
        path.pop();
      } else if (state.get(edge.to) === "open") back.add(edge);
      else if (!state.has(edge.to)) {
        state.set(edge.to, "open");
        path.push([edge.to, 0]);
      }
    }
  }
  return back;
}

function layout(routers) {
  const names = [...new Set(routers.flatMap((router) => [end(router.source), end(router.dest)]))];
  const edges = routers.map((router) => ({ router, from: end(router.source), to: end(router.dest) }));
  const out = new Map(names.map((name) => [name, []]));
  for (const edge of edges) out.get(edge.from).push(edge);
  const back = closing(names, out);
  // The layer of a topic is the longest way to it.
  const layer = new Map(names.map((name) => [name, 0]));
  const open = new Map(names.map((name) => [name, 0]));
  const forward = edges.filter((edge) => !back.has(edge));
  for (const edge of forward) open.set(edge.to, open.get(edge.to) + 1);
  const ready = names.filter((name) => !open.get(name));
  while (ready.length) {
    const name = ready.shift();
    for (const edge of out.get(name)) {
      if (back.has(edge)) continue;
      layer.set(edge.to, Math.max(layer.get(edge.to), layer.get(name) + 1));
      open.set(edge.to, open.get(edge.to) - 1);
      if (!open.get(edge.to)) ready.push(edge.to);
    }
  }
  // An edge over several layers bends at a point in each of them.
  const layers = [];
  const put = (item, at) => (layers[at] ??= []).push(item);
  const items = new Map(names.map((name) => [name, { name, near: [] }]));
  for (const name of names) put(items.get(name), layer.get(name));
  for (const edge of forward) {
    edge.way = [items.get(edge.from)];
    for (let at = layer.get(edge.from) + 1; at < layer.get(edge.to); at += 1) {
      const bend = { near: [] };
      put(bend, at);
      edge.way.push(bend);
    }
    edge.way.push(items.get(edge.to));
    for (let at = 1; at < edge.way.length; at += 1) {
      edge.way[at - 1].near.push(edge.way[at]);
      edge.way[at].near.push(edge.way[at - 1]);
    }
  }
  // Each wants to be beside what it is connected to.
  const number = () => layers.forEach((row) => row.forEach((item, at) => (item.y = at - row.length / 2)));
  number();
  for (let sweep = 0; sweep < 8; sweep += 1) {
    for (const row of sweep % 2 ? [...layers].reverse() : layers) {
      for (const item of row)
        item.wish = item.near.length ? item.near.reduce((sum, each) => sum + each.y, 0) / item.near.length : item.y;
      row.sort((a, b) => a.wish - b.wish);
    }
    number();
  }
  const step = BOX.height + BOX.below;
  const tallest = Math.max(...layers.map((row) => row.length), 1);
  for (const [at, row] of layers.entries()) {
    for (const [place, item] of row.entries()) {
      item.x = at * (BOX.width + BOX.right);
      item.y = (place + (tallest - row.length) / 2) * step;
    }
  }
  for (const edge of back) edge.way = [items.get(edge.from), items.get(edge.to)];
  const width = layers.length * (BOX.width + BOX.right) - BOX.right;
  // Edges that go back run below everything, each on a line of its own.
  [...back].forEach((edge, at) => (edge.low = tallest * step + 6 + at * 12));
  return {
    boxes: [...items.values()],
    edges,
    back,
    width,
    height: tallest * step - BOX.below + (back.size ? 30 + back.size * 12 : 0),
  };
}

function curve(edge, isBack, shift) {
  const middle = BOX.height / 2;
  const [first, last] = [edge.way[0], edge.way.at(-1)];
  if (isBack) {
    const { low } = edge;
    const right = first.x + BOX.width + 24 + (low % 24) / 2;
    const left = last.x - 26 - (low % 24) / 2;
    const path = `M${first.x + BOX.width} ${first.y + middle}H${right - 8}q8 0 8 8V${low - 8}q0 8 -8 8H${left + 8}q-8 0 -8 -8V${last.y + middle + 8}q0 -8 8 -8H${last.x - 7}`;
    return { path, x: (first.x + last.x + BOX.width) / 2, y: low };
  }
  let path = `M${first.x + BOX.width} ${first.y + middle + shift}`;
  let [x, y] = [first.x + BOX.width, first.y + middle + shift];
  for (const item of edge.way.slice(1)) {
    const isLast = item === last;
    const [toX, toY] = [item.x - (isLast ? 7 : 0), item.y + middle + shift];
    const half = (toX - x) / 2;
    path += `C${x + half} ${y} ${toX - half} ${toY} ${toX} ${toY}`;
    [x, y] = [toX, toY];
    if (!isLast) {
      path += `h${BOX.width}`;
      x += BOX.width;
    }
  }
  const start = edge.way[1];
  return { path, x: (first.x + BOX.width + start.x) / 2, y: (first.y + start.y) / 2 + middle + shift };
}

export function drawing(routers, choose) {
  const { boxes, edges, back, width, height } = layout(routers);
  const marker = (state) =>
    s(
      "marker",
      {
        id: `tip-${state}`,
        viewBox: "0 0 8 8",
        refX: 2,
        refY: 4,
        markerWidth: 11,
        markerHeight: 11,
        markerUnits: "userSpaceOnUse",
        orient: "auto",
      },
      s("path", { d: "M0 0L8 4L0 8z", class: `tip-${state}` }),
    );
  const graph = s(
    "svg",
    {
      class: "graph",
      width: width + 88,
      height: height + 20,
      viewBox: `-44 -10 ${width + 88} ${height + 20}`,
      role: "group",
      "aria-label": `${num(routers.length)} routers between ${num(boxes.length)} topics`,
    },
    s("defs", {}, ["running", "catching_up", "blocked", "other"].map(marker)),
  );
  const between = new Map();
  for (const edge of edges) {
    const pair = JSON.stringify([edge.from, edge.to]);
    const nth = between.get(pair) ?? 0;
    between.set(pair, nth + 1);
    const shift = nth ? (nth % 2 ? 1 : -1) * Math.ceil(nth / 2) * 7 : 0;
    const { path, x, y } = curve(edge, back.has(edge), shift);
    const { router } = edge;
    const state = Object.hasOwn(STATES, router.state) ? router.state : "other";
    const label = router.lag > 0 ? `lag ${short(router.lag)}` : "";
    const group = s("g", {
      class: `edge ${state}${back.has(edge) ? " back" : ""}`,
      tabindex: "0",
      role: "button",
      "data-router": router.router,
      "aria-label": `Router ${router.router}: ${edge.from} to ${edge.to}, ${router.state}${label ? `, ${label}` : ""}`,
      onclick: () => choose(router),
      onkeydown: (event) => event.key === "Enter" && choose(router),
    });
    add(group, [
      s("path", { class: "hit", d: path }),
      s("path", { class: "wire", d: path, "marker-end": `url(#tip-${state})` }),
      label && [
        s("rect", {
          class: "plate",
          x: x - label.length * 3.4 - 6,
          y: y - 9,
          width: label.length * 6.8 + 12,
          height: 18,
          rx: 9,
        }),
        s("text", { class: "lagging", x, y: y + 4, "text-anchor": "middle" }, label),
      ],
    ]);
    graph.append(group);
  }
  for (const box of boxes) {
    const text = box.name.length > LETTERS ? `${box.name.slice(0, LETTERS - 1)}…` : box.name;
    const isRemote = box.name.includes(" @ ");
    const group = s(
      "g",
      { class: isRemote ? "box remote" : "box", transform: `translate(${box.x} ${box.y})` },
      s("title", {}, box.name),
      s("rect", { width: BOX.width, height: BOX.height, rx: 8 }),
      s("text", { x: BOX.width / 2, y: BOX.height / 2 + 4, "text-anchor": "middle" }, text),
    );
    graph.append(
      isRemote
        ? group
        : s("a", { href: `#/topics/${encodeURIComponent(box.name)}`, "aria-label": `Topic ${box.name}` }, group),
    );
  }
  return graph;
}
