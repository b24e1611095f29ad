// Making, changing and deleting a topic, and writing to it. What the API refuses is shown at the field it names.

import { $, h, dialog, set, toast } from "./dom.js";
import { post, put, remove, topicPath, Unreachable } from "./api.js";
import { millis, num, seqs } from "./format.js";

const changed = () => document.dispatchEvent(new CustomEvent("topics-changed"));

// name, kind, label, hint. A field that stays empty is not sent: the default of the server holds.
const RETENTION = [
  ["ttl_ms", "ms", "Time to live", "0: for ever. 30s, 10m, 12h, 7d"],
  ["cap_records", "number", "Most records", "0: no cap"],
  ["cap_bytes", "number", "Most bytes", "0: no cap"],
  ["discard", ["old", "reject"], "When full", "old: evict the oldest, told by a tombstone"],
];
const QUEUE = [
  ["lease_ms", "ms", "Lease", "30s; how long a claim holds a job"],
  ["max_deliveries", "number", "Most deliveries", "0: no limit; then a job is poison"],
  ["dead_letter", "text", "Dead letters go to", "a topic, not this one"],
  ["dlq_strategy", ["skip", "block", "block_and_dlq"], "Poison", "skip: to the dead letters; block: set aside"],
  ["ordering_required", "flag", "One consumer at a time, in order", ""],
  ["max_in_flight", "number", "Most in flight", "0: no limit"],
  ["max_ack_holes", "number", "Most ack holes", "0: no limit"],
  ["claim_jitter_ms", "ms", "Fairness window", "0; claims in it share evenly"],
  ["leases_durable", ["true", "false"], "Leases fsynced", "by default as the topic's class"],
];
const MORE = [
  ["seq_base", "number", "First seq", "1; set once"],
  ["idempotency_window_ms", "ms", "Idempotency window", "2m"],
  ["priority", "number", "Priority", "-1000 to 1000"],
  ["auto_priority", ["true", "false"], "Priority by use", "true"],
  ["dedupe_node", ["true", "false"], "Node filter on reads", "true"],
];

export function field([name, kind, label, hint], values) {
  const id = `field-${name}`;
  const value = values?.[name];
  const attributes = { id, name, "aria-describedby": `${id}-hint` };
  let input;
  if (kind === "flag") input = h("input", { ...attributes, type: "checkbox", checked: value ?? false });
  else if (Array.isArray(kind)) {
    input = h(
      "select",
      attributes,
      !values && h("option", { value: "" }, "default"),
      kind.map((each) => h("option", { value: each }, each)),
    );
    if (value !== undefined && value !== null) input.value = String(value);
  } else
    input = h("input", {
      ...attributes,
      type: "text",
      autocomplete: "off",
      spellcheck: "false",
      inputmode: kind === "text" ? "text" : "numeric",
      value: value === undefined || value === null ? "" : String(value),
    });
  return h(
    "div",
    { class: kind === "flag" ? "field flag" : "field" },
    h("label", { for: id }, label),
    input,
    hint && h("small", { id: `${id}-hint` }, hint),
  );
}

function read([name, kind], form) {
  const input = form.elements[name];
  if (kind === "flag") return input.checked || undefined;
  const text = input.value.trim();
  if (text === "") return undefined;
  if (kind === "ms") return millis(text);
  if (kind === "number") return /^-?\d+$/.test(text) ? Number(text) : text;
  return text === "true" ? true : text === "false" ? false : text;
}

// Shows what was refused, at the field that the message names.
function refuse(form, problem) {
  const place = $(".problem", form);
  place.hidden = false;
  set(place, problem.message);
  for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  const words = problem.message.split(/[^a-z_]+/);
  const named = [...form.elements].find((input) => input.name && words.includes(input.name));
  const at = named ?? (/\bname\b/.test(problem.message) ? form.elements.topic : null);
  if (at) {
    at.closest("details")?.setAttribute("open", "");
    at.setAttribute("aria-invalid", "true");
    at.focus();
  }
}

export const problemLine = () => h("p", { class: "problem", role: "alert", hidden: true });

// A form that can be sent once at a time.
export function sending(form, work) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = $("button.main", form);
    button.disabled = true;
    try {
      await work();
    } catch (problem) {
      refuse(form, problem);
    } finally {
      button.disabled = false;
    }
  });
  return form;
}

// With a topic, the form changes it; only what differs is sent.
export function createDialog(topic = null) {
  const values = topic?.config;
  const type = values?.type ?? "log";
  dialog(
    topic ? `Change ${topic.topic}` : "New topic",
    (close) => {
      const queue = h(
        "fieldset",
        { class: "queue-fields", hidden: type !== "queue" },
        h("legend", {}, "Queue"),
        QUEUE.map((each) => field(each, values)),
      );
      const choice = (value, text) =>
        h(
          "label",
          { class: "choice" },
          h("input", {
            type: "radio",
            name: "type",
            value,
            checked: value === type,
            disabled: Boolean(topic),
            onchange: () => (queue.hidden = value !== "queue"),
          }),
          text,
        );
      const more = topic ? MORE.filter(([name]) => name !== "seq_base") : MORE;
      const form = h(
        "form",
        { class: "stack", novalidate: true },
        problemLine(),
        !topic &&
          h(
            "div",
            { class: "field" },
            h("label", { for: "field-topic" }, "Name"),
            h("input", {
              id: "field-topic",
              name: "topic",
              required: true,
              maxlength: 255,
              autocomplete: "off",
              spellcheck: "false",
              placeholder: "orders.created",
            }),
            h("small", {}, "letters, digits and . _ : - ; begins with a letter or digit"),
          ),
        h(
          "div",
          { class: "pair" },
          h("fieldset", {}, h("legend", {}, "Kind"), choice("log", "Log"), choice("queue", "Queue")),
          field(
            [
              "durability",
              ["ephemeral", "memory", "disk", "fsync"],
              "Durability",
              "disk: survives a kill; fsync: a power cut too",
            ],
            values,
          ),
        ),
        h(
          "fieldset",
          {},
          h("legend", {}, "Retention"),
          RETENTION.map((each) => field(each, values)),
        ),
        queue,
        h(
          "details",
          {},
          h("summary", {}, "More"),
          h(
            "fieldset",
            {},
            more.map((each) => field(each, values)),
          ),
        ),
        h(
          "div",
          { class: "actions" },
          h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
          h("button", { class: "main" }, topic ? "Change" : "Create"),
        ),
      );
      return sending(form, async () => {
        const kind = form.elements.type.value;
        const config = topic ? {} : { type: kind };
        const fields = [["durability", []], ...RETENTION, ...(kind === "queue" ? QUEUE : []), ...more];
        for (const each of fields) {
          const [name] = each;
          const value = read(each, form);
          if (topic) {
            const now = value ?? (each[1] === "flag" ? false : null);
            if (now !== (values[name] ?? null)) config[name] = now;
          } else if (value !== undefined) config[name] = value;
        }
        const name = topic?.topic ?? form.elements.topic.value.trim();
        // An empty name would be another path.
        if (!name) throw new Error("a name is required");
        const answer = await put(topicPath(name), config);
        close();
        toast(answer.created ? `${name} is made` : `${name} is changed`);
        changed();
        if (!topic) location.hash = `#/topics/${encodeURIComponent(name)}`;
      });
    },
    { wide: true },
  );
  ($("#field-topic") ?? $("#field-durability")).focus();
}

const idempotencyKey = () =>
  `ui-${[...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("")}`;

export function writeDialog(name, done) {
  // The same key until the write is known to have happened: sent again, it is not written again.
  let key = idempotencyKey();
  dialog(`Write to ${name}`, (close) => {
    const text = h("textarea", {
      id: "write-text",
      name: "records",
      rows: 8,
      spellcheck: "false",
      placeholder: '{"order": 1}\n"any JSON"\n42',
    });
    const choice = (value, label, checked) =>
      h("label", { class: "choice" }, h("input", { type: "radio", name: "as", value, checked }), label);
    const form = h(
      "form",
      { class: "stack" },
      problemLine(),
      h("label", { for: "write-text" }, "Records, one on each line"),
      text,
      h(
        "div",
        { class: "pair" },
        h(
          "fieldset",
          {},
          h("legend", {}, "Each line is"),
          choice("json", "JSON, kept as it stands", true),
          choice("text", "text"),
        ),
        h("div", {}, field(["tag", "text", "Tag", ""]), field(["node", "text", "Node", ""])),
      ),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", class: "quiet", onclick: close }, "Close"),
        h("button", { class: "main" }, "Write"),
      ),
    );
    form.addEventListener("input", () => (key = idempotencyKey()));
    text.addEventListener(
      "keydown",
      (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit(),
    );
    return sending(form, async () => {
      const lines = text.value.split("\n").filter((line) => line.trim());
      if (!lines.length) throw new Error("there is nothing to write");
      const more = ["tag", "node"]
        .filter((each) => form.elements[each].value)
        .map((each) => `,"${each}":${JSON.stringify(form.elements[each].value)}`)
        .join("");
      const parts = lines.map((line, at) => {
        const data = form.elements.as.value === "json" ? line.trim() : JSON.stringify(line);
        try {
          JSON.parse(data);
        } catch (problem) {
          throw new Error(`line ${at + 1} is not JSON: ${problem.message}`);
        }
        return `{"data":${data}${more}}`;
      });
      let answer;
      try {
        answer = await post(
          topicPath(name),
          `{"idempotency_key":${JSON.stringify(key)},"records":[${parts.join(",")}]}`,
        );
      } catch (problem) {
        if (problem instanceof Unreachable)
          throw new Error("no answer came: press Write again, nothing is written twice");
        throw problem;
      }
      key = idempotencyKey();
      toast(`${num(answer.count)} written as ${seqs(answer.first_seq, answer.last_seq)}`);
      $(".problem", form).hidden = true;
      text.value = "";
      text.focus();
      done();
    });
  });
  $("#write-text").focus();
}

// What cannot be undone wants the name once more.
export function confirmDialog(title, words, name, work) {
  dialog(title, (close) => {
    const input = h("input", { id: "delete-name", autocomplete: "off", spellcheck: "false" });
    const button = h("button", { class: "main danger", disabled: true }, "Delete for good");
    input.addEventListener("input", () => (button.disabled = input.value !== name));
    const form = h(
      "form",
      { class: "stack" },
      problemLine(),
      h("p", {}, words),
      h("label", { for: "delete-name" }, "Its name, to be sure"),
      input,
      h("div", { class: "actions" }, h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"), button),
    );
    return sending(form, async () => {
      await work();
      close();
      toast(`${name} is deleted`);
    });
  });
  $("#delete-name").focus();
}

// `looking` is paused meanwhile: nobody asks for what is not there any more.
export function deleteDialog(topic, looking, done) {
  const words = `It takes ${num(topic.count)} records with it, its leases, and the routers that touch it.`;
  confirmDialog(`Delete ${topic.topic}?`, words, topic.topic, async () => {
    await looking.pause();
    try {
      await remove(topicPath(topic.topic));
    } catch (problem) {
      looking.resume();
      throw problem;
    }
    done();
  });
}
