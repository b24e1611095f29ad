"""The pages in docs/ are run: what they show works as it stands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.test_readme import serving

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["live.md", "page.md", "queues.md", "routers.md"])
def test_the_commands_of_a_page_run_as_they_stand(page: str, tmp_path: Path) -> None:
    (commands,) = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    with serving(tmp_path) as url:
        script = f'set -eu\nTOPICS={url}\ncurl() {{ command curl -sS --fail-with-body "$@"; echo; }}\n{commands}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    expected = {
        "live.md": ["event: tombstone", '"gap_to":1', 'event: record\ndata: {"topic":"news"', "event: caught-up"],
        "page.md": ['"kind":"evicted","reason":"cap"', '"kind":"live"', '"complete":true', "<title>topics</title>"],
        "queues.md": ['"acked":1', '"nacked":1', '"deliveries":2', '"moved":1', '"dead_lettered":1'],
        "routers.md": ['"forwarded_total":2', '"$tag":"large-eu"', "from the west", '"deleted":true'],
    }
    for text in expected[page]:
        assert text in done.stdout, done.stdout
