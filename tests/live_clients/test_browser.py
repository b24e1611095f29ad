"""`EventSource` and `WebSocket` of a real browser: what a page is told over them has no gap and no repeat, whatever
happens to its connections and to the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome

from tests.http.server import Background, child
from tests.live_clients.conftest import CuttingProxy, Mortal, Pen, Told, all_of

# The browser does the comebacks of an EventSource. The page has to act only where that gives up: its session is gone.
# After a WebSocket closes, everything is the page's own work. A server that is not there (yet) is asked again.
PAGE = """
const readers = window.readers = {};
window.problems = [];

class Reader {
  constructor(name, topics, token, limit) {
    Object.assign(this, {name, token, limit, told: [], opens: 0});
    this.cursors = Object.fromEntries(topics.map(topic => [topic, {from_seq: 0}]));
    readers[name] = this;
    this.begin();
  }
  begin() {
    this.open().catch(problem => window.problems.push(`${this.name}: ${problem}`));
  }
  later() {
    setTimeout(() => this.begin(), 20);
  }
  query(more) {
    return '?' + new URLSearchParams({...(this.token && {token: this.token}), ...more});
  }
}

window.EventReader = class extends Reader {
  sessions = 0;
  async open() {
    const headers = {'content-type': 'application/json', ...(this.token && {authorization: 'Bearer ' + this.token})};
    const body = JSON.stringify({topics: this.cursors, limit: this.limit});
    let answer;
    try {
      answer = await fetch('/v0/watch', {method: 'POST', headers, body});
    } catch {
      return this.later();
    }
    if (answer.status === 503) return this.later();
    if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
    this.sessions += 1;
    const source = this.source = new EventSource((await answer.json()).stream_url + this.query());
    source.onopen = () => { this.opens += 1; };
    for (const kind of ['record', 'tombstone', 'caught-up', 'topic-deleted'])
      source.addEventListener(kind, event => this.take(kind, event));
    source.onerror = event => {
      if (event.data !== undefined) this.take('error', event);
      else if (source.readyState === EventSource.CLOSED) this.begin();
    };
  }
  take(kind, event) {
    this.told.push([kind, JSON.parse(event.data)]);
    const places = JSON.parse(atob(event.lastEventId.replaceAll('-', '+').replaceAll('_', '/')));
    for (const topic in this.cursors)
      this.cursors[topic] = {from_seq: places[topic], epoch: places.$epoch[topic]};
  }
};

window.SocketReader = class extends Reader {
  // What is to be published: [client_seq, topic, data]. It leaves the list when the server is known to have it.
  outbox = [];
  async open() {
    const socket = this.socket = new WebSocket(
      location.origin.replace('http', 'ws') + '/v0/ws' + this.query({reader: this.name}));
    socket.onopen = () => {
      this.opens += 1;
      this.send({type: 'subscribe', topics: this.cursors, limit: this.limit});
      this.publish();
    };
    socket.onmessage = event => this.take(JSON.parse(event.data));
    socket.onclose = () => this.later();
  }
  send(command) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(command));
  }
  publish() {
    if (!this.outbox.length) return;
    const [client_seq, topic, data] = this.outbox[0];
    this.send({type: 'publish', request_id: client_seq, topic, client_id: this.name, records: [{data, client_seq}]});
  }
  take(message) {
    if (message.type === 'subscribed') return;
    if (message.type === 'ack' || (message.type === 'error' && message.code === 'idempotency_conflict')) {
      if (this.outbox.length && this.outbox[0][0] === message.request_id) this.outbox.shift();
      return this.publish();
    }
    if (message.type === 'record')
      this.cursors[message.topic] = {from_seq: message.to_seq, epoch: message.epoch};
    if (message.type === 'tombstone')
      this.cursors[message.topic] = {from_seq: message.gap_to, epoch: message.epoch};
    this.told.push([message.type, message]);
  }
};

// The seq that a reader was told of last, of all its topics the one that is furthest behind.
window.seqs = name => Object.values(readers[name].cursors).map(cursor => cursor.from_seq);
"""
_WAIT = """
const [text, done] = arguments;
const holds = new Function('return ' + text);
const look = () => window.problems.length || holds() ? done(window.problems) : setTimeout(look, 5);
look();
"""
# Cuts of five readers at once (a browser has six connections for a host): in the head of an answer, in ids, in data,
# between events, in the lengths of chunks. An EventSource waits two seconds before it comes back.
CUTS = [[150, 700, 3001], [0, 1111, 251], [222, 1799, 640], [333, 334, 335], [2402, 199, 1300]]
READERS = [("EventReader", CUTS), ("SocketReader", [[*range(first, 1500, 131)] for first in (0, 23, 47, 79, 101)])]


class Page:
    """A page of the server's own origin, and the readers in it."""

    def __init__(self, chrome: Chrome, url: str) -> None:
        self._chrome = chrome
        chrome.get(url + "/v0/health")
        chrome.execute_script(PAGE)

    def read(self, kind: str, name: str, *topics: str, token: str = "", limit: int = 3) -> None:
        self._chrome.execute_script(f"new {kind}(...arguments)", name, list(topics), token, limit)

    def ask(self, text: str) -> Any:
        return self._chrome.execute_script(f"return {text}")

    def wait(self, text: str) -> None:
        try:
            problems = self._chrome.execute_async_script(_WAIT, text)
        except TimeoutException:
            problems = self.ask("Object.values(readers).map(r => [r.name, r.opens, r.cursors, r.told.at(-1)])")
        assert problems == [], f"{problems} while waiting for {text}"

    def wait_for(self, name: str, seq: int) -> None:
        """Until a reader was told of everything up to there."""
        self.wait(f"seqs({name!r}).every(seq => seq >= {seq})")

    def told(self, name: str) -> dict[str, Told]:
        """What a reader was told, in the order in which it was."""
        told: dict[str, Told] = {}
        for kind, frame in self.ask(f"readers[{name!r}].told"):
            told.setdefault(frame["topic"], Told(records=[], losses=[])).frame(kind, frame)
        return told


MakesPage = Callable[[str], Page]


@pytest.fixture
def open_page(chrome: Chrome) -> Iterator[MakesPage]:
    yield lambda url: Page(chrome, url)
    # Ends the streams of the page.
    chrome.get("about:blank")


@pytest.mark.parametrize(("kind", "cuts"), READERS)
def test_a_page_that_is_cut_at_any_byte_goes_on_without_gap_or_repeat(
    open_page: MakesPage, proxy: CuttingProxy, client: httpx.Client, topic: str, kind: str, cuts: list[list[int]]
) -> None:
    pens = [Pen(client, f"{topic}{name}") for name in "ab"]
    for pen in pens:
        pen.write(40)
    proxy.plan(*cuts)
    writing = Background(lambda: proxy.write_along(*pens))
    page = open_page(proxy.url)
    names = [f"r{number}" for number in range(len(cuts))]
    for name in names:
        page.read(kind, name, *[pen.topic for pen in pens])
    writing.result()
    assert proxy.is_done
    for name in names:
        page.wait_for(name, pens[0].head)
        assert page.told(name) == {pen.topic: all_of(pen.head) for pen in pens}
    if kind == "EventReader":
        # It was the browser that came back.
        assert page.ask("Object.values(readers).map(r => r.sessions)") == [1] * len(cuts)
        assert sum(b"\r\nLast-Event-ID: " in request for request in proxy.requests) >= len(cuts)


@pytest.mark.parametrize("kind", ["EventReader", "SocketReader"])
def test_a_page_outlives_servers_that_are_killed(open_page: MakesPage, mortal: Mortal, kind: str) -> None:
    with mortal.client() as client:
        pen = Pen(client, "t")
        pen.write(20)
    page = open_page(mortal.url)
    page.read(kind, "r", "t", limit=1)
    for _ in range(2):
        # Somewhere behind what it had before, perhaps with more on its way.
        page.wait_for("r", pen.head - 5)
        mortal.kill()
        mortal.restart()
        with mortal.client() as client:
            pen.write(10, client)
    page.wait_for("r", pen.head)
    assert page.told("r") == {"t": all_of(40)}
    if kind == "EventReader":
        assert page.ask("readers.r.sessions") == 3


@pytest.mark.parametrize("kind", ["EventReader", "SocketReader"])
def test_a_page_is_told_what_it_lost_while_it_was_cut_off(
    open_page: MakesPage, proxy: CuttingProxy, client: httpx.Client, topic: str, kind: str
) -> None:
    pen = Pen(client, topic, cap_records=10)
    pen.write(5)
    page = open_page(proxy.url)
    page.read(kind, "r", topic)
    page.wait_for("r", 5)
    with proxy.cut_off():
        pen.write(30)
    page.wait_for("r", 35)
    pen.write(1)
    page.wait_for("r", 36)
    assert page.told("r") == {
        topic: Told(seq=36, records=[*range(1, 6), *range(26, 37)], losses=[(6, 25, "from_seq_too_old")])
    }


def test_a_page_is_told_what_a_killed_server_forgot(open_page: MakesPage, mortal: Mortal) -> None:
    with mortal.client() as client:
        pen = Pen(client, "t", durability="ephemeral")
        pen.write(5)
    page = open_page(mortal.url)
    page.read("SocketReader", "r", "t")
    page.wait_for("r", 5)
    with mortal.client() as client:
        pen.write(5, client)
    page.wait_for("r", 10)
    mortal.kill()
    mortal.restart()
    with mortal.client() as client:
        [seq] = client.post("/v0/topics/t", json={"records": [{"data": "later"}]}).json()["seqs"]
    page.wait_for("r", seq)
    [*before, (_, lost), (kind, after)] = page.ask("readers.r.told.filter(([kind]) => kind !== 'caught_up')")
    assert [record["$seq"] for _, frame in before for record in frame["records"]] == list(range(1, 11))
    assert (lost["type"], lost["gap_from"], lost["gap_to"]) == ("tombstone", 11, seq - 1)
    assert kind == "record"
    assert [record["$seq"] for record in after["records"]] == [seq]


@pytest.mark.parametrize("kind", ["EventReader", "SocketReader"])
def test_a_page_with_a_key_comes_back_with_it(open_page: MakesPage, tmp_path: Path, kind: str) -> None:
    with child(tmp_path / "data", TOPICS_API_KEYS="owner,reader:read:mine.") as server:
        server.wait_until_ready()
        with server.client(headers={"authorization": "Bearer owner"}) as client:
            pen = Pen(client, "mine.t")
            pen.write(20)
            proxied = CuttingProxy(server.port)
            try:
                proxied.plan([900])
                page = open_page(proxied.url)
                page.read(kind, "r", "mine.t", token="reader")
                page.wait_for("r", 20)
                assert proxied.is_done
                assert page.told("r") == {"mine.t": all_of(20)}
            finally:
                proxied.close()


def test_what_a_page_publishes_is_there_once_however_often_it_is_cut(
    open_page: MakesPage, proxy: CuttingProxy, client: httpx.Client, topic: str
) -> None:
    pen = Pen(client, topic)
    proxy.plan([*range(200, 1400, 61)])
    page = open_page(proxy.url)
    page.read("SocketReader", "r", topic)
    page.ask(f"Array.from({{length: 100}}, (_, i) => readers.r.outbox.push([i + 1, {topic!r}, i + 1])).length")
    page.ask("readers.r.publish()")
    page.wait("!readers.r.outbox.length")
    page.wait_for("r", 100)
    assert proxy.is_done
    assert page.told("r") == {topic: all_of(100)}
    assert client.get(f"/v0/topics/{pen.topic}").json()["head_seq"] == 100
