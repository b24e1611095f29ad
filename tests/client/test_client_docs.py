"""docs/client.md is run, as one program: what it shows works as it stands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.http.server import DEADLINE, LocalServer
from topics.client.sync import Client

PAGE = Path(__file__).parent.parent.parent / "docs" / "client.md"


def test_the_page_runs_as_it_stands(server: LocalServer, client: Client) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    program = code.replace("http://127.0.0.1:4000", server.url)
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        # It ends with a worker, and that with a signal.
        deadline = time.monotonic() + 200
        while process.poll() is None and not any(
            [state.head_seq == 20 and not state.count for state in client.topics("jobs")]
        ):
            assert time.monotonic() < deadline, "the jobs were never done"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    # What a comment says is what is printed.
    for said in (
        "1 5",
        "lost 1 to 2 cap",
        "True",
        "['orders', 'stock']",
        "5000",
        "4995",
        "4996",
        "topic_full",
        "hello",
    ):
        assert f"{said}\n" in out, (said, out)
    assert "topic 'nothing' does not exist" in out
    assert out.count("job ") == 20
