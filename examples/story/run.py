"""One story, from the first order to the proof: `python examples/story/run.py`. Starts a server and a Spark of its own;
all that it writes is in `examples/story/work`, which it empties first."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
WORK = HERE / "work"
COUNTRIES = ("de", "fr", "us", "jp")
ORDERS = 20_000
CAP = 15_000
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


@contextmanager
def serving() -> Iterator[str]:
    """`topics serve` on a free port; gives its URL."""
    command = [sys.executable, "-m", "topics", "serve", "--port", "0", "--data-dir", str(WORK / "data")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", server.stdout.readline())
        assert found is not None, "the server did not start"
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def order(number: int) -> dict[str, object]:
    data = {"id": number, "country": COUNTRIES[number % 4], "amount": number * 7919 % 1000 + 0.5}
    return {"data": data, "tag": data["country"]}


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def main() -> None:
    from pyspark.sql import SparkSession

    from topics.client.connection import Connection
    from topics.pipelines import archived, files, route, tier, verify

    shutil.rmtree(WORK, ignore_errors=True)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "2")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    lake = str(WORK / "lake")
    with serving() as url:
        log = Connection(url)

        def write(first: int, last: int) -> None:
            for start in range(first, last + 1, 5000):
                records = [order(number) for number in range(start, min(start + 5000, last + 1))]
                log.post("/v0/topics/orders", {"records": records})

        say(f"{ORDERS // 2} orders are written")
        write(1, ORDERS // 2)

        say("routed with SQL: the large ones, and sums by country")
        route(spark, HERE / "pipelines.toml", url=url).wait()
        large = log.get("/v0/topics/orders.large")["count"]
        print(
            f"orders.large has {large} records, orders.per-country {log.get('/v0/topics/orders.per-country')['count']}"
        )

        say("tiered: the lake has them all")
        tier(spark, url, lake, topics=["orders"])

        say(f"more orders come, and the topic keeps {CAP}: a consumer at seq 0 has fallen behind")
        write(ORDERS // 2 + 1, ORDERS)
        log.send("PUT", "/v0/topics/orders", b'{"cap_records": %d}' % CAP, {"content-type": "application/json"}, True)
        answer = log.post("/v0/topics/orders/diff", {"from_seq": 0, "limit": 1})
        gap = answer["tombstone"]
        print(f"its tombstone: seqs {gap['gap_from']} to {gap['gap_to']} are lost to it ({gap['reason']})")

        say("the lake goes on where it was, and answers a query over everything")
        tier(spark, url, lake, topics=["orders"])
        rows = archived(spark, lake, topics=["orders"])
        sums = rows.selectExpr("tag AS country", "CAST(get_json_object(data, '$.amount') AS DOUBLE) AS amount")
        sums.groupBy("country").agg({"*": "count", "amount": "sum"}).orderBy("country").show()
        count = rows.count()
        print(f"{count} orders in {len(files(lake))} files, {gap['missed_estimate']} of them are in the lake alone")
        assert count == ORDERS, count

        say("verify proves it")
        verified = verify(spark, lake, url=url)
        print(verified.instances[0])
        assert verified.ok, verified.problems
        print("every seq once" if verified.ok else verified.problems)
        log.close()
    spark.stop()


if __name__ == "__main__":
    main()
