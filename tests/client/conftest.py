"""One server and one proxy in front of it for each file of tests; clients that do not wait between tries."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.client.proxy import Proxy, proxy_to
from tests.http.server import LocalServer, local_server
from topics.client.sync import Client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[Client]:
    """Straight to the server."""
    with Client(server.url) as opened:
        yield opened


@pytest.fixture
def proxy(server: LocalServer) -> Iterator[Proxy]:
    with proxy_to(server.port) as standing:
        yield standing


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test of the file uses."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", request.node.name)[-200:].lstrip("._:-")
