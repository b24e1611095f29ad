"""Pages of documentation as tests see them: their blocks, and a server on which these are run as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Answers are shown with example values in these fields.
VARYING = {
    *("ts", "$ts", "deadline", "deadlines", "lease_id", "wid", "stream_url", "instance", "uptime_ms", "version"),
    *("last_write_ts", "last_read_ts", "effective_priority", "oldest_ready_ts", "performance", "idle_ms"),
}
MORE = "…"


class Block(msgspec.Struct):
    language: str
    text: str


class Served(msgspec.Struct):
    url: str
    pid: int
    folder: Path


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)]


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """What `make run` runs, in a folder of its own, on a free port."""
    command = [sys.executable, "-m", "topics", "serve", "--port", "0", *flags]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert match is not None, first
        yield Served(match[0], server.pid, folder)
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0


def run_shell(served: Served, commands: list[str]) -> list[str]:
    """Runs the blocks in one shell, as a reader would paste them; what each has printed."""
    script = [
        "set -eu",
        f"TOPICS={served.url} SERVER={served.pid}",
        'curl() { command curl -sS --fail-with-body "$@"; echo; }',
        f'topics() {{ {sys.executable} -m topics "$@"; }}',
    ]
    for text in commands:
        script += ["echo @@@", text]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=served.folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.split("@@@\n")[1:]


def run_python(served: Served, code: str) -> str:
    environment = {**os.environ, "TOPICS": served.url}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=served.folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_page(page: Path, served: Served) -> str:
    """Runs everything on a page that is meant to be run, shell first; what it has printed."""
    found = blocks(page)
    printed = "".join(run_shell(served, [block.text for block in found if block.language == "sh"]))
    code = "\n".join(block.text for block in found if block.language == "python")
    return printed + run_python(served, code) if code else printed


def last_answer(printed: str) -> Any:
    """The JSON answer of the last command of a block."""
    return json.loads(printed.strip().splitlines()[-1])


def agree(shown: Any, got: Any, where: str = "") -> None:
    """An answer is what the page shows: every field, and every value that does not vary from run to run."""
    if isinstance(shown, dict):
        assert isinstance(got, dict), where
        more = MORE in shown
        fields = {name for name in shown if name != MORE}
        left_out = set(got) - fields - {"performance"}
        assert fields <= set(got), f"{where}: {fields - set(got)} are shown and not there"
        assert more or not left_out, f"{where}: {left_out} are there and not shown"
        for name in fields:
            if name in VARYING:
                assert type(shown[name]) is type(got[name]), f"{where}.{name}"
            else:
                agree(shown[name], got[name], f"{where}.{name}")
    elif isinstance(shown, list):
        assert isinstance(got, list), where
        assert len(shown) == len(got), where
        for index, (one, other) in enumerate(zip(shown, got, strict=True)):
            agree(one, other, f"{where}[{index}]")
    else:
        assert shown == got, where
