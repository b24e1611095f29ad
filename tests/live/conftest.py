"""A server for each file of tests, short words for watching it, and connections that are closed whatever happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.http.server import LocalServer, local_server
from tests.live.sse import Events
from tests.live.ws import Socket


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test of the file uses."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", request.node.name)[-200:].lstrip("._:-")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """What is entered here is closed at the end of the test."""
    with ExitStack() as stack:
        yield stack


Watch = Callable[..., Events]
Connect = Callable[..., Socket]


def create(client: httpx.Client, topics: dict[str, Any], lenient: bool = False, **fields: Any) -> dict[str, Any]:
    """A watch session."""
    answer = client.post("/v0/watch?lenient=true" if lenient else "/v0/watch", json={"topics": topics, **fields})
    assert answer.status_code == 200, answer.text
    session: dict[str, Any] = answer.json()
    return session


@pytest.fixture
def watch(server: LocalServer, client: httpx.Client, opened: ExitStack) -> Watch:
    """Opens a stream on a new session: of one topic from its beginning, or of several from where one says."""

    def begin(topics: str | dict[str, Any], **fields: Any) -> Events:
        wanted = {topics: {}} if isinstance(topics, str) else topics
        return opened.enter_context(Events(server.port, create(client, wanted, **fields)["stream_url"])).stream()

    return begin


@pytest.fixture
def resume(server: LocalServer, opened: ExitStack) -> Watch:
    """Opens a stream on a session that is there, from an id or from where the session is."""

    def begin(url: str, last_id: str | None = None) -> Events:
        return opened.enter_context(Events(server.port, url, last_id)).stream()

    return begin


@pytest.fixture
def connect(server: LocalServer, opened: ExitStack) -> Connect:
    def begin(*headers: str, **fields: Any) -> Socket:
        return opened.enter_context(Socket(server.port, "/v0/ws", *headers, **fields))

    return begin


@pytest.fixture
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server looks at every tick for what has taken too long, not once a second."""
    monkeypatch.setattr("topics.http.app._SWEEP_TICKS", 1)
