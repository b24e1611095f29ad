"""One server for each file of tests, and the command `topics` against it: in this process, or as a child."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.http.server import LocalServer, local_server
from topics.cli import app
from topics.client.sync import Client


class Done:
    """What came of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def lines(self) -> list[Any]:
        """Its output as JSON, line by line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def json(self) -> Any:
        (line,) = self.lines
        return line


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[Client]:
    with Client(server.url) as opened:
        yield opened


@pytest.fixture
def topics(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command here; what it raises beyond an exit is a failure of the test."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TOPICS_KEY", "TOPICS_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOPICS_URL", server.url)

    def run(*args: str, input: str | bytes | None = None, code: int | None = 0) -> Done:
        result = CliRunner().invoke(app, args, input=input, catch_exceptions=False)
        done = Done(result.exit_code, result.stdout, result.stderr)
        assert code is None or done.code == code, (done.code, done.out, done.err)
        assert "Traceback" not in done.err
        return done

    return run


@pytest.fixture
def child(server: LocalServer) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command as a process of its own, that is gone afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "topics", *args],
            env={**os.environ, "TOPICS_URL": server.url, "PYTHONUNBUFFERED": "1", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return re.sub(r"[^A-Za-z0-9._:-]", "-", request.node.name)[-200:].lstrip("._:-")
