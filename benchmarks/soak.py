"""A soak of a queue with real processes: workers that are killed all the time, and a server that is killed three times.

Every job must be done. A job that was done twice must be explained: its first lease had expired, or the worker or the
server was killed in between. Workers write what they do into files of their own before they ack.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from benchmarks.measure import Figure
from benchmarks.servers import free_port
from topics.client.connection import Connection

_JOBS = int(os.environ.get("BENCH_JOBS", "200000"))
_WORKERS = 8
_SERVER_KILLS = 3
_LEASE_MS = 2000
_MAX_SECONDS = 900
_SERVE = "from topics.cli import main; main()"


def run(directory: Path) -> list[Figure]:
    soak = Soak(directory, _JOBS)
    try:
        return soak.run()
    finally:
        soak.stop()


class Soak:
    def __init__(self, directory: Path, jobs: int) -> None:
        self._directory = directory
        self._jobs = jobs
        self._port = free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._server: subprocess.Popen[bytes] | None = None
        self._workers: list[subprocess.Popen[bytes]] = []
        self._started = 0
        self._random = random.Random(7)

    def _serve(self) -> None:
        env = {**os.environ, "TOPICS_PORT": str(self._port), "TOPICS_DATA_DIR": str(self._directory / "data")}
        self._server = subprocess.Popen([sys.executable, "-c", _SERVE, "serve"], env=env, stdout=subprocess.DEVNULL)
        Connection(self._url, retry_ms=60_000).get("/v0/ready")

    def _add_worker(self) -> None:
        self._started += 1
        log = self._directory / f"worker-{self._started}.jsonl"
        command = [sys.executable, "-m", "benchmarks.soak", self._url, f"w{self._started}", str(log)]
        self._workers.append(subprocess.Popen(command, cwd=Path(__file__).parent.parent))

    def run(self) -> list[Figure]:
        self._serve()
        connection = Connection(self._url, retry_ms=60_000)
        config = {"type": "queue", "durability": "fsync", "lease_ms": _LEASE_MS}
        connection.send(
            "PUT", "/v0/topics/jobs", msgspec.json.encode(config), {"content-type": "application/json"}, True
        )
        for first in range(0, self._jobs, 1000):
            records = [{"data": number, "client_seq": number} for number in range(first, min(first + 1000, self._jobs))]
            connection.post("/v0/topics/jobs", {"records": records, "client_id": "producer"})
        for _ in range(_WORKERS):
            self._add_worker()
        started = time.monotonic()
        kills = self._disturb(connection)
        seconds = time.monotonic() - started
        self.stop()
        return self._account(seconds, *kills)

    def _disturb(self, connection: Connection) -> tuple[int, int]:
        """Kills two workers every few seconds, and the server after each quarter; until nothing is left."""
        worker_kills = server_kills = 0
        deadline = time.monotonic() + _MAX_SECONDS
        while time.monotonic() < deadline:
            time.sleep(2)
            state = connection.get("/v0/topics/jobs")
            if not state["count"]:
                return worker_kills, server_kills
            if state["count"] < self._jobs * (_SERVER_KILLS - server_kills) / (_SERVER_KILLS + 1):
                assert self._server is not None
                self._server.send_signal(signal.SIGKILL)
                self._server.wait()
                server_kills += 1
                self._serve()
            for _ in range(2):
                victim = self._workers.pop(self._random.randrange(len(self._workers)))
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                worker_kills += 1
                self._add_worker()
        raise SystemExit(f"not done after {_MAX_SECONDS} s")

    def stop(self) -> None:
        for process in [*self._workers, *([self._server] if self._server is not None else [])]:
            process.kill()
            process.wait()
        self._workers.clear()

    def _account(self, seconds: float, worker_kills: int, server_kills: int) -> list[Figure]:
        claims: dict[int, list[float]] = {}
        acks: dict[int, float] = {}
        for path in sorted(self._directory.glob("worker-*.jsonl")):
            for line in path.read_bytes().splitlines():
                try:
                    entry = msgspec.json.decode(line, type=_Entry)
                except msgspec.DecodeError:
                    continue  # the last line of a worker that was killed in the middle of it
                for job in entry.jobs:
                    if entry.acked:
                        acks[job] = min(entry.at, acks.get(job, entry.at))
                    else:
                        claims.setdefault(job, []).append(entry.at)
        # Whoever claims a job after somebody's ack was answered got what was done for good.
        unexplained = sum(at > acks.get(job, at) for job, times in claims.items() for at in times)
        done = Counter({job: len(times) for job, times in claims.items()})
        missing = self._jobs - len(done)
        doubled = sum(count - 1 for count in done.values())
        return [
            Figure("soak: jobs never done", missing, "jobs", "0", f"of {self._jobs:,}, class fsync"),
            Figure("soak: jobs done again after an ack", unexplained, "jobs", "0"),
            Figure("soak: done again before an ack: a kill, or a lease that ran out", doubled - unexplained, "jobs"),
            Figure("soak: workers killed", worker_kills, "kills"),
            Figure("soak: servers killed", server_kills, "kills", str(_SERVER_KILLS)),
            Figure("soak: jobs a second, kills and all", self._jobs / seconds, "jobs/s"),
        ]


class _Entry(msgspec.Struct):
    """Jobs that a worker has done, or whose ack was answered; `at` is when they were claimed, or that."""

    at: float
    jobs: list[int]
    acked: bool = False


def work(url: str, node: str, path: str) -> None:
    """A worker: claims, does (writes it down), acks, and writes that down too."""
    connection = Connection(url, retry_ms=60_000)
    with open(path, "ab", buffering=0) as log:
        while True:
            # A claim whose answer is lost has leased jobs that come back when its lease is over.
            answer = connection.post("/v0/topics/jobs/claim", {"node": node, "max": 50, "wait_ms": 1000})
            if not answer["claimed"]:
                continue
            jobs = {job["$seq"]: job["data"] for job in answer["claimed"]}
            log.write(msgspec.json.encode(_Entry(time.time(), list(jobs.values()))) + b"\n")
            acked = connection.post("/v0/topics/jobs/ack", {"lease_id": answer["lease_id"]})["acked_seqs"]
            log.write(msgspec.json.encode(_Entry(time.time(), [jobs[seq] for seq in acked], acked=True)) + b"\n")


if __name__ == "__main__":
    work(*sys.argv[1:4])
