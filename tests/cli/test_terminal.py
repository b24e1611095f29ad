"""The command in the hands of people and of shells: Ctrl-C, pipes, colours, completion, help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.http.server import DEADLINE, LocalServer
from topics.cli import COMMANDS
from topics.cli.show import has_colour, safe
from topics.client.sync import Client

Start = Callable[..., subprocess.Popen[str]]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err


def test_ctrl_c_ends_a_tail_with_130_and_where_to_go_on(child: Start, client: Client, topic: str) -> None:
    client.write(topic, [{"data": 1}])
    process = child("tail", topic, "--from", "0")
    assert process.stdout is not None
    assert process.stdout.readline().split()[0] == "1"
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "next: --from 1" in err
    assert "Traceback" not in err


def test_ctrl_c_ends_a_write_and_what_it_has_read_is_written(child: Start, client: Client, topic: str) -> None:
    process = child("write", topic, "--flush-ms", "1", "--batch", "3")
    assert process.stdin is not None
    process.stdin.write("1\n2\n3\n4\n")
    process.stdin.flush()
    deadline = time.monotonic() + DEADLINE
    while not list(client.topics(topic)) or client.get(topic).count < 3:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert out == f"{topic}: {client.get(topic).count} records written\n"
    assert "Traceback" not in err


def test_ctrl_c_ends_a_worker_when_its_job_is_done(child: Start, client: Client, topic: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    client.put(topic, type="queue")
    client.write(topic, [{"data": n} for n in range(3)])
    process = child("queue", "work", topic, "--", "sh", "-c", f"echo begun; cat {go}")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    go.write_text("")
    code, out, err = finish(process)
    assert code == 0, err
    assert "done" in out
    state = client.get(topic).queue
    assert state is not None
    assert (state.ready, state.in_flight) == (2, 0)


def test_a_reader_that_has_enough_ends_a_tail_quietly(child: Start, client: Client, topic: str) -> None:
    client.write(topic, [{"data": "x" * 1000} for _ in range(500)])
    process = child("diff", topic, "--all")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(DEADLINE) == 0
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_losses_are_red_where_somebody_looks(
    topics: Run, client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put(topic, cap_records=1)
    client.write(topic, [{"data": 1}, {"data": 2}])
    assert "\x1b" not in topics("diff", topic).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    first = topics("diff", topic).out.splitlines()[0]
    assert first.startswith("\x1b[31m")
    assert "LOST" in first
    assert "\x1b" not in topics("diff", topic, "--json").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in topics("diff", topic).out


def test_no_colour_on_a_pipe_or_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(Terminal())
    with open(os.devnull) as nowhere:
        assert not has_colour(nowhere)


def test_text_of_others_cannot_steer_the_terminal(topics: Run, client: Client, topic: str) -> None:
    assert safe("plain é") == "plain é"
    assert "\x1b" not in safe("\x1b[2Jgone")
    client.write(topic, [{"data": "\x9b2J", "tag": "\x1b[31m"}])
    out = topics("diff", topic).out
    assert "\x1b" not in out
    assert "\x9b" not in out


def test_a_line_of_json_is_a_line_whatever_white_space_data_has(topics: Run, topic: str) -> None:
    topics("write", topic, '{"a":\n\r 1}')
    assert topics("diff", topic, "--all", "--json").json["data"] == {"a": 1}
    assert len(topics("diff", topic).out.splitlines()) == 1


@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS], ["queue", "work"], ["routers", "put"]])
def test_every_command_explains_itself(command: list[str], topics: Run) -> None:
    out = topics(*command, "--help").out
    assert "Usage:" in out
    assert "--help" in out


def test_the_list_of_commands_has_the_exit_codes(topics: Run) -> None:
    out = " ".join(topics("--help").out.split())
    assert "130 Ctrl-C" in out
    for name in COMMANDS:
        assert f" {name} " in out


def test_a_command_that_is_not_there_suggests_another(topics: Run) -> None:
    assert "Did you mean 'write'?" in topics("wriet", code=2).err


def test_the_version(topics: Run) -> None:
    assert topics("--version").out.startswith("topics 0.")


def test_the_shell_completes_commands_and_topics(server: LocalServer, client: Client) -> None:
    for name in ("orders.eu", "orders.us", "stock"):
        client.put(name)
    code = "import sys; sys.argv = ['topics']; from topics.cli import main; main()"
    environment = {**os.environ, "TOPICS_URL": server.url, "_TOPICS_COMPLETE": "complete_bash"}

    def complete(words: str) -> list[str]:
        env = {**environment, "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        return done.stdout.split()

    assert complete("topics di") == ["diff"]
    assert complete("topics diff orders") == ["orders.eu", "orders.us"]
    assert complete("topics queue cl") == ["claim"]
    environment["TOPICS_URL"] = "http://127.0.0.1:9"
    assert complete("topics diff orders") == []
