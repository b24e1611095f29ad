"""docs/pipelines.md and the examples are run: what they show works as it stands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.http.server import LocalServer
from tests.pipelines.logs import datas, put
from tests.spark.conftest import need_java
from topics.cli import app
from topics.pipelines.pipeline_file import read_text

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pipelines.md").read_text()

pytestmark = pytest.mark.timeout(900)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def run(command: list[str], folder: Path, **env: str) -> str:
    need_java()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "PATH": path,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            **env,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_page_runs_from_top_to_bottom(server: LocalServer, tmp_path: Path) -> None:
    (commands,) = blocks("sh")
    functions = 'curl() { command curl -sS --fail-with-body "$@"; echo; }\ntopics() { python -m topics "$@"; }\n'
    said = run(["bash", "-c", f"set -eu\nTOPICS={server.url}\n{functions}{commands}"], tmp_path)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    verified = next(line for line in lines if "instances" in line)
    assert verified["ok"]
    assert {name: verified["instances"][0][name] for name in ("archived", "lost", "deleted")} == {
        "archived": 2,
        "lost": 1,
        "deleted": 2,
    }
    tiered = [line for line in lines if line.get("pipeline") == "tier"][-1]
    assert (tiered["state"], tiered["records"], tiered["lost"]) == ("done", 4, 1)
    replayed = [line for line in lines if line.get("pipeline") == "replay"][-1]
    assert (replayed["state"], replayed["records"], replayed["lost"]) == ("done", 2, 1)
    reading, from_python = blocks("python")
    said = run([sys.executable, "-c", reading], tmp_path)
    assert "1 1 lost cap\n2 2 deleted \n3 4 archived \n5 5 deleted" in said
    said = run([sys.executable, "-c", from_python.replace("http://127.0.0.1:4000", server.url)], tmp_path)
    assert said.rstrip().endswith("True"), said


def test_the_pipeline_file_of_the_page_is_a_good_one(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    assert [spec.name for spec in read_text("p.toml", text).pipelines] == ["large-orders", "per-minute"]
    path = tmp_path / "p.toml"
    path.write_text(text)
    checked = CliRunner().invoke(app, ["pipeline", "route", str(path), "--check"])
    assert (checked.exit_code, "2 pipelines" in checked.output) == (0, True)
    path.write_text(text.replace("trigger", "triger"))
    refused = CliRunner().invoke(app, ["pipeline", "route", str(path), "--check"])
    assert refused.exit_code == 2
    assert f"{path}:7: 'triger' is not known here" in refused.output


def test_the_story_is_told_with_one_command(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "story", tmp_path / "story", ignore=shutil.ignore_patterns("work"))
    said = run([sys.executable, str(tmp_path / "story" / "run.py")], tmp_path)
    assert "its tombstone: seqs 1 to 5000 are lost to it (cap)" in said
    assert "20000 orders in" in said
    assert said.rstrip().endswith("every seq once")


def test_the_declarative_project_runs_twice_and_a_full_refresh_appends_everything_again(
    server: LocalServer, client: httpx.Client, tmp_path: Path
) -> None:
    def orders(first: int, count: int) -> None:
        records = [{"data": {"id": n, "country": "de", "amount": n * 10}} for n in range(first, first + count)]
        assert client.post("/v0/topics/orders", json={"records": records}).status_code in (200, 201)

    def sink() -> list[object]:
        """In no order: between the two topics lies a table, which has none."""
        found = [each["id"] if isinstance(each, dict) else each for each in datas(client, "orders.large")]
        return sorted(found, key=str)

    client.delete("/v0/topics/orders")
    client.delete("/v0/topics/orders.large")
    script = [str(ROOT / "examples" / "declarative" / "run.sh")]
    env = {"TOPICS_URL": server.url, "STORAGE": str(tmp_path / "work")}
    orders(1, 6)
    run(script, tmp_path, **env)
    assert sink() == [5, 6]
    orders(7, 2)
    put(client, "orders", cap_records=1)
    run(script, tmp_path, **env)
    assert sink() == [("hole", 1), 5, 6, 8]
    run([*script, "--full-refresh-all"], tmp_path, **env)
    assert sink() == [("hole", 1), ("hole", 7), 5, 6, 8, 8]


def test_commands_say_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(app, ["pipeline", "files", str(tmp_path)])
    assert (missing.exit_code, "has no manifest" in missing.output) == (2, True)
    assert runner.invoke(app, ["pipeline", "--help"]).exit_code == 0


def test_help_does_not_load_spark() -> None:
    loaded = "[name for name in sys.modules if name.split('.')[0] in ('pyspark', 'pyarrow')]"
    code = f"import sys; import topics.cli; assert not {loaded}, {loaded}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
