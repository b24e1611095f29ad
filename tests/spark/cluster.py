"""A standalone Spark cluster on loopback, out of the `pyspark` package: a master, and two workers that are two hosts to
Spark, because each has an address of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.spark.proxy import PATIENCE

_HOME = Path(pyspark.__file__).parent
_MASTER = "127.0.0.1"
WORKERS = ("127.0.0.2", "127.0.0.3")


class _Daemon:
    """A master or a worker; `waits_for` is what it says when it is up, and `address` what it is then known by."""

    def __init__(self, host: str, waits_for: str, *command: str) -> None:
        self._waits_for = re.compile(waits_for)
        self._said: list[str] = []
        self._is_up = threading.Event()
        self.address = ""
        env = {
            **os.environ,
            "SPARK_HOME": str(_HOME),
            "SPARK_LOCAL_IP": host,
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
        }
        self._process = subprocess.Popen(
            [str(_HOME / "bin" / "spark-class"), *command, "--host", host],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line)
            found = self._waits_for.search(line)
            if found is not None:
                self.address = found[0]
                self._is_up.set()

    def wait_until_up(self) -> None:
        assert self._is_up.wait(PATIENCE), "Spark did not start: " + "".join(self._said)[-3000:]

    def stop(self) -> None:
        """A worker ends its executors first, which -9 would leave to themselves."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join(PATIENCE)
            assert self._process.stdout is not None
            self._process.stdout.close()


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Gives the master's URL."""
    daemons: list[_Daemon] = []
    try:
        master = _Daemon(
            *(_MASTER, r"spark://[\d.]+:\d+", "org.apache.spark.deploy.master.Master"),
            *("--port", str(_free_port()), "--webui-port", "0"),
        )
        daemons.append(master)
        master.wait_until_up()
        for host in WORKERS:
            worker = _Daemon(
                *(host, "Successfully registered with master", "org.apache.spark.deploy.worker.Worker"),
                *("--webui-port", "0", "--cores", "1", "--memory", "1g"),
                *("--work-dir", str(folder / host), master.address),
            )
            daemons.append(worker)
        for worker in daemons[1:]:
            worker.wait_until_up()
        yield master.address
    finally:
        for daemon in reversed(daemons):
            daemon.stop()


def _free_port() -> int:
    """Spark's master takes no port 0."""
    with socket.create_server((_MASTER, 0)) as taken:
        return int(taken.getsockname()[1])
