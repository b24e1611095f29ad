"""The README is run: what it shows works as it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_five_minutes_run_as_they_stand(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Tombstone(gap_from=1, gap_to=2, reason='cap'")
    assert lines[2] == "5"


def test_the_five_minutes_with_curl_run_as_they_stand(tmp_path: Path) -> None:
    (commands,) = [block for block in re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL) if "curl" in block]
    with serving(tmp_path) as url:
        script = f'set -eu\nTOPICS={url}\ncurl() {{ command curl -sS --fail-with-body "$@"; echo; }}\n{commands}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    answers = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert (answers[2]["tombstone"]["gap_from"], answers[2]["tombstone"]["gap_to"]) == (1, 2)
    assert [record["$seq"] for record in answers[2]["records"]] == [3, 4, 5]
    assert answers[3]["caught_up"]
    assert answers[-1]["count"] == 2


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
    assert (tmp_path / "data" / "FORMAT").exists()


def test_serving_a_directory_in_use_says_so_without_a_traceback(tmp_path: Path) -> None:
    import topics

    with topics.open(tmp_path / "data"):
        command = [sys.executable, "-m", "topics", "serve", "--port", "0"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "another process has this data directory open" in done.stderr
    assert "Traceback" not in done.stderr
