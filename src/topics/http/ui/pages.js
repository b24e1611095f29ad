// The topics that are loaded, in pages, and how fast each is written to.

import { get } from "./api.js";

export const PAGE = 100;

// Pages in the order of the names. A page knows the cursor that it begins behind, so that it can be asked for again.
export class Pages {
  constructor() {
    this.reset("");
  }

  reset(prefix) {
    this.prefix = prefix;
    this.pages = [];
    this.next = null;
    this.isWhole = false;
    this.total = null;
    this.rates = new Map();
    this.turn = (this.turn ?? 0) + 1;
    this.loading = null;
  }

  get length() {
    return this.pages.reduce((sum, page) => sum + page.topics.length, 0);
  }

  at(index) {
    for (const page of this.pages) {
      if (index < page.topics.length) return page.topics[index];
      index -= page.topics.length;
    }
    return undefined;
  }

  indexOf(name) {
    let before = 0;
    for (const page of this.pages) {
      const found = page.topics.findIndex((each) => each.topic === name);
      if (found >= 0) return before + found;
      before += page.topics.length;
    }
    return -1;
  }

  async fetch(cursor) {
    const query = new URLSearchParams({ page_size: PAGE });
    if (this.prefix) query.set("prefix", this.prefix);
    if (cursor) query.set("cursor", cursor);
    const answer = await get(`v0/topics?${query}`);
    const now = performance.now();
    for (const topic of answer.topics) this.measure(topic, now);
    return answer;
  }

  // Records a second, from one look to the next.
  measure(topic, now) {
    const before = this.rates.get(topic.topic);
    const same = before && before.epoch === topic.epoch;
    const seconds = same ? (now - before.at) / 1000 : 0;
    if (same && seconds < 0.5) topic.rate = before.rate;
    else {
      topic.rate = same ? Math.max(topic.head_seq - before.head, 0) / seconds : undefined;
      this.rates.set(topic.topic, { epoch: topic.epoch, head: topic.head_seq, at: now, rate: topic.rate });
    }
  }

  more() {
    this.loading ??= this.load().finally(() => (this.loading = null));
    return this.loading;
  }

  async load() {
    const turn = this.turn;
    if (this.isWhole) return;
    const cursor = this.next;
    const answer = await this.fetch(cursor);
    if (turn !== this.turn) return;
    this.pages.push({ cursor, topics: answer.topics });
    this.next = answer.next_cursor ?? null;
    this.isWhole = this.next === null;
  }

  // Asks again for the pages that hold these rows. What came or went shifts the page behind.
  async refresh(first, last) {
    const turn = this.turn;
    let before = 0;
    for (const [number, page] of this.pages.entries()) {
      const inSight = before <= last && before + page.topics.length >= first;
      before += page.topics.length;
      if (!inSight && !page.isStale) continue;
      if (!inSight && before > last + 2 * PAGE) continue;
      const answer = await this.fetch(page.cursor);
      if (turn !== this.turn) return;
      page.topics = answer.topics;
      page.isStale = false;
      const next = this.pages[number + 1];
      const end = answer.next_cursor ?? null;
      if (!next) {
        this.next = end;
        this.isWhole = end === null;
      } else if (end === null) {
        this.pages.splice(number + 1);
        this.next = null;
        this.isWhole = true;
        return;
      } else if (next.cursor !== end) {
        next.cursor = end;
        next.isStale = true;
        const last = page.topics.at(-1)?.topic ?? "";
        next.topics = next.topics.filter((each) => each.topic > last);
      }
    }
  }
}
