"""`topics serve`: settings, what it says at its start, how it ends, and what is there when it starts again."""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import socket
import threading
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.http.server import (
    DEADLINE,
    Background,
    LocalServer,
    child,
    client_of,
    datas,
    diff,
    error_of,
    eventually,
    local_server,
    write,
)
from tests.http.wire import Wire, record, request
from topics.cli import app, main
from topics.core.limits import Limits
from topics.engine.engine import Engine
from topics.engine.recovery import open_engine
from topics.http.settings import Settings

FIELDS = [name for name in (*Settings.__struct_fields__, *Limits.__struct_fields__) if name != "limits"]

# -- settings --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def help_text() -> str:
    answer = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert answer.exit_code == 0
    return answer.output


@pytest.mark.parametrize("field", FIELDS)
def test_help_explains_every_setting(help_text: str, field: str) -> None:
    assert f"--{field.replace('_', '-')}" in help_text
    assert f"TOPICS_{field.upper()}" in help_text


def test_the_limits_of_the_contract_have_their_defaults() -> None:
    assert (Settings().host, Settings().port) == ("127.0.0.1", 4000)
    defaults = {
        "max_batch_records": 10_000,
        "max_record_bytes": 1 << 20,
        "max_body_bytes": 64 << 20,
        "max_meta_bytes": 16 << 10,
        "max_tag_bytes": 256,
        "max_node_bytes": 128,
        "max_limit": 1000,
        "max_clients_per_topic": 100_000,
        "max_topics": 100_000,
        "max_inflight_per_key": 1000,
        "max_total_bytes": 0,
        "txn_timeout_ms": 900_000,
    }
    for name, value in defaults.items():
        assert getattr(Limits(), name) == value, name


def test_the_package_brings_the_command() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["topics"]) is main


def test_what_is_in_force_is_said_at_the_start_without_secrets(tmp_path: Path) -> None:
    with child(
        tmp_path, "--max-limit", "7", TOPICS_MAX_TOPICS="3", TOPICS_MAX_LIMIT="9", TOPICS_API_KEYS="hush:r,psst"
    ) as server:
        server.wait_until_ready()
        said = "".join(server.out)
        assert server.url in said
        assert str(tmp_path) in said
        assert "max_topics=3" in said
        assert "max_limit=7" in said
        for field in FIELDS:
            assert f"{field}=" in said, field
        assert "hush" not in said
        assert "psst" not in said
        with server.client(headers={"authorization": "Bearer psst"}) as client:
            for name in "abc":
                assert client.put(f"/v0/topics/{name}").status_code == 201
            assert client.put("/v0/topics/d").status_code == 429
            write(client, "a", *range(20))
            assert len(diff(client, "a", limit=100)["records"]) == 7


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TOPICS_PORT", "http"),
        ("TOPICS_PORT", "70000"),
        ("TOPICS_PORT", "-1"),
        ("TOPICS_MAX_TOPICS", "many"),
        ("TOPICS_MAX_TOPICS", "-1"),
        ("TOPICS_MAX_BATCH_RECORDS", "-5"),
        ("TOPICS_IDLE_TIMEOUT_MS", "-1"),
        ("TOPICS_PROBE_AUTH", "perhaps"),
    ],
)
def test_a_setting_that_cannot_be_stops_the_start_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setattr("topics.cli.serve.run_server", lambda *_: 0)
    env = {"TOPICS_DATA_DIR": str(tmp_path), "COLUMNS": "200", variable: value}
    answer = CliRunner().invoke(app, ["serve"], env=env)
    assert answer.exit_code != 0
    assert variable in answer.output.replace("\n", "")


def test_an_unknown_flag_stops_the_start(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["serve", "--colour", "blue"])
    assert answer.exit_code == 2


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with child(tmp_path, TOPICS_PORT=str(port)) as server:
            code, said = server.wait_for_end()
    assert code == 1
    assert f"127.0.0.1:{port}" in said
    assert "Traceback" not in said


def test_a_data_directory_that_is_none_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    with child(file) as server:
        code, said = server.wait_for_end()
    assert code == 1
    assert str(file) in said
    assert "listen" not in said
    assert "Traceback" not in said


def test_a_second_server_on_the_same_directory_refuses(tmp_path: Path) -> None:
    with local_server(tmp_path) as first, first.client() as client:
        with child(tmp_path) as second:
            code, said = second.wait_for_end()
        assert code == 1
        assert str(tmp_path) in said
        assert "Traceback" not in said
        assert write(client, "a", 1) == [1]


def test_ipv6_is_written_as_a_url(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with child(tmp_path, TOPICS_HOST="::1") as server:
        server.wait_until_ready()
        assert server.url.startswith("http://[::1]:")
        with server.client() as client:
            assert client.get("/v0/health").status_code == 200


def test_requests_are_logged_as_json_lines_only_when_asked(tmp_path: Path) -> None:
    for asked in (False, True):
        with child(tmp_path, "--access-log" if asked else "--no-access-log") as server:
            with server.wait_until_ready().client() as client:
                client.get("/v0/topics/nobody?secret=1")
            server.terminate()
            code, _ = server.wait_for_end()
        assert code == 0
        lines = [json.loads(line) for line in server.err]
        assert len(lines) == asked
        for line in lines:
            assert (line["method"], line["path"], line["status"]) == ("GET", "/v0/topics/nobody", 404)
            assert line["ms"] >= 0
            assert line["ts"] > 0


# -- while the log is replayed ---------------------------------------------------------------------------------------


class Replay:
    """An opening of the log that goes on only when it is told to."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def open(self, *arguments: Any) -> Engine:
        *_, on_progress = arguments
        on_progress(0.25)
        self.has_begun.set()
        assert self.may_end.wait(DEADLINE)
        return open_engine(*arguments)


def test_503_not_ready_while_the_log_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay()
    monkeypatch.setattr("topics.http.server.open_engine", replay.open)
    server = LocalServer(tmp_path)
    starting = Background(server.start)
    assert replay.has_begun.wait(DEADLINE)
    try:
        with client_of(server.url) as client:
            for method, path in (("GET", "/v0/topics"), ("PUT", "/v0/topics/a"), ("GET", "/v0/ready")):
                answer = client.request(method, path)
                assert error_of(answer) == (503, "not_ready")
                assert answer.json()["error"]["detail"]["replay_progress"] == 0.25
                assert int(answer.headers["retry-after"]) > 0
            assert client.get("/v0/health").status_code == 200
            assert client.get("/healthz").json()["status"]
            big = client.post("/v0/topics/a", json={"records": [{"data": "x" * 200_000}]})
            assert error_of(big) == (503, "not_ready")
            replay.may_end.set()
            starting.result()
            assert client.get("/v0/ready").json()["status"] == "ready"
            assert client.put("/v0/topics/a").status_code == 201
    finally:
        replay.may_end.set()
        starting_is_over = server.server.app is not None
        if starting_is_over:
            server.stop()


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_nothing_is_lost(tmp_path: Path, number: signal.Signals) -> None:
    with child(tmp_path) as server:
        with server.wait_until_ready().client() as client:
            for durability in ("memory", "disk", "fsync"):
                client.put(f"/v0/topics/{durability}", json={"durability": durability})
                write(client, durability, 1, 2, 3)
        server.process.send_signal(number)
        code, said = server.wait_for_end()
    assert code == 0
    assert "Traceback" not in said
    with local_server(tmp_path) as again, again.client() as client:
        for durability in ("memory", "disk", "fsync"):
            assert datas(client, durability) == [1, 2, 3]
            state = client.get(f"/v0/topics/{durability}").json()
            assert (state["holes"], state["head_seq"]) == (0, 3)
            assert write(client, durability, 4) == [4]


def test_reads_that_wait_are_answered_at_sigterm(tmp_path: Path) -> None:
    with child(tmp_path) as server:
        with server.wait_until_ready().client() as client:
            write(client, "a", 1)
        with Wire(server.port) as wire, Wire(server.port) as idle, server.client() as client:
            wire.send(request("POST", "/v0/topics/a/diff", b'{"from_seq":1,"wait_ms":30000}'))
            eventually(lambda: "topics_waiting_reads 1.0" in client.get("/v0/metrics").text, "a read that waits")
            server.terminate()
            body = wire.read().json()
            assert (body["records"], body["next_from_seq"], body["caught_up"]) == ([], 1, True)
            assert wire.is_ended
            assert idle.is_ended
        code, _ = server.wait_for_end()
    assert code == 0


def test_writes_in_flight_at_sigterm_are_answered_or_not_there(tmp_path: Path) -> None:
    with child(tmp_path) as server:
        with server.wait_until_ready().client() as client:
            client.put("/v0/topics/a", json={"durability": "fsync"})
        with Wire(server.port) as wire:
            wire.send(b"".join(request("POST", "/v0/topics/a", record(number)) for number in range(200)))
            acked = [wire.read().json()["last_seq"]]
            server.terminate()
            rest = wire.read_to_end()
        code, said = server.wait_for_end()
    assert code == 0
    assert "Traceback" not in said
    acked += [
        json.loads(body.split(b"HTTP/1.1")[0])["last_seq"]
        for body in rest.split(b"\r\n\r\n")[1:]
        if b'"last_seq"' in body
    ]
    assert acked == list(range(1, len(acked) + 1))
    with local_server(tmp_path) as again, again.client() as client:
        there = datas(client, "a", limit=1000)
        assert there[: len(acked)] == list(range(len(acked)))
        assert there == list(range(len(there)))
        assert client.get("/v0/topics/a").json()["holes"] == 0


def test_what_stands_behind_a_read_that_waits_is_told_that_we_leave(tmp_path: Path) -> None:
    with local_server(tmp_path) as server:
        with server.client() as client:
            client.put("/v0/topics/a")
        with Wire(server.port) as wire:
            wire.send(
                request("POST", "/v0/topics/a/diff", b'{"wait_ms":30000}') + request("POST", "/v0/topics/a", record(1))
            )
            server.wait_for_readings()
            stopping = Background(server.stop)
            assert wire.read().status == 200
            reply = wire.read()
            assert (reply.status, reply.code) == (503, "shutting_down")
            assert "retry-after" in reply.headers
            assert wire.is_ended
            stopping.result()
    with local_server(tmp_path) as again, again.client() as client:
        assert datas(client, "a") == []


def test_nobody_is_accepted_after_the_end(tmp_path: Path) -> None:
    with local_server(tmp_path) as server:
        server.stop()
        with pytest.raises(httpx.ConnectError), server.client() as client:
            client.get("/v0/health")


def test_a_request_that_is_half_sent_does_not_hold_the_end_up(tmp_path: Path) -> None:
    with local_server(tmp_path, shutdown_timeout_ms=60_000) as server, Wire(server.port) as wire:
        wire.send(request("POST", "/v0/topics/a", record(1))[:-3])
        server.wait_until(lambda: len(server.app.connections) == 1, "a connection")
        server.stop()
        wire.read_to_end()


def test_a_client_that_does_not_read_does_not_hold_the_end_up_for_ever(tmp_path: Path) -> None:
    with local_server(tmp_path, shutdown_timeout_ms=200) as server:
        with server.client() as client:
            write(client, "a", *["x" * 900_000] * 8)
        with Wire(server.port) as wire:
            wire.send(request("POST", "/v0/topics/a/diff", b'{"max_bytes":8000000}') * 4)
            server.wait_until(lambda: server.app.metrics.records_read > 0, "a read")
            server.stop()


# -- after a kill ----------------------------------------------------------------------------------------------------


def test_after_kill_9_what_was_acked_is_there(tmp_path: Path) -> None:
    with child(tmp_path) as server:
        with server.wait_until_ready().client() as client:
            for durability in ("disk", "fsync"):
                client.put(f"/v0/topics/{durability}", json={"durability": durability})
                for number in range(20):
                    write(client, durability, number, idempotency_key=f"k{number}")
            client.post("/v0/topics/disk/delete", json={"before_seq": 3})
            client.put("/v0/topics/other", json={"ttl_ms": 12345})
            epoch = client.get("/v0/topics/disk").json()["epoch"]
        server.kill()
    with child(tmp_path) as again, again.wait_until_ready().client() as client:
        assert datas(client, "fsync") == list(range(20))
        assert datas(client, "disk") == list(range(2, 20))
        state = client.get("/v0/topics/disk").json()
        assert (state["epoch"], state["holes"], state["head_seq"]) == (epoch, 0, 20)
        assert client.get("/v0/topics/other").json()["config"]["ttl_ms"] == 12345
        assert write(client, "disk", "repeat", idempotency_key="k7") == [8]
        assert write(client, "disk", "new") == [21]


def test_a_killed_server_lets_its_directory_go(tmp_path: Path) -> None:
    with child(tmp_path) as server:
        server.wait_until_ready()
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait_for_end()
    with local_server(tmp_path) as again, again.client() as client:
        assert client.get("/v0/ready").json()["status"] == "ready"
