"""`topics pipeline …`: tier, route, replay, verify, compact, each on a Spark of its own; and what a lake is made of.

Spark is loaded when a command needs it, and not before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import typer

from topics.core.errors import TopicsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from topics.pipelines.compacting import Compacted
    from topics.pipelines.progress import Show
    from topics.pipelines.verifying import Verified

app = typer.Typer(name="pipeline", help="Move and compute over topics, on Spark.", no_args_is_help=True)

Root = Annotated[str, typer.Argument(help="The lake: a folder, or any path that Spark's Hadoop can write.")]
Url = Annotated[str, typer.Option("--url", envvar="TOPICS_URL", help="The server.")]
Key = Annotated[str | None, typer.Option("--key", envvar="TOPICS_KEY", help="A key for it.", show_default=False)]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="A topic; may be repeated.")]
AsJson = Annotated[bool, typer.Option("--json", help="Lines of JSON, on a terminal too.")]
Master = Annotated[
    str | None, typer.Option("--master", help="Spark's master; by default what spark-submit or its settings say.")
]
Conf = Annotated[list[str] | None, typer.Option("--conf", help="A setting of Spark, NAME=VALUE; may be repeated.")]
URL = "http://127.0.0.1:4000"
SourceName = Literal["lake", "log", "both"]
# How long what runs has to come to its end.
_STOP_SECONDS = 30

T = TypeVar("T")


@contextmanager
def _spark(name: str, master: str | None, conf: list[str] | None) -> Iterator[SparkSession]:
    """A Spark that is stopped at the end. Its Python processes are of this environment, which has topics."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        _stop("pipelines need Spark: pip install 'topics[spark]', and Java 17 or later")
    builder = SparkSession.builder.appName(f"topics {name}").config("spark.ui.showConsoleProgress", "false")
    # Under spark-submit its own settings say where the work is done.
    if master is not None or "PYSPARK_GATEWAY_PORT" not in os.environ:
        builder = builder.master(master or "local[*]")
    builder = builder.config("spark.ui.enabled", "false").config("spark.sql.session.timeZone", "UTC")
    for setting in conf or []:
        option, equals, value = setting.partition("=")
        if not equals:
            _stop(f"--conf takes NAME=VALUE, got {setting!r}")
        builder = builder.config(option, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()


def _stop(message: str, code: int = 2) -> NoReturn:
    print(f"topics: {message}", file=sys.stderr)
    raise typer.Exit(code)


class _Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM."""

    def __init__(self, number: int) -> None:
        self.number = number


# How to bring to an end what runs: the last one knows best.
_Ends = list[Callable[[], object]]


def _run(
    name: str, as_json: bool, master: str | None, conf: list[str] | None, work: Callable[[SparkSession, Show, _Ends], T]
) -> T:
    """Does `work` with a Spark and somewhere to show its progress. An error is one line, and exit code 2.

    On a thread of its own: a signal in the middle of a call to Spark's JVM would leave neither in order. Here it stops
    what runs in Spark, and the work comes to its end by that."""
    from topics.pipelines.progress import cause_of, showing

    show = showing(as_json)
    outcome: Future[T] = Future()
    ends = _Ends()

    def run() -> None:
        try:
            with _spark(name, master, conf) as spark:
                ends.append(partial(_end, spark))
                result = work(spark, show, ends)
            outcome.set_result(result)
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name=f"topics-{name}", daemon=True)
    try:
        with _signals():
            thread.start()
            try:
                return outcome.result()
            except _Stopped as stopped:
                if ends:
                    _end_with(ends[-1], thread)
                raise typer.Exit(128 + stopped.number) from None
    except (TopicsError, OSError) as error:
        show.close()
        _stop(str(error))
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("pyspark", "py4j"):
            raise
        show.close()
        _stop(cause_of(error))
    finally:
        show.close()


@contextmanager
def _signals() -> Iterator[None]:
    """The first signal raises; another one is as rough as it always is."""

    def stop(number: int, _: object) -> None:
        for each, before in olds.items():
            signal.signal(each, before)
        raise _Stopped(number)

    olds = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, before in olds.items():
            signal.signal(each, before)


def _end_with(end: Callable[[], object], thread: threading.Thread) -> None:
    from topics.pipelines.progress import cause_of

    try:
        end()
    except Exception as error:
        print(f"topics: could not be stopped in order: {cause_of(error)}", file=sys.stderr)
    thread.join(_STOP_SECONDS)
    if thread.is_alive():
        print(f"topics: still busy after {_STOP_SECONDS} s; what is not committed is run again", file=sys.stderr)


def _end(spark: SparkSession) -> None:
    """Streams come to their end when they are stopped; what is not a stream is cancelled."""
    for query in spark.streams.active:
        query.stop()
    spark.sparkContext.cancelAllJobs()


def _print(result: Any) -> None:
    print(msgspec.json.encode(result).decode(), flush=True)


@app.command(help="Bring topics into a lake of Parquet, with a ledger of every seq; exactly once.")
def tier(
    root: Root,
    topics: Topics = None,
    prefix: Annotated[str | None, typer.Option("--prefix", help="All topics that begin so, new ones too.")] = None,
    url: Url = URL,
    key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="What is there now; then end.")] = False,
    every: Annotated[str, typer.Option("--every", help="How often, without --once.")] = "10 seconds",
    trim: Annotated[bool, typer.Option("--trim", help="Delete from the log what is in the lake.")] = False,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", help="By default in the lake.")] = None,
    max_records: Annotated[int, typer.Option("--max-records", min=1, help="As many a batch.")] = 20_000_000,
    file_mib: Annotated[int, typer.Option("--file-mib", min=1, help="How large a file may become.")] = 128,
    small_files: Annotated[
        int, typer.Option("--small-files", min=1, help="More than so many small files of a topic are merged.")
    ] = 32,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    from topics.pipelines.pipeline_file import is_interval
    from topics.pipelines.tiering import choose
    from topics.pipelines.tiering import tier as run

    if not is_interval(every):
        _stop(f"--every is a time as in '10 seconds', got {every!r}")
    try:
        choose(tuple(topics or ()), prefix)
    except TopicsError as error:
        _stop(f"{error} (--topic, --prefix)")

    def work(spark: SparkSession, show: Show, ends: _Ends) -> None:
        running = run(
            spark,
            url,
            root,
            topics=topics or (),
            prefix=prefix,
            key=key,
            once=once,
            every=every,
            trim=trim,
            checkpoint=checkpoint,
            max_records=max_records,
            file_bytes=file_mib << 20,
            small_files=small_files,
            show=show,
        )
        if not once:
            ends.append(running.stop)
            running.wait()

    _run("tier", as_json, master, conf, work)


@app.command(help="Run the SQL pipelines of a file between topics; exactly once.")
def route(
    file: Annotated[Path, typer.Argument(help="Pipelines in TOML; docs/pipelines.md says how.", dir_okay=False)],
    url: Annotated[str | None, typer.Option("--url", envvar="TOPICS_URL", help="Instead of the file's.")] = None,
    key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="What is there now; then end.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only read and check the file.")] = False,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    from topics.pipelines.pipeline_file import read_file

    try:
        pipelines = read_file(file)
    except (TopicsError, OSError) as error:
        _stop(str(error))
    if check:
        print(f"{file}: {len(pipelines.pipelines)} pipelines")
        return

    def work(spark: SparkSession, show: Show, ends: _Ends) -> None:
        from topics.pipelines.routing import route as run

        running = run(spark, pipelines, url=url, key=key, once=once, show=show)
        ends.append(running.stop)
        running.wait()

    _run("route", as_json, master, conf, work)


@app.command(help="Write the past of a topic into another one, from lake and log; exactly once, and resumable.")
def replay(
    topic: Annotated[str, typer.Argument(help="Whose past.")],
    to: Annotated[str, typer.Argument(help="The topic that gets it.")],
    root: Annotated[str | None, typer.Option("--lake", help="The lake.")] = None,
    url: Url = URL,
    key: Key = None,
    source: Annotated[SourceName, typer.Option("--from", help="Where the past is read.")] = "both",
    epoch: Annotated[int | None, typer.Option("--epoch", help="An instance; by default the newest.")] = None,
    first: Annotated[int | None, typer.Option("--first", help="The first seq.")] = None,
    last: Annotated[int | None, typer.Option("--last", help="The last seq.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Milliseconds or ISO 8601.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="The same; exclusive.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What a later call goes on with.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="Where that is kept; by default in the lake.")] = None,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    from topics.pipelines.replaying import replay_into

    def work(spark: SparkSession, show: Show, ends: _Ends) -> None:
        replay_into(
            spark,
            topic,
            to,
            url=url,
            root=root,
            key=key,
            source=source,
            epoch=epoch,
            first=first,
            last=last,
            since=since,
            until=until,
            name=name,
            state=state,
            show=show,
        )

    _run("replay", as_json, master, conf, work)


@app.command(help="Prove that lake, ledger and log have every seq once; exit code 1 when not.")
def verify(
    root: Root,
    topics: Topics = None,
    url: Annotated[
        str | None, typer.Option("--url", envvar="TOPICS_URL", help="The log; without: the lake alone.")
    ] = None,
    key: Key = None,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    from topics.pipelines.verifying import verify as run

    def work(spark: SparkSession, show: Show, ends: _Ends) -> Verified:
        return run(spark, root, url=url, key=key, topics=topics or (), show=show)

    verified = _run("verify", as_json, master, conf, work)
    if as_json or not sys.stdout.isatty():
        _print(verified)
    else:
        for problem in verified.problems:
            whose = f"topic {problem.topic} (epoch {problem.epoch}), seqs {problem.first} to {problem.last}"
            print(f"{whose}: {problem.what}")
        if verified.more_problems:
            print(f"and {verified.more_problems} more")
        for each in verified.instances:
            print(
                f"{each.topic} (epoch {each.epoch}): {each.archived} archived, {each.lost} lost, "
                f"{each.deleted} deleted; in the log {each.waiting} waiting, {each.lost_in_log} lost, "
                f"{each.deleted_in_log} deleted"
            )
        state = "every seq once" if verified.ok else "not every seq is accounted for"
        print(f"version {verified.version}, {verified.files} files, {verified.rows} rows: {state}")
    raise typer.Exit(0 if verified.ok else 1)


@app.command(help="Merge small files, erase what the log has erased, and remove what nobody reads.")
def compact(
    root: Root,
    topics: Topics = None,
    url: Annotated[
        str | None, typer.Option("--url", envvar="TOPICS_URL", help="The log whose erasures are followed.")
    ] = None,
    key: Key = None,
    file_mib: Annotated[int, typer.Option("--file-mib", min=1, help="How large a file may become.")] = 128,
    vacuum: Annotated[bool, typer.Option("--vacuum", help="Remove old files.")] = False,
    grace_ms: Annotated[int, typer.Option("--grace-ms", min=0, help="Older than this.")] = 3_600_000,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    from topics.pipelines.compacting import compact as run

    def work(spark: SparkSession, show: Show, ends: _Ends) -> Compacted:
        return run(
            spark,
            root,
            url=url,
            key=key,
            topics=topics or (),
            file_bytes=file_mib << 20,
            vacuum=vacuum,
            grace_ms=grace_ms,
            show=show,
        )

    result = _run("compact", as_json, master, conf, work)
    _print(result)
    raise typer.Exit(1 if result.problems else 0)


@app.command(help="List the files that a lake is made of, for readers that are not Spark.")
def files(
    root: Root,
    topics: Topics = None,
    as_json: Annotated[bool, typer.Option("--json", help="All that the manifest says, one object a line.")] = False,
) -> None:
    from topics.pipelines import files as listed

    try:
        for file in listed(root):
            if not topics or file.topic in topics:
                _print(file) if as_json else print(file.path)
    except (TopicsError, OSError) as error:
        _stop(str(error))
