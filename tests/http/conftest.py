"""One server for each file of tests, a client, and a topic name for each test."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.http.server import LocalServer, local_server


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
