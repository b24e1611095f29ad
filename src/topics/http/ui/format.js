// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  fractionalSecondDigits: 3,
});
const day = new Intl.DateTimeFormat("en-CA", { dateStyle: "short", timeStyle: "medium", hourCycle: "h23" });

export const num = (n) => whole.format(n);
export const short = (n) => (Math.abs(n) < 10_000 ? whole.format(n) : compact.format(n));
export const time = (ts) => clock.format(ts);
export const date = (ts) => day.format(ts).replace(",", "");

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) {
    n /= 1024;
    at += 1;
  }
  return `${at && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

export function rate(n) {
  if (n === undefined || n === null) return "–";
  if (n === 0) return "0/s";
  return n < 10 ? `${n.toFixed(n < 1 ? 2 : 1)}/s` : `${short(Math.round(n))}/s`;
}

export function span(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function ago(ts) {
  if (ts === null || ts === undefined) return "never";
  const ms = Date.now() - ts;
  return ms < 1500 ? "now" : `${span(ms)} ago`;
}

// "250", "30s", "10m", "12h", "7d" as milliseconds; anything else as it is, for the API to refuse by name.
export function millis(text) {
  const found = /^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?\s*$/.exec(text);
  if (!found) return text;
  const units = { ms: 1, s: 1000, m: 60_000, min: 60_000, h: 3_600_000, d: 86_400_000 };
  return Math.round(Number(found[1]) * units[found[2] ?? "ms"]);
}

export const seqs = (first, last) => (first === last ? num(first) : `${num(first)} – ${num(last)}`);

// -- JSON as it was sent ------------------------------------------------------------------------------------------
// `data` comes back byte for byte, and is shown so: 1.0 stays 1.0, and 2^60 keeps its last digit.

function skipSpace(text, at) {
  while (" \n\r\t".includes(text[at]) && at < text.length) at += 1;
  return at;
}

function skipString(text, at) {
  for (let end = at + 1; ; end += 1) {
    end = text.indexOf('"', end);
    if (end < 0) throw new SyntaxError("a string without end");
    let slashes = 0;
    while (text[end - 1 - slashes] === "\\") slashes += 1;
    if (slashes % 2 === 0) return end + 1;
  }
}

function skip(text, at) {
  let depth = 0;
  for (;;) {
    const letter = text[at];
    if (letter === undefined) return at;
    if (letter === '"') at = skipString(text, at);
    else if (letter === "{" || letter === "[") {
      depth += 1;
      at += 1;
      continue;
    } else if (letter === "}" || letter === "]") {
      if (!depth) return at;
      depth -= 1;
      at += 1;
    } else if (depth) {
      at += 1;
      continue;
    } else {
      while (at < text.length && !",]} \n\r\t".includes(text[at])) at += 1;
    }
    if (!depth) return at;
  }
}

// The members of an object, each as the text it has.
export function members(text) {
  const found = new Map();
  let at = skipSpace(text, skipSpace(text, 0) + 1);
  while (at < text.length && text[at] !== "}") {
    const end = skipString(text, at);
    const name = JSON.parse(text.slice(at, end));
    at = skipSpace(text, skipSpace(text, end) + 1);
    const stop = skip(text, at);
    found.set(name, text.slice(at, stop));
    at = skipSpace(text, stop);
    if (text[at] === ",") at = skipSpace(text, at + 1);
  }
  return found;
}

export function elements(text) {
  const found = [];
  let at = skipSpace(text, skipSpace(text, 0) + 1);
  while (at < text.length && text[at] !== "]") {
    const stop = skip(text, at);
    found.push(text.slice(at, stop));
    at = skipSpace(text, stop);
    if (text[at] === ",") at = skipSpace(text, at + 1);
  }
  return found;
}

// A record of an answer or a frame; `data` is text.
export function record(text) {
  const found = members(text);
  const value = (name) => (found.has(name) ? JSON.parse(found.get(name)) : undefined);
  return {
    seq: value("$seq"),
    ts: value("$ts"),
    node: value("$node"),
    tag: value("$tag"),
    meta: found.get("meta"),
    data: found.get("data") ?? "null",
    deliveries: value("deliveries"),
    deadline: value("deadline"),
    lease: value("lease_id"),
  };
}

// The same tokens on lines of their own.
export function indent(text, most = 65_536) {
  if (text.length > most) return `${text.slice(0, most)}\n… ${num(text.length - most)} more characters`;
  let out = "";
  let depth = 0;
  for (let at = 0; at < text.length;) {
    const letter = text[at];
    if (letter === '"') {
      const end = skipString(text, at);
      out += text.slice(at, end);
      at = end;
      continue;
    }
    at += 1;
    if (" \n\r\t".includes(letter)) continue;
    if (letter === "{" || letter === "[") {
      const next = skipSpace(text, at);
      if (text[next] === "}" || text[next] === "]") {
        out += letter + text[next];
        at = next + 1;
      } else out += `${letter}\n${"  ".repeat((depth += 1))}`;
    } else if (letter === "}" || letter === "]") out += `\n${"  ".repeat((depth -= 1))}${letter}`;
    else if (letter === ",") out += `,\n${"  ".repeat(depth)}`;
    else if (letter === ":") out += ": ";
    else out += letter;
  }
  return out;
}
