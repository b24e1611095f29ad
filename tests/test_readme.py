"""The README is run: what it shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_five_minutes_run_as_they_stand(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Tombstone(gap_from=1, gap_to=2, reason='cap'")
    assert lines[2] == "5"


def test_make_run_opens_a_log_in_an_empty_folder_and_shows_a_loss(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "topics"]
    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "lost 1 to 2, reason cap" in done.stdout
    assert (tmp_path / "data" / "FORMAT").exists()


def test_make_run_on_a_directory_in_use_says_so_without_a_traceback(tmp_path: Path) -> None:
    import topics

    with topics.open(tmp_path / "data"):
        done = subprocess.run(
            [sys.executable, "-m", "topics"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    assert done.returncode == 1
    assert "another process has this data directory open" in done.stderr
    assert "Traceback" not in done.stderr
