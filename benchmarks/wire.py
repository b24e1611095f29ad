"""Over the wire, beside Redis 7 in the same run: same machine, same number of connections, C load generators for both
(`wrk` and `redis-benchmark`), best of several turns."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from benchmarks.measure import Figure, body_of
from benchmarks.servers import need, redis_server, topics_server

_CONNECTIONS = 16
_SECONDS = 3
_TURNS = 3
_VALUE = "x" * 100


def run(directory: Path) -> list[Figure]:
    need("wrk", "wrk")
    need("redis-benchmark", "redis-tools")
    figures: list[Figure] = []
    with (
        topics_server(directory / "topics") as (url, pid),
        redis_server(directory / "redis", "no") as lazy,
        redis_server(directory / "redis-fsync", "always") as eager,
    ):
        one = _compare(lambda: _wrk(directory, f"{url}/v0/topics/one", body_of(1)), lambda: _redis(lazy, 200_000, 1))
        cpu = _cpu_per_request(directory, f"{url}/v0/topics/one", body_of(1), pid)
        figures += _rows("write of 1 record", *one, ">= 0.4", f"{cpu:.0f} µs of server CPU a request")
        hundred = _compare(
            lambda: 100 * _wrk(directory, f"{url}/v0/topics/hundred", body_of(100)),
            lambda: _redis(lazy, 1_000_000, 100),
        )
        figures += _rows("records in writes of 100", *hundred, ">= 1.2")
        reads = _compare(
            lambda: 1000 * _wrk(directory, f"{url}/v0/topics/hundred/diff", b'{"from_seq":1000,"limit":1000}'),
            lambda: 1000 * _xrange(lazy),
        )
        figures += _rows("records in reads of 1000", *reads, ">= 8")
        _put(url, "durable", b'{"durability":"fsync"}')
        durable = _compare(
            lambda: _wrk(directory, f"{url}/v0/topics/durable", body_of(1)), lambda: _redis(eager, 20_000, 1)
        )
        figures += _rows("fsynced write of 1 record", *durable, ">= 0.5")
    return figures


def _rows(what: str, ours: float, theirs: float, target: str, note: str = "") -> list[Figure]:
    return [
        Figure(f"{what}, topics", ours, "/s", note=note),
        Figure(f"{what}, Redis", theirs, "/s"),
        Figure(f"{what}: topics / Redis", ours / theirs, "ratio", target),
    ]


def _compare(ours: object, theirs: object) -> tuple[float, float]:
    """The best of several turns of each, one after the other."""
    assert callable(ours)
    assert callable(theirs)
    best_ours = best_theirs = 0.0
    for _ in range(_TURNS):
        best_ours = max(best_ours, ours())
        best_theirs = max(best_theirs, theirs())
    return best_ours, best_theirs


def _wrk(directory: Path, url: str, body: bytes) -> float:
    script = directory / "post.lua"
    script.write_text(
        f'wrk.method = "POST"\nwrk.headers["content-type"] = "application/json"\nwrk.body = [==[{body.decode()}]==]\n'
    )
    command = ["wrk", "-t1", f"-c{_CONNECTIONS}", f"-d{_SECONDS}s", "-s", str(script), url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in out:
        raise SystemExit(f"wrk got errors:\n{out}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert rate is not None
    return float(rate[1])


def _cpu_per_request(directory: Path, url: str, body: bytes, pid: int) -> float:
    """Microseconds of the server's own CPU time: the figure that noise touches least."""

    def spent() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    before, started = spent(), time.perf_counter()
    rate = _wrk(directory, url, body)
    assert time.perf_counter() - started < _SECONDS + 5
    return (spent() - before) / (rate * _SECONDS) * 1e6


def _redis(port: int, requests: int, pipeline: int) -> float:
    return _redis_benchmark(port, requests, pipeline, "XADD", "s", "*", "data", _VALUE)


def _xrange(port: int) -> float:
    return _redis_benchmark(port, 5000, 1, "XRANGE", "s", "-", "+", "COUNT", "1000")


def _redis_benchmark(port: int, requests: int, pipeline: int, *command: str) -> float:
    options = ["-p", str(port), "-c", str(_CONNECTIONS), "-n", str(requests), "-P", str(pipeline), "-q"]
    done = subprocess.run(["redis-benchmark", *options, *command], capture_output=True, text=True, check=True)
    rates = re.findall(r"([\d.]+) requests per second", done.stdout)
    return float(rates[-1])


def _put(url: str, topic: str, config: bytes) -> None:
    import urllib.request

    request = urllib.request.Request(
        f"{url}/v0/topics/{topic}", config, {"content-type": "application/json"}, method="PUT"
    )
    urllib.request.urlopen(request).close()
