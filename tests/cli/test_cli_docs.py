"""docs/cli.md is run, as one script: what it shows works as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.http.server import LocalServer
from topics.cli import COMMANDS

PAGE = Path(__file__).parent.parent.parent / "docs" / "cli.md"


def test_the_page_runs_as_it_stands(server: LocalServer, tmp_path: Path) -> None:
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL))
    script = f'set -eu\ntopics() {{ "{sys.executable}" -m topics "$@"; }}\n{commands}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "TOPICS_URL": server.url},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for said in (
        "LOST  seqs 1 to 2: 2 records, cap",
        "numbers: 5000 records written",
        "1 records deleted",
        "orders is deleted",
        "1 acked; 2 ready, 0 in flight",
        'job 2: {"n": 2}',
    ):
        assert said in done.stdout, (said, done.stdout)
    assert "topic 'nothing' does not exist" in done.stderr
    rates = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    assert len(rates) == 4


def test_the_page_knows_every_command() -> None:
    text = PAGE.read_text()
    for name in COMMANDS:
        assert f"topics {name}" in text, name
