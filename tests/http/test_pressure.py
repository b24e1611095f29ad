"""Section 11: what a priority is, and what a server under pressure does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server import Background, LocalServer, datas, diff, error_of, local_server, write
from tests.http.wire import Wire, request
from topics.core.errors import Throttled
from topics.http.pressure import Deliveries, Pressure

RECORDS = {"records": [{"data": 1}]}


@contextmanager
def pressed(server: LocalServer, level: int = 3) -> Iterator[None]:
    """Holds a server under pressure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.app.pressure, "measure", lambda *_: None)
        server.call(lambda: setattr(server.app.pressure, "level", level))
        yield
        server.call(lambda: setattr(server.app.pressure, "level", 0))


# -- priority --------------------------------------------------------------------------------------------------------


def priority(client: httpx.Client, topic: str) -> float:
    value: float = client.get(f"/v0/topics/{topic}?touch=false").json()["effective_priority"]
    return value


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 0),
        ({"priority": 7}, 7),
        ({"priority": 5000}, 1000),
        ({"priority": -5000}, -1000),
        ({"priority": -3, "auto_priority": False}, -3),
    ],
)
def test_a_topic_that_nobody_reads_has_its_own_priority(
    client: httpx.Client, topic: str, config: dict[str, Any], expected: int
) -> None:
    client.put(f"/v0/topics/{topic}", json=config)
    assert priority(client, topic) == expected


def test_a_read_raises_the_priority_by_500(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"priority": 10})
    diff(client, topic)
    state = client.get(f"/v0/topics/{topic}?touch=false").json()
    idle = time.time() * 1000 - state["last_read_ts"]
    assert 10 + 500 * 2 ** (-idle / 30_000) - 1 <= state["effective_priority"] <= 510


@pytest.mark.parametrize(
    ("idle_ms", "expected"), [(0, 500.0), (30_000, 250.0), (60_000, 125.0), (90_000, 62.5), (301_000, 0.0)]
)
def test_recency_halves_every_30_seconds_and_ends_after_5_minutes(
    server: LocalServer, client: httpx.Client, topic: str, idle_ms: int, expected: float
) -> None:
    client.put(f"/v0/topics/{topic}")

    def read_then() -> float:
        engine = server.app.engine
        engine.topic(topic).last_read_ts = engine.time.now() - idle_ms
        return engine.get(topic, touch=False).effective_priority

    assert server.call(read_then) == pytest.approx(expected, rel=0.001, abs=0.01)


def test_auto_priority_false_leaves_recency_out(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"priority": 4, "auto_priority": False})
    diff(client, topic)
    assert priority(client, topic) == 4


# -- the measure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay", "waiting", "level"),
    [
        (0.0, 0, 0),
        (0.24, 0, 0),
        (0.25, 0, 1),
        (0.5, 0, 2),
        (1.0, 0, 3),
        (9.0, 0, 3),
        (0.0, 249, 0),
        (0.0, 250, 1),
        (0.0, 500, 2),
        (0.0, 1000, 3),
        (0.5, 250, 2),
    ],
)
def test_the_level_follows_the_worse_of_delay_and_bytes(delay: float, waiting: int, level: int) -> None:
    pressure = Pressure(1000, 1000)
    pressure.measure(delay, waiting)
    assert pressure.level == level


def test_pressure_rises_at_once_and_falls_step_by_step() -> None:
    pressure = Pressure(1000, 1000)
    pressure.measure(5.0, 0)
    levels = []
    for _ in range(4):
        levels.append(pressure.level)
        pressure.measure(0.0, 0)
    assert levels == [3, 2, 1, 0]


def test_zero_turns_a_measure_off() -> None:
    pressure = Pressure(0, 0)
    pressure.measure(100.0, 1 << 40)
    assert pressure.level == 0


@pytest.mark.parametrize("level", [0, 1, 2])
def test_only_the_highest_level_refuses(level: int) -> None:
    pressure = Pressure(1000, 1000)
    pressure.level = level
    pressure.check()
    pressure.level = 3
    with pytest.raises(Throttled):
        pressure.check()


# -- delivery --------------------------------------------------------------------------------------------------------


def test_put_off_deliveries_go_by_priority() -> None:
    deliveries = Deliveries()
    done: list[str] = []
    for name, value in (("low", -1000.0), ("high", 1000.0), ("middle", 0.0)):
        deliveries.put_off(value, lambda name=name: done.append(name))  # type: ignore[misc]  # bound now
    deliveries.run_some(2)
    assert done == ["high", "middle"]
    deliveries.run_some(2)
    assert done == ["high", "middle", "low"]
    assert len(deliveries) == 0


def test_what_waits_ages_so_that_none_starves() -> None:
    deliveries = Deliveries()
    done: list[str] = []
    deliveries.put_off(-1000.0, lambda: done.append("starving"))
    for _ in range(200):
        deliveries.put_off(1500.0, lambda: done.append("greedy"))
        deliveries.run_some(1)
        if done[-1] == "starving":
            return
    pytest.fail("the lowest priority was never served")


@pytest.mark.parametrize("level", [1, 2])
def test_a_read_that_waits_is_answered_under_pressure_below_the_highest(
    server: LocalServer, client: httpx.Client, topic: str, level: int
) -> None:
    client.put(f"/v0/topics/{topic}", json={"priority": -1000, "auto_priority": False})
    with pressed(server, level):
        call = Background(lambda: diff(client, topic, wait_ms=30_000))
        server.wait_for_readings()
        write(client, topic, "late")
        assert call.result()["records"][0]["data"] == "late"


# -- under pressure --------------------------------------------------------------------------------------------------


def test_writes_and_reads_are_throttled(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    with pressed(server):
        for path, body in ((f"/v0/topics/{topic}", RECORDS), (f"/v0/topics/{topic}/diff", {})):
            answer = client.post(path, json=body)
            assert error_of(answer) == (429, "throttled")
            assert int(answer.headers["retry-after"]) >= 1
            detail = answer.json()["error"]["detail"]
            assert detail["retry_after_ms"] > 0
            assert "limit" not in detail
    assert datas(client, topic) == [1]


def test_a_throttled_write_creates_nothing(server: LocalServer, client: httpx.Client, topic: str) -> None:
    with pressed(server):
        assert client.post(f"/v0/topics/{topic}", json=RECORDS).status_code == 429
    assert client.get(f"/v0/topics/{topic}").status_code == 404


@pytest.mark.parametrize("level", [0, 1, 2])
def test_below_the_highest_level_everything_is_served(
    server: LocalServer, client: httpx.Client, topic: str, level: int
) -> None:
    with pressed(server, level):
        assert write(client, topic, 1, 2) == [1, 2]
        assert datas(client, topic) == [1, 2]


def test_probes_and_metrics_are_served_under_pressure(server: LocalServer, client: httpx.Client) -> None:
    with pressed(server):
        for path in ("/v0/health", "/v0/ready", "/v0/metrics"):
            assert client.get(path).status_code == 200
        assert "topics_pressure 3.0" in client.get("/v0/metrics").text


def test_a_write_with_disable_backpressure_waits_instead(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, "before")
    with pressed(server):
        call = Background(lambda: write(client, topic, "patient", disable_backpressure=True))
        server.wait_until(lambda: server.app.inflight == 1, "a write that waits")
        assert client.get(f"/v0/topics/{topic}").json()["head_seq"] == 1
        assert not call.is_done
    assert call.result() == [2]
    assert datas(client, topic) == ["before", "patient"]


def test_writes_that_waited_keep_their_order(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, "first")
    body = b'{"records":[{"data":%d}],"disable_backpressure":true}'
    with pressed(server), Wire(server.port) as wire:
        wire.send(b"".join(request("POST", f"/v0/topics/{topic}", body % number) for number in range(10)))
        server.wait_until(lambda: server.app.inflight == 10, "writes that wait")
        server.call(lambda: setattr(server.app.pressure, "level", 0))
        assert [wire.read().json()["last_seq"] for _ in range(10)] == list(range(2, 12))
    assert datas(client, topic) == ["first", *range(10)]


def test_a_waiting_write_whose_connection_is_reset_is_not_made(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1)
    with pressed(server):
        with Wire(server.port) as wire:
            wire.send(request("POST", f"/v0/topics/{topic}", b'{"records":[{"data":2}],"disable_backpressure":true}'))
            server.wait_until(lambda: server.app.inflight == 1, "a write that waits")
            wire.reset()
        server.wait_until(lambda: server.app.inflight == 0, "a free slot")
    assert write(client, topic, 3) == [2]
    assert datas(client, topic) == [1, 3]


def test_a_bad_waiting_write_is_refused_when_its_time_comes(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    body = {**RECORDS, "disable_backpressure": True, "create": False}
    with pressed(server):
        call = Background(lambda: client.post(f"/v0/topics/{topic}", json=body))
        server.wait_until(lambda: server.app.inflight == 1 or call.is_done, "a write that waits")
    assert error_of(call.result()) == (404, "topic_not_found")


def test_the_end_of_the_server_does_not_forget_a_waiting_write(tmp_path: Path) -> None:
    with local_server(tmp_path, shutdown_timeout_ms=60_000) as server, server.client() as client:
        write(client, "a", 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.app.pressure, "measure", lambda *_: None)
            server.call(lambda: setattr(server.app.pressure, "level", 3))
            body = {**RECORDS, "disable_backpressure": True}
            call = Background(lambda: client.post("/v0/topics/a", json=body))
            server.wait_until(lambda: server.app.inflight == 1, "a write that waits")
            server.stop()
            answer = call.result()
    assert answer.status_code in (200, 503), answer.text
    with local_server(tmp_path) as again, again.client() as client:
        assert len(datas(client, "a")) == (2 if answer.status_code == 200 else 1)


def test_a_loop_that_is_late_is_under_pressure_and_recovers(tmp_path: Path) -> None:
    with local_server(tmp_path, pressure_delay_ms=20) as server, server.client() as client:
        pressure = server.app.pressure
        measure = pressure.measure
        levels: list[int] = []

        def watched(loop_delay: float, waiting_bytes: int) -> None:
            measure(loop_delay, waiting_bytes)
            levels.append(pressure.level)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pressure, "measure", watched)
            # The loop stands still for much longer than it may.
            server.call(lambda: threading.Event().wait(0.2))
            server.wait_until(lambda: 3 in levels, "pressure")
            server.wait_until(lambda: levels[-1] < 3, "relief")
        server.wait_until(lambda: pressure.level == 0, "no pressure")
        assert client.post("/v0/topics/a", json=RECORDS).status_code in (201, 429)
