// Requests. The key lives in this module's memory: not in storage, not in a URL, and it is gone with the page.

import { members, elements, record } from "./format.js";

const root = new URL(".", document.baseURI);
let key = null;
let asking = null;
// Who has closed the question is not asked again until they want to be.
let isDeclined = false;

// Somebody who can ask a person for a key; resolves to it, or to null.
export const hooks = { askForKey: async () => null, onState: () => {} };

export const hasKey = () => key !== null;

export function forgetKey() {
  key = null;
}

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = body?.code ?? "unknown";
    this.detail = body?.detail ?? {};
  }
}

export class Unreachable extends Error {}

// One question for all requests that wait for a key.
function ask(wrong) {
  asking ??= hooks.askForKey(wrong).then((given) => {
    asking = null;
    isDeclined = !given;
    if (given) key = given;
    return Boolean(given);
  });
  return asking;
}

export async function changeKey() {
  isDeclined = false;
  return ask(null);
}

async function send(method, path, { body, accept = "application/json", headers = {}, signal } = {}) {
  for (;;) {
    if (asking) await asking;
    const sent = key;
    const all = { accept, ...headers };
    if (sent !== null) all.authorization = `Bearer ${sent}`;
    if (body !== undefined) all["content-type"] = "application/json";
    let answer;
    try {
      answer = await fetch(new URL(path, root), {
        method,
        headers: all,
        body: body === undefined || typeof body === "string" ? body : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch (problem) {
      if (signal?.aborted) throw problem;
      hooks.onState("offline");
      throw new Unreachable("the server cannot be reached");
    }
    if (answer.ok) {
      hooks.onState("ok");
      return answer;
    }
    const error = new ApiError(answer.status, (await answer.json().catch(() => null))?.error);
    if (error.status === 401) {
      hooks.onState("locked");
      // Another request may have got a new one meanwhile.
      if (sent !== key || (!isDeclined && (await ask(sent === null ? null : error.message)))) continue;
    } else if (error.code === "not_ready") hooks.onState("starting", error.detail.replay_progress);
    else if (error.status < 500) hooks.onState("ok");
    throw error;
  }
}

export async function get(path, options) {
  return (await send("GET", path, options)).json();
}

export async function post(path, body, options) {
  return (await send("POST", path, { ...options, body })).json();
}

export async function put(path, body) {
  return (await send("PUT", path, { body })).json();
}

export async function remove(path) {
  return (await send("DELETE", path)).json();
}

export const topicPath = (name, verb = "") => `v0/topics/${encodeURIComponent(name)}${verb && "/"}${verb}`;

// An answer with records in it, whose data stays the text that it was.
export async function records(path, body, member = "records") {
  const found = members(await (await send("POST", path, { body })).text());
  const fields = Object.fromEntries(
    [...found].filter(([name]) => name !== member).map(([name, text]) => [name, JSON.parse(text)]),
  );
  return { ...fields, records: elements(found.get(member)).map(record) };
}

// Server-sent events over fetch, because EventSource cannot send a header.
export async function* events(path, lastId, signal) {
  const headers = lastId ? { "last-event-id": lastId } : {};
  const answer = await send("GET", path, { accept: "text/event-stream", headers, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { kind: "message", id: undefined, data: [] };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (event.data.length || event.id !== undefined) yield { ...event, data: event.data.join("\n") };
          event = { kind: "message", id: undefined, data: [] };
        } else if (line.startsWith("data: ")) event.data.push(line.slice(6));
        else if (line.startsWith("event: ")) event.kind = line.slice(7);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Calls again and again, never twice at once, not while nobody looks, and ever more rarely while it fails.
export function poll(work, ms) {
  let timer;
  let failures = 0;
  let running = null;
  let isWanted = false;
  let isPaused = false;
  const end = new AbortController();
  const { signal } = end;

  async function run() {
    clearTimeout(timer);
    do {
      isWanted = false;
      try {
        await work();
        failures = 0;
      } catch (problem) {
        failures = Math.min(failures + 1, 4);
        if (!signal.aborted && !(problem instanceof ApiError || problem instanceof Unreachable)) console.error(problem);
      }
    } while (isWanted && !signal.aborted);
    running = null;
    if (!signal.aborted && !isPaused) timer = setTimeout(next, ms * 2 ** failures);
  }

  function next() {
    if (signal.aborted || isPaused) return null;
    if (document.hidden) document.addEventListener("visibilitychange", next, { once: true, signal });
    else running ??= run();
    return running;
  }

  next();
  return {
    // What is under way may have asked before something changed: then once more.
    now() {
      if (running) isWanted = true;
      return next();
    },
    // Nothing more is asked, and what was asked is answered.
    async pause() {
      isPaused = true;
      clearTimeout(timer);
      await running;
    },
    resume() {
      isPaused = false;
      next();
    },
    stop() {
      clearTimeout(timer);
      end.abort();
    },
  };
}
