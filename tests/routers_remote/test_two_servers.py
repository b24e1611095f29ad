"""Push and pull between two servers of this process: what is carried, what is told, and who is let in."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.http.server import LocalServer, client_of, datas, diff, error_of, write
from tests.routers_remote.conftest import Locals
from tests.routers_remote.proxies import Proxy
from tests.routers_remote.servers import count_of, data_of, free_port, read_all, settles
from topics.core.limits import Limits

DIRECTIONS = pytest.mark.parametrize("direction", ["push", "pull"])


class Pair:
    """Two servers with a router `r` from `in` at one to `out` at the other."""

    def __init__(self, source: LocalServer, dest: LocalServer, direction: str) -> None:
        self.source, self.dest = client_of(source.url), client_of(dest.url)
        self.is_push = direction == "push"
        self.home = self.source if self.is_push else self.dest
        self._far = {"url": dest.url, "topic": "out"} if self.is_push else {"url": source.url, "topic": "in"}

    def put(self, key: str | None = None, **fields: Any) -> dict[str, Any]:
        far = {**self._far, **({"key": key} if key is not None else {})}
        ends = {"source": "in", "dest": far} if self.is_push else {"source": far, "dest": "out"}
        answer = self.home.put("/v0/routers/r", json={**ends, "start": "earliest", **fields})
        assert answer.status_code in (200, 201), answer.text
        body: dict[str, Any] = answer.json()
        return body

    def router(self) -> dict[str, Any]:
        body: dict[str, Any] = self.home.get("/v0/routers/r").json()
        return body

    def out(self) -> list[Any]:
        return data_of(self.dest, "out")

    def arrives(self, *expected: Any) -> None:
        settles(lambda: self.out() == list(expected), lambda: (self.out(), self.router()))

    def is_told(self, *words: str) -> None:
        """The router says what is wrong."""
        settles(lambda: self.router()["state"] == "blocked", self.router)
        settles(lambda: all(word in str(self.router()["last_error"]) for word in words), self.router)

    def runs(self) -> None:
        settles(lambda: self.router()["state"] == "running" and self.router()["lag"] == 0, self.router)
        assert self.router()["last_error"] is None


@pytest.fixture
def pair(local: Locals, direction: str) -> Pair:
    return Pair(local(), local(), direction)


@DIRECTIONS
def test_everything_is_carried(pair: Pair) -> None:
    pair.source.post(
        "/v0/topics/in",
        content=b'{"records":[{"data":{"b":1.0,"a":1e400},"tag":"t","node":"n","meta":{"k": "v"}},{"data":null}]}',
        headers={"content-type": "application/json"},
    )
    pair.put()
    settles(lambda: count_of(pair.dest, "out") == 2, pair.router)
    raw = pair.dest.post("/v0/topics/out/diff", json={"include_tags": True}).content
    for part in (b'"data":{"b":1.0,"a":1e400}', b'"meta":{"k": "v"}', b'"$tag":"t"', b'"$node":"n"', b'"data":null'):
        assert part in raw
    assert b"via" not in raw
    pair.runs()
    state = pair.router()
    assert (state["forwarded_total"], state["cursor"], state["lag"]) == (2, 2, 0)
    # It is awake: what comes next does not wait for any poll to end.
    write(pair.source, "in", 3)
    settles(lambda: count_of(pair.dest, "out") == 3, pair.router)


@DIRECTIONS
def test_nodes_and_tags_can_be_left_behind_and_filters_count(pair: Pair) -> None:
    pair.put(preserve_node=False, preserve_tag=False, filter=["tag", "Glob", "a*"])
    records = [{"data": number, "tag": tag, "node": "n"} for number, tag in enumerate(("a", "b", "ab"))]
    pair.source.post("/v0/topics/in", json={"records": records})
    pair.arrives(0, 2)
    assert all(set(each) == {"$seq", "$ts", "data"} for each in read_all(pair.dest, "out", include_tags=True)[0])
    settles(lambda: pair.router()["lag"] == 0, pair.router)
    assert (pair.router()["forwarded_total"], pair.router()["cursor"]) == (2, 3)


@DIRECTIONS
def test_many_and_large_records_arrive_in_order(pair: Pair) -> None:
    pair.put()
    expected = []
    for start in range(0, 3000, 1000):
        batch = [f"{number} {'x' * 3000}" for number in range(start, start + 1000)]
        write(pair.source, "in", *batch)
        expected += batch
    write(pair.source, "in", "y" * 1_000_000, "z" * 1_000_000)
    settles(lambda: count_of(pair.dest, "out") == 3002, pair.router)
    found = pair.out()
    assert found[:3000] == expected
    assert [len(data) for data in found[3000:]] == [1_000_000, 1_000_000]


def test_a_pull_has_begun_when_it_is_there(local: Locals) -> None:
    """What is written when the router's creation has been answered is forwarded, wherever the router begins."""
    source, dest = client_of(local().url), local()
    with client_of(dest.url) as client:
        for number in range(8):
            name = f"t{number}"
            if number % 2:
                write(source, name, "before")
            far = {"url": str(source.base_url).rstrip("/"), "topic": name}
            assert client.put(f"/v0/routers/r{number}", json={"source": far, "dest": name}).status_code == 201
            write(source, name, "after")
            write(source, name, "end")
        for number in range(8):
            settles(lambda name=f"t{number}": "end" in data_of(client, name), "the end")  # type: ignore[misc]
            assert data_of(client, f"t{number}") == ["after", "end"], number


@DIRECTIONS
def test_a_start_at_the_head_leaves_out_what_was_there(pair: Pair) -> None:
    write(pair.source, "in", "old")
    pair.put(start="head")
    settles(lambda: pair.router()["cursor"] == 1, pair.router)
    write(pair.source, "in", "new")
    pair.arrives("new")


@DIRECTIONS
def test_losses_are_holes_and_deletes_are_not(pair: Pair) -> None:
    pair.source.put("/v0/topics/in", json={"cap_records": 4})
    sent = [{"data": 1}, {"hole": 3, "reason": "source_trim"}, {"data": 2}, {"data": 3, "tag": "x"}, {"data": 4}]
    pair.source.post("/v0/topics/in", json={"records": sent})
    pair.source.post("/v0/topics/in/delete", json={"match": "x"})
    pair.put()
    pair.arrives(1, 2, 4)
    records, lost = read_all(pair.dest, "out")
    assert [record["$seq"] for record in records] == [1, 5, 6]
    assert lost == [(2, 4, "source_trim")]
    write(pair.source, "in", *range(10, 20))
    settles(lambda: 19 in pair.out(), pair.router)
    records, lost = read_all(pair.dest, "out")
    assert [record["data"] for record in records] == [1, 2, 4, 16, 17, 18, 19]
    assert lost == [(2, 4, "source_trim"), (7, 12, "source_trim")]


@DIRECTIONS
def test_a_small_dest_that_refuses_takes_what_it_has_room_for(pair: Pair) -> None:
    """Its cap is less than what one page carries."""
    pair.dest.put("/v0/topics/out", json={"cap_records": 3, "discard": "reject"})
    write(pair.source, "in", *range(10))
    pair.put()
    seen: list[int] = []
    while len(seen) < 9:
        settles(lambda: count_of(pair.dest, "out") == 3, pair.router)
        pair.is_told("out")
        page = diff(pair.dest, "out")
        seen += [record["data"] for record in page["records"]]
        pair.dest.post("/v0/topics/out/delete", json={"before_seq": page["next_from_seq"] + 1})
    pair.arrives(9)
    assert seen == [*range(9)]
    pair.runs()
    assert pair.router()["forwarded_total"] == 10


@DIRECTIONS
def test_a_server_with_small_limits_gets_small_pages(local: Locals, direction: str) -> None:
    small = Limits(max_batch_records=10, max_limit=7, max_body_bytes=5000, max_record_bytes=1000)
    source, dest = (local(), local(limits=small)) if direction == "push" else (local(limits=small), local())
    pair = Pair(source, dest, direction)
    for start in range(0, 40, 10):
        write(pair.source, "in", *[f"{number} {'x' * 300}" for number in range(start, start + 10)])
    pair.put()
    settles(lambda: count_of(pair.dest, "out") == 40, pair.router)
    assert [int(data.split()[0]) for data in pair.out()] == [*range(40)]


# -- what is told ----------------------------------------------------------------------------------------------------


@DIRECTIONS
def test_a_server_that_is_away_at_first(local: Locals, direction: str) -> None:
    port = free_port()
    here = local()
    client = client_of(here.url)
    far = {"url": f"http://127.0.0.1:{port}", "topic": "far"}
    ends = {"source": "near", "dest": far} if direction == "push" else {"source": far, "dest": "near"}
    assert client.put("/v0/routers/r", json={**ends, "start": "earliest"}).status_code == 201
    if direction == "push":
        write(client, "near", 1, 2)

    def router() -> dict[str, Any]:
        body: dict[str, Any] = client.get("/v0/routers/r").json()
        return body

    settles(lambda: router()["state"] == "blocked", router)
    assert f"127.0.0.1:{port}" in router()["last_error"]
    assert router()["lag"] == (2 if direction == "push" else 0)
    there = local(port=port)
    other = client_of(there.url)
    if direction == "pull":
        write(other, "far", 1, 2)
    dest, name = (other, "far") if direction == "push" else (client, "near")
    settles(lambda: data_of(dest, name) == [1, 2], router)
    settles(lambda: router()["state"] == "running", router)
    assert router()["last_error"] is None


@DIRECTIONS
def test_a_key_that_is_refused_is_told_and_put_right(local: Locals, direction: str) -> None:
    guarded = "good-key-1,blind-key-2:write,mute-key-3:read,other-key-4::elsewhere"
    near, guard = local(), local(api_keys=guarded)
    pair = Pair(near, guard, direction) if direction == "push" else Pair(guard, near, direction)
    far = pair.dest if pair.is_push else pair.source
    far.headers["authorization"] = "Bearer good-key-1"
    write(pair.source, "in", 1, 2)
    pair.put()
    pair.is_told("401", "unauthorized")
    pair.put(key="wrong-key-9")
    pair.is_told("401", "unauthorized")
    pair.put(key="other-key-4")
    pair.is_told("403", "forbidden")
    pair.put(key="blind-key-2" if not pair.is_push else "mute-key-3")
    pair.is_told("403", "forbidden")
    assert count_of(pair.dest, "out") == 0
    body = pair.put(key="good-key-1")
    assert "key" not in str(body["dest"]) + str(body["source"])
    pair.arrives(1, 2)
    pair.runs()
    for secret in ("good-key-1", "wrong-key-9", "other-key-4"):
        assert secret not in str(pair.router())


@pytest.mark.parametrize(("direction", "scopes"), [("push", "write"), ("push", "rw"), ("pull", "read"), ("pull", "rw")])
def test_a_key_needs_no_more_than_its_direction(local: Locals, direction: str, scopes: str) -> None:
    name = "out" if direction == "push" else "in"
    near, guard = local(), local(api_keys=f"good-key-1,least-key-2:{scopes}:{name}")
    pair = Pair(near, guard, direction) if direction == "push" else Pair(guard, near, direction)
    far = pair.dest if pair.is_push else pair.source
    far.headers["authorization"] = "Bearer good-key-1"
    write(pair.source, "in", 1)
    pair.put(key="least-key-2")
    pair.arrives(1)
    pair.runs()


@DIRECTIONS
def test_create_dest_false_waits_for_the_dest(pair: Pair) -> None:
    write(pair.source, "in", 1)
    if pair.is_push:
        pair.put(create_dest=False)
        pair.is_told("404", "out")
        assert pair.dest.get("/v0/topics/out").status_code == 404
    else:
        far = {"url": str(pair.source.base_url), "topic": "in"}
        answer = pair.home.put("/v0/routers/r", json={"source": far, "dest": "out", "create_dest": False})
        assert error_of(answer) == (404, "topic_not_found")
    pair.dest.put("/v0/topics/out")
    pair.put(create_dest=False)
    pair.arrives(1)
    pair.runs()


def test_a_source_that_is_not_there_is_told_and_read_from_its_first_record(local: Locals) -> None:
    pair = Pair(local(), local(), "pull")
    pair.put(start="head")
    pair.is_told("in", "does not exist")
    write(pair.source, "in", 1, 2)
    pair.arrives(1, 2)
    pair.runs()


def test_a_pull_that_is_back_says_so(local: Locals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there is nothing new to bring."""
    monkeypatch.setattr("topics.http.remotes._WAIT_MS", 30_000)
    source = local()
    with Proxy(source.port) as proxy:
        here = client_of(local().url)
        write(client_of(source.url), "in", 1)
        end = {"url": proxy.url, "topic": "in"}
        here.put("/v0/routers/r", json={"source": end, "dest": "out", "start": "earliest"})
        settles(lambda: data_of(here, "out") == [1], "the first")
        proxy.cut("up", 1)
        proxy.wait_for_cut(1)
        settles(lambda: here.get("/v0/routers/r").json()["state"] == "running", "running again")
        assert here.get("/v0/routers/r").json()["last_error"] is None


def test_what_is_no_server_of_ours_is_told(local: Locals) -> None:
    here = client_of(local().url)
    there = local()
    far = {"url": f"{there.url}/nowhere", "topic": "t"}
    assert here.put("/v0/routers/r", json={"source": far, "dest": "out"}).status_code == 201
    settles(lambda: here.get("/v0/routers/r").json()["state"] == "blocked", "told")
    assert "404" in here.get("/v0/routers/r").json()["last_error"]


# -- topics that are made again --------------------------------------------------------------------------------------


def test_a_source_made_again_is_a_hole_and_goes_on_from_its_earliest(local: Locals) -> None:
    pair = Pair(local(), local(), "pull")
    pair.put()
    write(pair.source, "in", 1, 2, 3)
    pair.arrives(1, 2, 3)
    pair.source.delete("/v0/topics/in")
    pair.is_told("in")
    pair.source.put("/v0/topics/in", json={"cap_records": 2})
    write(pair.source, "in", "a", "b", "c", "d", "e")
    settles(lambda: "e" in pair.out(), pair.router)
    records, lost = read_all(pair.dest, "out")
    assert [record["data"] for record in records] == [1, 2, 3, "d", "e"]
    assert [reason for _, _, reason in lost] == ["source_trim"]
    pair.runs()
    write(pair.source, "in", "f")
    pair.arrives(1, 2, 3, "d", "e", "f")


def test_a_dest_made_again_gets_what_comes(local: Locals) -> None:
    pair = Pair(local(), local(), "push")
    pair.put()
    write(pair.source, "in", 1)
    pair.arrives(1)
    settles(lambda: pair.router()["cursor"] == 1, pair.router)
    pair.dest.delete("/v0/topics/out")
    write(pair.source, "in", 2)
    pair.arrives(2)
    pair.runs()


def ring(local: Locals) -> list[httpx.Client]:
    """Two servers that push `t` to each other."""
    clients = [client_of(local().url) for _ in range(2)]
    for client in clients:
        client.put("/v0/topics/t")
    for here, there in (clients, clients[::-1]):
        push(here, there)
    return clients


def push(here: httpx.Client, there: httpx.Client) -> None:
    far = {"url": str(there.base_url).rstrip("/"), "topic": "t"}
    body = {"source": "t", "dest": far, "allow_cycle": True, "start": "earliest"}
    assert here.put("/v0/routers/next", json=body).status_code in (200, 201)


def rests(*clients: httpx.Client) -> None:
    """Nothing is on its way any more."""
    for client in clients:
        settles(lambda client=client: client.get("/v0/routers/next").json()["lag"] == 0, "rest")  # type: ignore[misc]


def test_two_that_push_to_each_other_count_only_what_they_pushed(local: Locals) -> None:
    a, b = ring(local)
    write(a, "t", "a1", "a2", "a3")
    settles(lambda: count_of(b, "t") == 3, "there")
    write(b, "t", "b1")
    settles(lambda: count_of(a, "t") == 4, "back")
    rests(a, b)
    assert datas(a, "t") == datas(b, "t") == ["a1", "a2", "a3", "b1"]
    assert a.get("/v0/routers/next").json()["forwarded_total"] == 3
    assert b.get("/v0/routers/next").json()["forwarded_total"] == 1


def test_a_topic_made_again_in_a_ring_gets_no_echo(local: Locals) -> None:
    a, b = ring(local)
    write(a, "t", "a1")
    settles(lambda: count_of(b, "t") == 1, "there")
    b.delete("/v0/topics/t")
    b.put("/v0/topics/t")
    push(b, a)
    write(b, "t", "b1")
    settles(lambda: "b1" in data_of(a, "t"), "back")
    write(a, "t", "a2")
    settles(lambda: "a2" in data_of(b, "t"), "there again")
    rests(a, b)
    assert data_of(b, "t") == ["b1", "a2"]
    assert sorted(data_of(a, "t")) == ["a1", "a2", "b1"]


@DIRECTIONS
def test_a_router_that_is_deleted_or_led_elsewhere_brings_nothing_more(pair: Pair) -> None:
    pair.put()
    write(pair.source, "in", 1)
    pair.arrives(1)
    assert pair.home.delete("/v0/routers/r").json()["deleted"] is True
    write(pair.source, "in", 2)
    # A router of its own shows that there was time.
    far = {"url": str(pair.dest.base_url).rstrip("/"), "topic": "witness"}
    pair.source.put("/v0/routers/w", json={"source": "in", "dest": far, "start": "earliest"})
    settles(lambda: data_of(pair.dest, "witness") == [1, 2], "the witness")
    assert pair.out() == [1]


def test_a_chain_over_three_servers_and_local_routers_between(local: Locals) -> None:
    a, b, c = (client_of(local().url) for _ in range(3))
    urls = [str(client.base_url).rstrip("/") for client in (a, b, c)]
    a.put("/v0/routers/r", json={"source": "t", "dest": {"url": urls[1], "topic": "t"}})
    b.put("/v0/routers/r", json={"source": "t", "dest": "u"})
    c.put("/v0/routers/r", json={"source": {"url": urls[1], "topic": "u"}, "dest": "t", "start": "earliest"})
    for number in range(20):
        write(a, "t", number)
    settles(lambda: data_of(c, "t") == [*range(20)], "all the way")


@pytest.mark.parametrize("kinds", ["pull pull pull", "push pull push", "pull push pull"])
def test_a_ring_of_three_carries_each_record_and_each_loss_once(local: Locals, kinds: str) -> None:
    """However each side of it is made, and with a local router in it."""
    clients = [client_of(local().url) for _ in range(3)]
    urls = [str(client.base_url).rstrip("/") for client in clients]
    for client in clients:
        client.put("/v0/topics/t")
        client.put("/v0/topics/u")
        client.put("/v0/routers/inside", json={"source": "t", "dest": "u", "allow_cycle": True})
    routers = []
    for number, kind in enumerate(kinds.split()):
        here, there = number, (number + 1) % 3
        if kind == "push":
            routers.append((clients[here], "away", {"source": "u", "dest": {"url": urls[there], "topic": "t"}}))
        else:
            routers.append((clients[there], "home", {"source": {"url": urls[here], "topic": "u"}, "dest": "t"}))
    for client, name, ends in routers:
        answer = client.put(f"/v0/routers/{name}", json={**ends, "allow_cycle": True, "start": "earliest"})
        assert answer.status_code == 201, answer.text
    for round_ in range(5):
        for number, client in enumerate(clients):
            write(client, "t", f"{number}-{round_}", node=f"n{number}")
    clients[0].post("/v0/topics/t", json={"records": [{"hole": 4, "reason": "source_trim"}, {"data": "behind"}]})

    def is_all_there() -> bool:
        return all("behind" in data_of(client, "u") and count_of(client, "u") >= 16 for client in clients)

    settles(is_all_there, lambda: [(data_of(client, "u"), client.get("/v0/routers").text) for client in clients])
    for client, name, _ in routers:
        settles(lambda client=client, name=name: client.get(f"/v0/routers/{name}").json()["lag"] == 0, "rest")  # type: ignore[misc]
    expected = sorted([*(f"{number}-{round_}" for number in range(3) for round_ in range(5)), "behind"])
    for number, client in enumerate(clients):
        for topic in ("t", "u"):
            records, lost = read_all(client, topic)
            assert sorted(record["data"] for record in records) == expected, (number, topic)
            assert [last - first + 1 for first, last, _ in lost] == [4], (number, topic)
        assert not [data for data in data_of(client, "u", node=f"n{number}") if data.startswith(f"{number}-")]
