"""How far a pipeline is: counted, shown and published."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import httpx
import pytest
from rich.console import Console

from tests.http.server import LocalServer, write
from topics.client.connection import Connection
from topics.core.progress import TOPIC, Progress
from topics.pipelines.progress import Lines, Publisher, Report, Terminal, cause_of


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
    assert [line["records"] for line in lines] == [0, 400, 800, 1000]
    assert lines[0]["stage"] == "writing"
    last = lines[-1]
    assert (last["state"], last["lost"], last["lag"], last["records_per_s"]) == ("done", 10, 50, 400.0)


def test_what_was_held_back_is_said_while_one_waits_and_then_that_one_is_still_there() -> None:
    out, clock = io.StringIO(), Seconds()
    report = Report("tier", "orders", shows=(Lines(out),), clock=clock)

    def said() -> list[dict[str, Any]]:
        return [json.loads(line) for line in out.getvalue().splitlines()]

    report.stage("writing")
    report.count(records=100, lost=3, lag=0)
    assert [line["records"] for line in said()] == [0]
    report.beat()
    assert len(said()) == 1
    clock.now = 1.0
    report.beat()
    assert [(line["records"], line["lost"]) for line in said()] == [(0, 0), (100, 3)]
    clock.now = 30.0
    report.beat()
    assert len(said()) == 2
    clock.now = 31.0
    report.beat()
    assert [line["records_per_s"] for line in said()] == [0.0, 100.0, 3.2]


def test_who_is_stopped_has_not_failed() -> None:
    report = Report("tier", "orders")
    report.finish(KeyboardInterrupt())
    assert (report.progress.state, report.progress.error) == ("done", "")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "[STREAM_FAILED] Query\nTraceback:\n  File x\ntopics.core.errors.TopicNotFound: there is no topic 'a'\n",
            "there is no topic 'a'",
        ),
        ("[X] a\n  RuntimeError: the files differ: 3\n", "RuntimeError: the files differ: 3"),
        ("[PATH_NOT_FOUND] Path does not exist: x.\nSQLSTATE: 42\n", "[PATH_NOT_FOUND] Path does not exist: x."),
        ("", "Exception"),
    ],
)
def test_the_cause_of_an_error_is_a_line(text: str, cause: str) -> None:
    assert cause_of(Exception(text)) == cause


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_live_pipeline_that_is_stopped_says_where_it_is_and_leaves_no_trace(
    server: LocalServer, client: httpx.Client, tmp_path: Path, number: signal.Signals
) -> None:
    topic = f"stopped-{number}"
    client.put(f"/v0/topics/{topic}", json={"cap_records": 5})
    write(client, topic, *range(8))
    command = [sys.executable, "-c", "from topics.cli import main; main()", "pipeline", "tier", "lake"]
    command += ["--topic", topic, "--url", server.url, "--every", "1 second", "--master", "local[1]"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        words = map(json.loads, process.stdout)
        # The end of the batch is told without another one.
        assert any(word["stage"] == "waiting" for word in words)
        process.send_signal(number)
        *_, word = words
        errors = process.stderr.read()
    assert process.returncode == 128 + number
    assert (word["state"], word["records"], word["lost"], word["lag"]) == ("done", 5, 3, 0)
    assert "Traceback" not in errors
    assert "Error" not in errors


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
