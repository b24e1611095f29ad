"""A line between two servers that is cut at chosen bytes: nothing is lost, nothing is doubled."""

from __future__ import annotations

import pytest

from tests.http.server import client_of, write
from tests.routers_remote.conftest import Locals
from tests.routers_remote.proxies import Proxy
from tests.routers_remote.servers import data_of, read_all, settles

# Dense where requests and answers begin and end; a prime apart elsewhere.
BYTES = [*range(4), *range(4, 1200, 31), *range(1200, 3000, 211)]


@pytest.mark.parametrize("towards", ["up", "down"])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_line_that_is_cut_anywhere(local: Locals, direction: str, towards: str) -> None:
    source, dest = local(), local()
    far = dest if direction == "push" else source
    with Proxy(far.port) as proxy, client_of(source.url) as writer, client_of(dest.url) as reader:
        end = {"url": proxy.url, "topic": "t"}
        ends = {"source": "t", "dest": end} if direction == "push" else {"source": end, "dest": "t"}
        home = writer if direction == "push" else reader
        writer.put("/v0/topics/t")
        answer = home.put("/v0/routers/r", json={**ends, "start": "earliest"})
        assert answer.status_code == 201, answer.text

        def cursor() -> int:
            return int(home.get("/v0/routers/r").json()["cursor"])

        number = 0
        for cuts, after in enumerate(BYTES, 1):
            proxy.cut(towards, after)
            # Until the line is cut there is always more to say.
            while proxy.cuts < cuts:
                write(writer, "t", number, number + 1)
                number += 2
                settles(lambda: proxy.cuts >= cuts or cursor() >= number, "a cut, or all")  # noqa: B023
        settles(lambda: len(data_of(reader, "t")) >= number, lambda: home.get("/v0/routers/r").text)
        settles(lambda: home.get("/v0/routers/r").json()["lag"] == 0, "rest")
        records, lost = read_all(reader, "t")
        assert [record["data"] for record in records] == [*range(number)]
        assert [record["$seq"] for record in records] == [*range(1, number + 1)]
        assert lost == []
        settles(lambda: home.get("/v0/routers/r").json()["state"] == "running", "a line that holds")
        assert home.get("/v0/routers/r").json()["forwarded_total"] == number
