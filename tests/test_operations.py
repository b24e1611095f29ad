"""What docs/operations.md tells an operator to do, done; and the examples in deploy/."""

from __future__ import annotations

import configparser
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import topics
from deploy.runtime_lock import name_of, runtime_lock
from tests.clocks import ManualClock
from tests.pages import DOCS, ROOT, blocks, serving
from topics.core.limits import Limits
from topics.engine.options import Options
from topics.engine.verify import verify
from topics.http.settings import Settings
from topics.log import Log
from topics.storage.fs import OsFileSystem

DEPLOY = ROOT / "deploy"


class Elsewhere(OsFileSystem):
    """The same directory on another machine."""

    def boot_id(self) -> str:
        return "another machine"


def seqs_and_losses(log: Log, topic: str) -> list[Any]:
    items = log.read(topic)
    return [
        (item.gap_from, item.gap_to, item.reason) if isinstance(item, topics.Tombstone) else item["$seq"]
        for item in items
    ]


def write(client: httpx.Client, topic: str, *datas: object, **fields: Any) -> httpx.Response:
    return client.post(f"/v0/topics/{topic}", json={"records": [{"data": data} for data in datas], **fields})


# -- backup and restore ------------------------------------------------------------------------------------------------


def test_a_copy_of_a_stopped_server_has_everything_wherever_it_is_started(tmp_path: Path) -> None:
    with serving(tmp_path) as served, httpx.Client(base_url=served.url) as client:
        for durability in ("memory", "disk", "fsync"):
            client.put(f"/v0/topics/{durability}", json={"durability": durability})
            write(client, durability, 1, 2, 3, idempotency_key="once")
        client.put("/v0/topics/jobs", json={"type": "queue"})
        write(client, "jobs", "a", "b")
        client.post("/v0/topics/jobs/claim", json={"node": "w"})
        client.put("/v0/routers/copy", json={"source": "disk", "dest": "copied", "start": "earliest"})
        client.post("/v0/topics/copied/diff", json={})
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert verify(OsFileSystem(tmp_path / "copy")).ok
    with Log(Elsewhere(tmp_path / "copy"), None, Limits(), Options()) as log:
        for durability in ("memory", "disk", "fsync"):
            assert seqs_and_losses(log, durability) == [1, 2, 3]
            assert log.append(durability, [{"data": 1}], idempotency_key="once").deduped
        queue = log.get("jobs").queue
        assert queue is not None
        assert (queue.ready, queue.in_flight) == (1, 1)
        assert log.append("disk", [{"data": 4}]).seqs == [4]
        assert seqs_and_losses(log, "copied") == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("place", "told"), [(OsFileSystem, False), (Elsewhere, True)], ids=["on this machine", "on another"]
)
def test_a_copy_of_a_paused_server_has_all_that_was_acked(
    place: Callable[[Path], OsFileSystem], told: bool, tmp_path: Path
) -> None:
    """Small checkpoints, so that the pause comes in the middle of one as often as not."""
    with serving(tmp_path, "--checkpoint-bytes", "20000") as served, httpx.Client(base_url=served.url) as client:
        acked = {"disk": 0, "fsync": 0}
        for durability in acked:
            client.put(f"/v0/topics/{durability}", json={"durability": durability})
        stop = threading.Event()
        writers = [threading.Thread(target=keep_writing, args=(served.url, topic, acked, stop)) for topic in acked]
        for writer in writers:
            writer.start()
        for turn in range(2):
            before = dict(acked)
            while any(acked[topic] < before[topic] + 30 for topic in acked):
                stop.wait(0.01)
            copy = tmp_path / f"copy{turn}"
            pause(served.pid)
            told_before = dict(acked)
            shutil.copytree(tmp_path / "data", copy)
            os.kill(served.pid, signal.SIGCONT)
            assert verify(place(copy)).ok
            with Log(place(copy), None, Limits(), Options()) as log:
                for topic, last in told_before.items():
                    items = seqs_and_losses(log, topic)
                    found = [item for item in items if isinstance(item, int)]
                    assert found == list(range(1, len(found) + 1))
                    assert len(found) >= last
                    holes = items[len(found) :]
                    assert [hole[2] for hole in holes] == (["crash"] if told and topic == "disk" else [])
        stop.set()
        for writer in writers:
            writer.join()


def keep_writing(url: str, topic: str, acked: dict[str, int], stop: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stop.is_set():
            acked[topic] = write(client, topic, "x" * 100).raise_for_status().json()["last_seq"]


def pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while any("\nState:\tT" not in (task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()):
        threading.Event().wait(0.001)


def test_behind_a_restore_a_hole_tells_readers_that_were_ahead(tmp_path: Path) -> None:
    with topics.open(tmp_path / "data") as log:
        log.append("t", [{"data": n} for n in range(100)])
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    with topics.open(tmp_path / "data") as log:
        log.append("t", [{"data": n} for n in range(50)])
    with topics.open(tmp_path / "copy") as log:
        log.append("t", [{"hole": 1000}])
        assert log.append("t", [{"data": "new"}]).seqs == [1101]
        ahead, behind = log.diff("t", 150), log.diff("t", 100)
        assert [record["$seq"] for record in ahead.records] == [1101]
        for answer, first in ((ahead, 151), (behind, 101)):
            assert answer.tombstone is not None
            assert (answer.tombstone.gap_from, answer.tombstone.gap_to) == (first, 1100)


def test_what_has_run_out_of_time_since_the_copy_is_told_after_a_restore(tmp_path: Path) -> None:
    clock = ManualClock()
    with Log(OsFileSystem(tmp_path / "data"), clock, Limits(), Options()) as log:
        log.put("t", ttl_ms=1000)
        log.append("t", [{"data": 1}])
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    clock.advance(5000)
    with Log(Elsewhere(tmp_path / "copy"), clock, Limits(), Options()) as log:
        assert seqs_and_losses(log, "t") == [(1, 1, "ttl")]


# -- a full disk -------------------------------------------------------------------------------------------------------


def test_a_disk_that_takes_no_more_makes_the_server_read_only_until_a_restart(tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    command = [sys.executable, "-m", "topics", "serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, preexec_fn=small_files)
    acked = 0
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        with httpx.Client(base_url=found[0]) as client:
            refused = None
            while refused is None:
                answer = write(client, "t", "x" * 1000)
                acked, refused = (acked + 1, None) if answer.is_success else (acked, answer)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "read_only")
            ready = client.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (200, "read_only")
            assert "\ntopics_read_only 1.0\n" in client.get("/v0/metrics").text
            assert client.post("/v0/topics/t/diff", json={}).json()["head_seq"] == acked
            assert client.post("/v0/topics/t/delete", json={"before_seq": 10}).status_code == 503
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert acked > 10
    with serving(tmp_path) as served, httpx.Client(base_url=served.url) as client:
        state = client.get("/v0/topics/t").json()
        assert (state["head_seq"] in (acked, acked + 1), state["holes"], state["evict_floor"]) == (True, 0, 1)
        assert write(client, "t", 1).is_success


# -- keys --------------------------------------------------------------------------------------------------------------


def test_the_keys_of_the_page_may_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [block.text for block in blocks(DOCS / "operations.md") if block.language == "ini"]
    name, _, value = line.strip().partition("=")
    monkeypatch.setenv(name, value)
    keys = [entry.partition(":")[0] for entry in value.split(",")]
    with serving(tmp_path) as served, httpx.Client(base_url=served.url) as client:

        def status(key: str, method: str, path: str, body: object = None) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return client.request(method, path, json=body, headers=headers).status_code

        ops, shop, report, worker, scrape = keys
        one = {"records": [{"data": 1}]}
        assert status(shop, "POST", "/v0/topics/orders", one) == 201
        assert status(shop, "POST", "/v0/topics/orders", {**one, "config": {"cap_records": 1}}) == 403
        assert status(shop, "POST", "/v0/topics/stock", one) == 403
        assert status(shop, "POST", "/v0/topics/orders/diff", {}) == 403
        assert status(ops, "PUT", "/v0/topics/stock", {}) == 201
        assert status(report, "POST", "/v0/topics/stock/diff", {}) == 200
        assert status(report, "POST", "/v0/topics/stock", one) == 403
        assert status(ops, "PUT", "/v0/topics/jobs", {"type": "queue"}) == 201
        assert status(worker, "POST", "/v0/topics/jobs/claim", {"node": "w"}) == 200
        assert status(scrape, "GET", "/v0/metrics") == 200
        assert status("another", "GET", "/v0/metrics") == 401
        assert client.get("/healthz").status_code == 200


# -- deploy/ -----------------------------------------------------------------------------------------------------------


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names of systemd have capitals
    unit.read(DEPLOY / "topics.service")
    service = unit["Service"]
    assert service["ExecStart"].split() == ["/opt/topics/bin/topics", "serve"]
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) * 1000 > 2 * Settings().shutdown_timeout_ms
    assert int(service["LimitNOFILE"]) > Settings().max_connections
    assert "ProcSubset" not in service
    settings = dict(pair.split("=") for pair in service["Environment"].split())
    assert settings["TOPICS_DATA_DIR"] == f"/var/lib/{service['StateDirectory']}" == service["WorkingDirectory"]
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    if shutil.which("systemd-analyze") is not None:
        # It looks for the program, which is not installed here.
        copy = tmp_path / "topics.service"
        copy.write_text((DEPLOY / "topics.service").read_text().replace("/opt/topics/bin/topics", sys.executable))
        done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_container_file_copies_what_exists_and_runs_as_nobody_special() -> None:
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Containerfile").read_text())
    parts = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    steps = [(word, rest.strip()) for word, _, rest in parts]
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert {word for word, _ in steps} <= known | {"ENTRYPOINT", "CMD"}
    for sources in (rest.split()[:-1] for word, rest in steps if word == "COPY" and "--from" not in rest):
        assert all((ROOT / source).exists() for source in sources), sources
    words = dict(steps)
    assert words["USER"] == "topics"
    assert words["STOPSIGNAL"] == "SIGTERM"
    settings = dict(pair.split("=") for pair in words["ENV"].split())
    assert settings["TOPICS_DATA_DIR"] == words["VOLUME"] == "/var/lib/topics"
    assert settings["TOPICS_PORT"] == words["EXPOSE"]
    assert f"127.0.0.1:{words['EXPOSE']}/healthz" in words["HEALTHCHECK"]
    assert words["ENTRYPOINT"] == '["/opt/topics/bin/topics"]'
    assert words["CMD"] == '["serve"]'
    assert "--require-hashes -r /tmp/runtime.lock" in text


def test_the_health_check_of_the_container_file_works(tmp_path: Path) -> None:
    (code,) = re.findall(r'"-c", "(import urllib.*?)"\]', (DEPLOY / "Containerfile").read_text())
    with serving(tmp_path) as served:
        command = [sys.executable, "-c", code.replace("http://127.0.0.1:4000", served.url)]
        assert subprocess.run(command, timeout=30).returncode == 0
    assert subprocess.run(command, timeout=30, stderr=subprocess.DEVNULL).returncode != 0


def test_what_is_installed_in_the_container_is_what_the_server_needs() -> None:
    from importlib.metadata import requires

    text = runtime_lock()
    locked = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^\S+==.*?(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    assert all(entry in locked and "--hash=sha256:" in entry for entry in entries)
    names = {name_of(entry) for entry in entries}
    assert not names & {"pyspark", "pyarrow", "pandas", "pytest", "mypy", "ruff", "selenium"}
    waiting = ["h2", "httpcore", "httptools", "httpx", "msgspec", "prometheus-client", "rich", "typer", "uvloop"]
    waiting += ["hatchling", "websockets", "xxhash"]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        assert name in names, name
        if name not in seen:
            seen.add(name)
            waiting += [name_of(need) for need in requires(name) or [] if ";" not in need]
