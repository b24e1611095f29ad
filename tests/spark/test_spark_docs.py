"""docs/spark.md is run: what it shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.http.server import LocalServer
from tests.spark.conftest import need_java

PAGE = Path(__file__).parent.parent.parent / "docs" / "spark.md"


def test_the_example_runs_as_it_stands(server: LocalServer, tmp_path: Path) -> None:
    need_java()
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = code.replace("http://127.0.0.1:4000", server.url)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("1000"), done.stdout
