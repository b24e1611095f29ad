"""How far a pipeline is: counted, shown and published."""

from __future__ import annotations

import io
import json

import httpx
import pytest
from rich.console import Console

from tests.http.server import LocalServer
from topics.client.connection import Connection
from topics.core.progress import TOPIC, Progress
from topics.pipelines.progress import Lines, Publisher, Report, Terminal


class Seconds:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_than_on_a_terminal_there_is_a_line_of_json_a_second_and_one_at_the_end() -> None:
    out, clock = io.StringIO(), Seconds()
    with Report("tier", "orders", shows=(Lines(out),), clock=clock) as report:
        report.stage("writing")
        for _ in range(10):
            clock.now += 0.25
            report.count(records=100, lost=1, lag=50)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["records"] for line in lines if "records" in line] == [400, 800, 1000]
    assert lines[0]["stage"] == "writing"
    last = lines[-1]
    assert (last["state"], last["lost"], last["lag"], last["records_per_s"]) == ("done", 10, 50, 400.0)


def test_a_pipeline_that_fails_says_so_and_why() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="broken"), Report("verify", "lake", shows=(Lines(out),)):
        raise ValueError("broken")
    last = json.loads(out.getvalue().splitlines()[-1])
    assert (last["state"], last["error"]) == ("failed", "broken")


def test_a_terminal_shows_a_line_for_each_pipeline() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=True, width=120))
    terminal.show(
        Progress("route", "large-orders", "1", 0, stage="writing", records=1234567, records_per_s=1000, lag=5)
    )
    terminal.show(Progress("route", "per-minute", "2", 0, state="failed", lost=7))
    terminal.close()
    shown = out.getvalue()
    for text in ("large-orders", "1,234,567", "1,000", "per-minute", "failed", "7"):
        assert text in shown


def test_the_same_is_published_and_a_server_that_is_away_stops_nobody(
    server: LocalServer, client: httpx.Client
) -> None:
    published = Publisher(lambda: Connection(server.url, retry_ms=0))
    with Report("compact", "lake", run="r1", shows=(published,)) as report:
        report.count(records=3)
    published.close()
    answer = client.post(f"/v0/topics/{TOPIC}/diff", json={"include_tags": True}).json()
    mine = [each for each in answer["records"] if each["data"]["run"] == "r1"]
    assert (mine[-1]["$tag"], mine[-1]["$node"], mine[-1]["data"]["records"]) == ("compact", "lake", 3)
    nobody = Publisher(lambda: Connection("http://127.0.0.1:1", retry_ms=0))
    with Report("compact", "lake", shows=(nobody,)) as report:
        report.count(records=3)
    assert report.progress.state == "done"
