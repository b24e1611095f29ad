"""The README's two commands, followed in an empty folder on a clean checkout, and timed.

`make test` takes the longest by far: BENCH_README=run leaves it out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from benchmarks.measure import Figure
from benchmarks.servers import free_port

_ROOT = Path(__file__).parent.parent
_MINUTES = 90


def run(directory: Path) -> list[Figure]:
    checkout = directory / "topics"
    subprocess.run(["git", "clone", "--quiet", str(_ROOT), str(checkout)], check=True)
    figures = [_make_run(checkout, "make run, from a bare checkout to the first answer")]
    figures.append(_make_run(checkout, "make run, the second time"))
    if os.environ.get("BENCH_README") != "run":
        figures.append(_make_test(checkout))
    return figures


def _make_run(checkout: Path, what: str) -> Figure:
    port = free_port()
    started = time.perf_counter()
    server = subprocess.Popen(
        ["make", "run", f"ARGS=--port {port}"], cwd=checkout, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert server.stdout is not None
        printed = ""
        for line in server.stdout:
            printed += line
            if "open:" in line:
                break
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ui", timeout=10) as page:
            assert b"<title>topics</title>" in page.read(), printed
        return Figure(what, time.perf_counter() - started, "s")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def _make_test(checkout: Path) -> Figure:
    started = time.perf_counter()
    done = subprocess.run(["make", "test"], cwd=checkout, capture_output=True, text=True, timeout=60 * _MINUTES)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"make test failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    last = done.stdout.strip().splitlines()[-1].strip("= ")
    return Figure("make test, with everything set up", seconds / 60, "minutes", "< 20", last)
