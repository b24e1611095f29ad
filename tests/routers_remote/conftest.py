"""Servers that are gone afterwards, whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.http.server import LocalServer
from tests.routers_remote.servers import Member

Members = Callable[..., list[Member]]
Locals = Callable[..., LocalServer]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    """Starts servers in processes of their own."""
    started: list[Member] = []

    def begin(count: int, **env: str) -> list[Member]:
        new = [Member(tmp_path / f"m{len(started) + number}", **env) for number in range(count)]
        started.extend(new)
        return [member.start() for member in new]

    yield begin
    for member in started:
        member.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers try again at once."""
    monkeypatch.setattr("topics.http.remotes._FIRST_PAUSE", 0.002)
    monkeypatch.setattr("topics.http.remotes._LONGEST_PAUSE", 0.02)


@pytest.fixture
def local(tmp_path: Path, quick: None) -> Iterator[Locals]:
    """Starts servers inside this process, each with a directory of its own."""
    started: list[LocalServer] = []

    def begin(port: int = 0, **fields: Any) -> LocalServer:
        server = LocalServer(tmp_path / f"l{len(started)}", **fields)
        server.server.settings = msgspec.structs.replace(server.server.settings, port=port)
        server.start()
        started.append(server)
        return server

    yield begin
    for server in started:
        server.stop()
