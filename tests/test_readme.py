"""The README is run: what it shows works as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str, word: str) -> str:
    """The one block of the README in a language that has a word in it."""
    found = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in found if word in block]
    return str(block)


def run_shell(commands: str, url: str, folder: Path) -> str:
    script = f'set -eu\nTOPICS={url}\ncurl() {{ command curl -sS --fail-with-body "$@"; echo; }}\n{commands}'
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_five_minutes_run_as_they_stand(tmp_path: Path) -> None:
    code = blocks("python", "topics.open")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Tombstone(gap_from=1, gap_to=2, reason='cap'")
    assert lines[2] == "5"


def test_the_five_minutes_with_curl_run_as_they_stand(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        printed = run_shell(blocks("sh", "curl"), url, tmp_path)
    answers = [json.loads(line) for line in printed.splitlines() if line]
    assert (answers[2]["tombstone"]["gap_from"], answers[2]["tombstone"]["gap_to"]) == (1, 2)
    assert [record["$seq"] for record in answers[2]["records"]] == [3, 4, 5]
    assert answers[3]["caught_up"]
    assert answers[-1]["count"] == 2


def test_the_five_minutes_on_the_command_line_run_as_they_stand(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        printed = run_shell(blocks("sh", "topics queue work"), url, tmp_path)
    assert '{"page": "/buy"}' in printed
    assert 'job 1: {"n": 1}' in printed
    assert 'job 2: {"n": 2}' in printed
    assert '{"page": "/thanks"}' in printed.splitlines()[-1]


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """What `make run` runs, in an empty folder, on a free port."""
    command = [sys.executable, "-m", "topics", "serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert match is not None, first
        yield match[0]
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0


def test_make_run_serves_an_empty_folder_and_ends_cleanly(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        assert json.loads(urllib.request.urlopen(url + "/v0/health").read())["status"] == "ok"
        assert b"<title>topics</title>" in urllib.request.urlopen(url + "/ui").read()
    assert (tmp_path / "data" / "FORMAT").exists()


def test_serving_a_directory_in_use_says_so_without_a_traceback(tmp_path: Path) -> None:
    import topics

    with topics.open(tmp_path / "data"):
        command = [sys.executable, "-m", "topics", "serve", "--port", "0"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "another process has this data directory open" in done.stderr
    assert "Traceback" not in done.stderr
