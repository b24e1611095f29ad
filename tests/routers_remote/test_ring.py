"""Three servers in a ring, each pushes to the next: everybody gets everything, once, and nobody their own."""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any

from tests.http.server import Background, client_of
from tests.routers_remote.conftest import Members
from tests.routers_remote.servers import Writer, count_of, data_of, insist, settles


class Reader:
    """Reads a topic live with a node of its own, over restarts, until it is told to stop."""

    def __init__(self, url: str, topic: str, node: str) -> None:
        self.records: list[dict[str, Any]] = []
        self.lost: list[dict[str, Any]] = []
        self._url, self._topic, self._node = url, topic, node
        self._is_over = threading.Event()
        self._call = Background(self._run)

    def _run(self) -> None:
        cursor: dict[str, Any] = {"from_seq": 0}
        with client_of(self._url) as client:
            while not self._is_over.is_set():
                body = {**cursor, "node": self._node, "wait_ms": 200, "limit": 1000}
                answer = insist(client, "POST", f"/v0/topics/{self._topic}/diff", body)
                assert answer.status_code == 200, answer.text
                page = answer.json()
                self.records += page["records"]
                if page["tombstone"] is not None:
                    self.lost.append(page["tombstone"])
                cursor = {"from_seq": page["next_from_seq"], "epoch": page["epoch"]}

    def stop(self) -> list[str]:
        self._is_over.set()
        self._call.result()
        return [record["data"] for record in self.records]


def test_a_ring_of_servers_is_multi_master_while_each_is_killed(members: Members) -> None:
    ring = members(3)
    names = ["n0", "n1", "n2"]
    for here in ring:
        here.ask("PUT", "/v0/topics/t")
    for here, there in zip(ring, ring[1:] + ring[:1], strict=True):
        remote = {"url": there.url, "topic": "t"}
        here.ask("PUT", "/v0/routers/next", {"source": "t", "dest": remote, "allow_cycle": True})
    rounds, step = 3, 60
    writers = [
        Writer(member.url, "t", name, rounds * step, node=name) for member, name in zip(ring, names, strict=True)
    ]
    readers = [Reader(member.url, "t", name) for member, name in zip(ring, names, strict=True)]
    for number in range(rounds):
        writers[number % 3].wait_for(number * step + step // 2)
        ring[number % 3].restart()
    written = {writer.name: writer.join() for writer in writers}
    everything = sorted(chain(*written.values()))
    for member in ring:
        settles(
            lambda member=member: count_of(member.client, "t") >= len(everything),  # type: ignore[misc]
            lambda: [(count_of(each.client, "t"), each.router("next")) for each in ring],
        )
    # What goes round once more would come now: all routers have nothing left before them.
    for member in ring:
        settles(lambda member=member: member.router("next")["lag"] == 0, "the rest")  # type: ignore[misc]
    for member in ring:
        found = data_of(member.client, "t")
        assert sorted(found) == everything
        for name in names:
            assert [data for data in found if data.startswith(name)] == written[name]
    for name, reader in zip(names, readers, strict=True):
        others = sorted(data for data in everything if not data.startswith(name))
        settles(lambda reader=reader, others=others: len(reader.records) >= len(others), "the reader")  # type: ignore[misc]
        seen = reader.stop()
        assert not [data for data in seen if data.startswith(name)], "a node read its own record"
        assert sorted(seen) == others
        assert reader.lost == []
    assert [member.deaths for member in ring] == [1, 1, 1]
    # Each pushes its own and those of the one before it; the next but one has written the rest itself.
    for member in ring:
        assert member.router("next")["forwarded_total"] == 2 * rounds * step
