"""`format("topics")` is found without registration: in a plain session, by `spark-submit`, through Spark Connect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyspark
import pytest
from pyspark.sql import SparkSession

from tests.http.server import LocalServer, diff, write
from topics.spark import register

# Copies a topic as a batch and as a stream, and reads it back.
SCRIPT = """
import sys
from pyspark.sql import SparkSession

url, topic, checkpoint, *remote = sys.argv[1:]
builder = SparkSession.builder.config("spark.ui.enabled", "false")
spark = (builder.remote(remote[0]) if remote else builder).getOrCreate()
rows = spark.read.format("topics").options(url=url, topic=topic).load()
rows.select("data").write.format("topics").mode("append").options(url=url, topic=topic + ".batch").save()
stream = spark.readStream.format("topics").options(url=url, topic=topic).load()
query = (
    stream.writeStream.format("topics")
    .options(url=url, topic=topic + ".stream", checkpointLocation=checkpoint)
    .trigger(availableNow=True)
    .start()
)
assert query.awaitTermination(120)
try:
    spark.read.format("topics").options(url=url, topic="missing").load().collect()
except Exception as error:
    print("refused:", "there is no topic 'missing'" in str(error))
print("kind:", type(spark).__module__, "rows:", rows.count())
spark.stop()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def run(command: list[str], **env: str) -> str:
    home = str(Path(pyspark.__file__).parent)
    settings = {"SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **env}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def copies(client: httpx.Client, topic: str) -> Iterator[list[object]]:
    for name in (f"{topic}.batch", f"{topic}.stream"):
        yield [record["data"] for record in diff(client, name)["records"]]


def test_a_plain_session_finds_the_format(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1, 2)
    assert spark.newSession().read.format("topics").options(url=server.url, topic=topic).load().count() == 2


def test_sql_finds_the_format(spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2)
    spark.sql(f"CREATE TEMPORARY VIEW found USING topics OPTIONS (url '{server.url}', topic '{topic}')")
    try:
        assert spark.sql("SELECT max(seq) AS newest FROM found").collect()[0].newest == 2
    finally:
        spark.catalog.dropTempView("found")


def test_a_session_may_be_told_of_the_format(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1, 2)
    own = spark.newSession()
    register(own)
    assert own.read.format("topics").options(url=server.url, topic=topic).load().count() == 2


def test_a_missing_extra_hides_no_other_format(tmp_path: Path) -> None:
    """Spark imports every `pyspark_*`; one that fails would hide all of them."""
    (tmp_path / "pyarrow.py").write_text("raise ImportError('no pyarrow here')")
    code = "import pyspark_topics; print(hasattr(pyspark_topics, 'DefaultSource'))"
    assert run([sys.executable, "-c", code], PYTHONPATH=str(tmp_path)).strip() == "False"


def test_spark_submit_finds_the_format(
    server: LocalServer, client: httpx.Client, topic: str, script: Path, tmp_path: Path
) -> None:
    write(client, topic, 1, 2, 3)
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    out = run([submit, "--master", "local[2]", str(script), server.url, topic, str(tmp_path / "checkpoint")])
    assert "refused: True" in out
    assert "kind: pyspark.sql.session rows: 3" in out
    assert list(copies(client, topic)) == [[1, 2, 3], [1, 2, 3]]


def test_spark_connect_finds_the_format(
    server: LocalServer, client: httpx.Client, topic: str, script: Path, tmp_path: Path
) -> None:
    write(client, topic, 1, 2, 3)
    out = run([sys.executable, str(script), server.url, topic, str(tmp_path / "checkpoint"), "local[2]"])
    assert "refused: True" in out
    assert "kind: pyspark.sql.connect.session rows: 3" in out
    assert list(copies(client, topic)) == [[1, 2, 3], [1, 2, 3]]
