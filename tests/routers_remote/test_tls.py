"""`https` between servers: a certificate is verified, and one that is not good is refused and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.http.server import client_of, local_server, write
from tests.routers_remote.conftest import Members
from tests.routers_remote.proxies import Proxy, make_certificate
from tests.routers_remote.servers import Member, data_of, settles


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_only_a_server_that_is_who_it_says_gets_anything(members: Members, tmp_path: Path, direction: str) -> None:
    ca, good = make_certificate(tmp_path / "good")
    _, unknown = make_certificate(tmp_path / "unknown")
    with local_server(tmp_path / "far", api_keys="SECRET-1") as far:
        [near] = members(1, SSL_CERT_FILE=str(ca))
        other = client_of(far.url, headers={"authorization": "Bearer SECRET-1"})
        source, dest = (near.client, other) if direction == "push" else (other, near.client)
        write(source, "in", 1, 2)

        def put(url: str, name: str) -> None:
            end = {"url": url, "topic": "out" if direction == "push" else "in", "key": "SECRET-1"}
            ends = {"source": "in", "dest": end} if direction == "push" else {"source": end, "dest": "out"}
            near.ask("PUT", f"/v0/routers/{name}", {**ends, "start": "earliest"})

        with Proxy(far.port, unknown) as stranger, Proxy(far.port, good) as friend:
            put(stranger.url, "r")
            is_refused(near, "certificate", "verify")
            # The right certificate, but for another name.
            put(friend.url.replace("127.0.0.1", "localhost"), "r")
            is_refused(near, "localhost", "certificate")
            assert data_of(dest, "out") == []
            assert b"SECRET" not in stranger.heard + friend.heard
            put(friend.url, "r")
            settles(lambda: data_of(dest, "out") == [1, 2], lambda: near.router("r"))
            assert b"Bearer SECRET-1" in friend.heard
            settles(lambda: near.router("r")["state"] == "running", lambda: near.router("r"))
        other.close()


def is_refused(member: Member, *words: str) -> None:
    def state() -> dict[str, Any]:
        return member.router("r")

    settles(lambda: state()["state"] == "blocked", state)
    settles(lambda: all(word in str(state()["last_error"]).lower() for word in words), state)
