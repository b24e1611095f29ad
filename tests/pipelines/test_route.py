"""`route`: SQL between topics, exactly once; a loss in a source is a hole in the destination."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession

from tests.http.server import LocalServer
from tests.pipelines.calm import route
from tests.pipelines.logs import append, datas, put, told
from topics.core.errors import InvalidRequest
from topics.pipelines.pipeline_file import PipelineError, read_text

ROW_WISE = """
[[pipeline]]
name = "even"
destination = "even.out"
checkpoint = "checkpoints/even"
sql = '''
SELECT n * 10 AS ten
FROM (SELECT value.n FROM numbers WHERE value.n % 2 = 0)
'''
[pipeline.sources.numbers]
topic = "numbers"
schema = "n BIGINT"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def run(spark: SparkSession, server: LocalServer, folder: Path, text: str) -> dict[str, Any]:
    path = folder / "pipelines.toml"
    path.write_text(text)
    return dict(route(spark, path, url=server.url, once=True))


def test_rows_are_routed_once_and_a_gap_is_a_hole_of_its_length(
    spark: SparkSession, server: LocalServer, client: httpx.Client, folder: Path
) -> None:
    append(client, "numbers", 10)
    put(client, "numbers", cap_records=6)
    run(spark, server, folder, ROW_WISE)
    assert datas(client, "even.out") == [("hole", 4), {"ten": 60}, {"ten": 80}, {"ten": 100}]
    assert told(client, "even.out")[1][0][2] == "source_trim"
    append(client, "numbers", 4)
    progress = run(spark, server, folder, ROW_WISE)["even"]
    assert datas(client, "even.out")[4:] == [{"ten": 120}, {"ten": 140}]
    assert (progress.records, progress.state, progress.lost) == (4, "done", 0)


STATEFUL = """
[[pipeline]]
name = "per-tag"
destination = "per-tag.out"
checkpoint = "checkpoints/per-tag"
output_mode = "update"
sql = '''
SELECT tag, count(*) AS count, sum(value.n) AS total
FROM tagged GROUP BY tag
'''
[pipeline.sources.tagged]
topic = "tagged"
schema = "n BIGINT"

[[pipeline]]
name = "joined"
destination = "joined.out"
checkpoint = "checkpoints/joined"
sql = '''
SELECT l.value.n AS n, r.tag AS tag FROM tagged l JOIN other r ON l.value.n = r.value.n
AND l.ts BETWEEN r.ts - INTERVAL 1 HOUR AND r.ts + INTERVAL 1 HOUR
'''
[pipeline.sources.tagged]
topic = "tagged"
schema = "n BIGINT"
watermark = "1 hour"
[pipeline.sources.other]
topic = "other"
schema = "n BIGINT"
watermark = "1 hour"

[[pipeline]]
name = "windows"
destination = "windows.out"
checkpoint = "checkpoints/windows"
sql = '''
SELECT window.start AS start, count(*) AS count FROM tagged GROUP BY window(ts, '1 minute')
'''
[pipeline.sources.tagged]
topic = "tagged"
watermark = "1 second"
"""


def test_state_goes_on_over_runs_and_a_gap_behind_it_is_a_hole_of_one(
    spark: SparkSession, server: LocalServer, client: httpx.Client, folder: Path
) -> None:
    append(client, "tagged", 40, tags=2)
    append(client, "other", 40, tags=4)
    put(client, "tagged", cap_records=30)
    run(spark, server, folder, STATEFUL)
    found = datas(client, "per-tag.out")
    assert found[0] == ("hole", 1)
    first = {each["tag"]: (each["count"], each["total"]) for each in found[1:]}
    evens, odds = range(12, 41, 2), range(11, 41, 2)
    assert first == {"t0": (15, sum(evens)), "t1": (15, sum(odds))}
    pairs = datas(client, "joined.out")
    assert pairs[0] == ("hole", 1)
    assert sorted(each["n"] for each in pairs[1:]) == list(range(11, 41))
    # A window is told when it is over; until then its source's loss is all there is to tell.
    assert datas(client, "windows.out") == [("hole", 1)]
    append(client, "tagged", 2, tags=2)
    run(spark, server, folder, STATEFUL)
    later = {each["tag"]: each["count"] for each in datas(client, "per-tag.out")[3:] if isinstance(each, dict)}
    assert later == {"t0": 16, "t1": 16}
    assert [each for each in datas(client, "per-tag.out") if isinstance(each, tuple)] == [("hole", 1)]


def test_a_result_with_data_says_itself_what_its_records_are(
    spark: SparkSession, server: LocalServer, client: httpx.Client, folder: Path
) -> None:
    append(client, "plain", 3, tags=3)
    text = ROW_WISE.replace('"numbers"', '"plain"').replace("even", "own")
    query = "SELECT data, concat('x-', tag) AS tag FROM numbers"
    text = text[: text.index("sql = '''")] + f"sql = '''{query}'''\n" + text[text.index("[pipeline.sources") :]
    run(spark, server, folder, text)
    records = client.post("/v0/topics/own.out/diff", json={"include_tags": True}).json()["records"]
    assert [(each["data"], each["$tag"]) for each in records] == [({"n": n}, f"x-t{n % 3}") for n in (1, 2, 3)]


WRONG: list[tuple[str, str, int, str]] = [
    ("syntax", "[[pipeline]]\nname = \n", 2, "Invalid value"),
    ("nothing", "url = 'http://x'\n", 1, "there is no [[pipeline]]"),
    ("unknown key", ROW_WISE.replace("destination", "dest"), 4, "'dest' is not known here"),
    ("missing", ROW_WISE.replace('destination = "even.out"\n', ""), 2, "a pipeline needs destination"),
    ("type", ROW_WISE.replace('"checkpoints/even"', "3"), 5, "checkpoint must be a string"),
    ("name", ROW_WISE.replace('"even.out"', '"-"'), 4, "destination: a name is"),
    ("mode", ROW_WISE + 'output_mode = "complete"\n', 13, "'output_mode' is not known here"),
    ("trigger", ROW_WISE.replace("sql =", 'trigger = "soon"\nsql ='), 6, "trigger is 'once' or a time"),
    ("source", ROW_WISE.replace('topic = "numbers"\n', ""), 10, "exactly one of topic, topics and prefix"),
    ("watermark", ROW_WISE + 'watermark = "late"\n', 13, "watermark is a time"),
    ("twice", ROW_WISE + ROW_WISE, 15, "has the name 'even' already"),
    ("view", ROW_WISE.replace("sources.numbers", 'sources."a b"'), 10, "a view is named with letters"),
]


@pytest.mark.parametrize(("what", "text", "line", "message"), WRONG, ids=[name for name, *_ in WRONG])
def test_a_wrong_file_is_refused_with_its_line(what: str, text: str, line: int, message: str) -> None:
    with pytest.raises(PipelineError) as refused:
        read_text("p.toml", text)
    assert message in refused.value.message
    assert refused.value.message.startswith("p.toml:")
    assert refused.value.line == line, refused.value.message


def test_wrong_sql_is_refused_with_the_line_of_the_file(
    spark: SparkSession, server: LocalServer, client: httpx.Client, folder: Path
) -> None:
    append(client, "numbers", 1)
    for old, new in (("value.n %", "value.m %"), ("FROM (SELECT", "FORM (SELECT"), ("FROM numbers", "FROM nobody")):
        with pytest.raises(PipelineError) as refused:
            run(spark, server, folder, ROW_WISE.replace(old, new))
        assert refused.value.line == 8, refused.value.message
        assert str(folder) in refused.value.message
    with pytest.raises(PipelineError, match="reads none of its sources"):
        run(spark, server, folder, ROW_WISE.replace("SELECT n * 10 AS ten\n", "SELECT 1 AS one -- ").replace(") ", ""))
    with pytest.raises(InvalidRequest, match="has no url"):
        route(spark, read_text("p.toml", ROW_WISE))


def test_an_aggregate_without_watermark_in_append_mode_is_refused_before_it_runs(
    spark: SparkSession, server: LocalServer, client: httpx.Client, folder: Path
) -> None:
    append(client, "tagged", 1)
    text = STATEFUL[: STATEFUL.index("[[pipeline]]", 20)].replace('output_mode = "update"\n', "")
    with pytest.raises(PipelineError, match=r"pipelines.toml:7: pipeline per-tag: "):
        run(spark, server, folder, text)
