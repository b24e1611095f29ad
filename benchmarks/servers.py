"""Real servers for the benchmarks over sockets, each in a process of its own, on loopback, stopped at the end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def need(command: str, package: str) -> None:
    """A tool of Debian's packages, installed if that can be done here."""
    if shutil.which(command) is None:
        if os.geteuid() == 0 and shutil.which("apt-get") is not None:
            subprocess.run(["apt-get", "install", "-y", "-qq", package], check=False, stdout=subprocess.DEVNULL)
        if shutil.which(command) is None:
            raise SystemExit(f"this benchmark needs {command}: install the package {package}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def topics_server(directory: Path, **settings: str) -> Iterator[tuple[str, int]]:
    """A server; gives its URL and its process id."""
    port = free_port()
    env = {**os.environ, "TOPICS_PORT": str(port), "TOPICS_DATA_DIR": str(directory), **settings}
    child = subprocess.Popen(
        [sys.executable, "-c", "from topics.cli import main; main()", "serve"], env=env, stdout=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(port)
        for _ in range(600):
            try:
                urllib.request.urlopen(url + "/v0/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        yield url, child.pid
    finally:
        child.terminate()
        child.wait()


@contextmanager
def redis_server(directory: Path, fsync: str) -> Iterator[int]:
    """Redis with an append-only file; gives its port."""
    need("redis-server", "redis-server")
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "yes", "--appendfsync", fsync]
    child = subprocess.Popen([*command, "--dir", str(directory)], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield port
    finally:
        child.kill()
        child.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise SystemExit(f"nothing listens on port {port}")
