"""What the server counts, as Prometheus text or JSON. Counting is a list increment; the rest happens at the scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from topics.core import progress
from topics.core.errors import TopicsError
from topics.core.progress import Progress
from topics.engine.read import Query
from topics.http.auth import Key

if TYPE_CHECKING:
    from topics.http.app import App

_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    __slots__ = ("buckets", "sum")

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(_BOUNDS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        total = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.buckets, strict=True):
            total += count
            pairs.append((bound, total))
        return pairs


class Metrics:
    """The numbers that one server counts."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.latency: dict[str, Histogram] = {}
        self.syncs = Histogram()
        self.records_appended = 0
        self.records_read = 0
        self.tombstones: dict[str, int] = {}
        self.throttled = 0
        self.loop_delay = 0.0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        key = (route, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        histogram = self.latency.get(route)
        if histogram is None:
            histogram = self.latency[route] = Histogram()
        histogram.observe(seconds)

    def count_tombstone(self, reason: str) -> None:
        self.tombstones[reason] = self.tombstones.get(reason, 0) + 1


class Scrape:
    """One look at everything, as far as a key may see it; a Prometheus collector."""

    def __init__(self, app: App, key: Key) -> None:
        self._app = app
        self._key = key

    def text(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for metric in self.collect():
            samples = [{"name": s.name, "labels": s.labels, "value": s.value} for s in metric.samples]
            answer[metric.name] = {"type": metric.type, "help": metric.documentation, "samples": samples}
        return answer

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        yield from self._engine()
        yield from self._topics()
        yield from self._pipelines()

    def _server(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("topics_requests", "Requests by route and status.", labels=["route", "status"])
        for (route, status), count in self._app.metrics.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        latency = HistogramMetricFamily("topics_request_seconds", "Time to answer, by route.", labels=["route"])
        for route, histogram in self._app.metrics.latency.items():
            latency.add_metric([route], histogram.cumulative(), histogram.sum)
        yield latency
        yield GaugeMetricFamily("topics_connections", "Open connections.", len(self._app.connections))
        yield GaugeMetricFamily("topics_streams", "Open streams.", self._app.watches.open_streams)
        yield GaugeMetricFamily("topics_watch_sessions", "Watch sessions.", len(self._app.watches))
        yield GaugeMetricFamily("topics_waiting_reads", "Long polls that wait.", len(self._app.readings))
        yield GaugeMetricFamily(
            "topics_loop_delay_seconds", "How late the event loop is.", self._app.metrics.loop_delay
        )
        yield GaugeMetricFamily("topics_pressure", "0 none, 1 coalesce, 2 pause, 3 throttle.", self._app.pressure.level)
        yield CounterMetricFamily("topics_throttled", "Requests answered with 429.", self._app.metrics.throttled)

    def _engine(self) -> Iterator[Metric]:
        engine = self._app.engine
        committer = engine.committer
        syncs = self._app.metrics.syncs
        yield CounterMetricFamily("topics_records_appended", "Records written.", self._app.metrics.records_appended)
        yield CounterMetricFamily("topics_records_read", "Records delivered by diff.", self._app.metrics.records_read)
        tombstones = CounterMetricFamily("topics_tombstones", "Losses told to readers, by reason.", labels=["reason"])
        for reason, count in self._app.metrics.tombstones.items():
            tombstones.add_metric([reason], count)
        yield tombstones
        yield CounterMetricFamily("topics_wal_bytes", "Bytes written to the WAL.", committer.wal.bytes_written)
        yield CounterMetricFamily("topics_wal_batches", "Writes of the WAL: one per turn.", committer.writes)
        yield CounterMetricFamily("topics_wal_fsyncs", "Syncs of the WAL.", committer.syncs)
        yield HistogramMetricFamily("topics_wal_fsync_seconds", "Time of a WAL sync.", syncs.cumulative(), syncs.sum)
        yield CounterMetricFamily("topics_checkpoints", "Checkpoints taken.", engine.checkpointer.completed)
        yield GaugeMetricFamily(
            "topics_read_only", "1 when the log takes no writes.", int(committer.read_only is not None)
        )

    def _topics(self) -> Iterator[Metric]:
        state = self._app.engine.state
        classes = GaugeMetricFamily("topics_topics", "Topics by durability class.", labels=["durability"])
        counts = dict.fromkeys(("ephemeral", "memory", "disk", "fsync"), 0)
        records = evicted = 0
        for topic in state.topics.values():
            counts[topic.config.durability] += 1
            records += topic.count
            evicted += topic.evict_floor - topic.config.seq_base
        for name, count in counts.items():
            classes.add_metric([name], count)
        yield classes
        yield GaugeMetricFamily("topics_records", "Live records.", records)
        yield GaugeMetricFamily("topics_bytes", "Bytes of data + meta of live records.", state.store.live_bytes)
        yield GaugeMetricFamily("topics_evicted_seqs", "Seqs below the evict floors.", evicted)
        most = self._app.settings.metrics_topics
        names = [name for name in state.names if self._key.may_see(name)]
        shown = [state.by_name[name] for name in names[:most]]
        hidden = len(names) - len(shown)
        yield GaugeMetricFamily("topics_topics_not_listed", "Topics beyond TOPICS_METRICS_TOPICS.", hidden)
        for field, help_text in _PER_TOPIC:
            family = GaugeMetricFamily(f"topics_topic_{field}", help_text, labels=["topic"])
            for topic in shown:
                family.add_metric([topic.name], getattr(topic, field))
            yield family
        lag = GaugeMetricFamily("topics_router_lag", "Seqs that a router has before it.", labels=["router"])
        forwarded = CounterMetricFamily("topics_router_forwarded", "Records copied by a router.", labels=["router"])
        routers = [self._app.engine.routers.view(router) for router in self._app.engine.routers.named()[:most]]
        for view in routers:
            if all(self._key.may_see(end) for end in (view.config.source, view.config.dest) if isinstance(end, str)):
                lag.add_metric([view.router], view.lag)
                forwarded.add_metric([view.router], view.forwarded_total)
        yield lag
        yield forwarded
        queues = {topic.name: self._app.engine.jobs.state(topic) for topic in shown if topic.queue is not None}
        for field, help_text in _PER_QUEUE:
            family = GaugeMetricFamily(f"topics_queue_{field}", help_text, labels=["topic"])
            for name, queue in queues.items():
                family.add_metric([name], getattr(queue, field))
            yield family

    def _pipelines(self) -> Iterator[Metric]:
        """What pipelines say of themselves, the newest word of each."""
        words = self._words()
        now = self._app.engine.time.now()
        for field, help_text, value_of in _PER_PIPELINE:
            family = GaugeMetricFamily(f"topics_pipeline_{field}", help_text, labels=["pipeline", "name"])
            for word in words:
                value = value_of(word, now)
                if value is not None:
                    family.add_metric([word.pipeline, word.name], value)
            yield family

    def _words(self) -> list[Progress]:
        topic = self._app.engine.state.by_name.get(progress.TOPIC)
        if topic is None or not self._key.may_see(topic.name):
            return []
        query = Query(from_seq=max(topic.head_seq - _WORDS, 0), limit=_WORDS, max_bytes=_WORDS_BYTES)
        newest: dict[tuple[str, str], Progress] = {}
        # It is a topic like any other: anybody may write anything into it, and a disk may not answer.
        with suppress(TopicsError):
            for record in self._app.engine.diff(topic.name, query, touch=False).records:
                with suppress(msgspec.ValidationError):
                    word = msgspec.convert(record["data"], Progress)
                    newest[word.pipeline, word.name] = word
        return list(newest.values())[-self._app.settings.metrics_topics :]


# How far back the newest words of pipelines are looked for.
_WORDS = 500
_WORDS_BYTES = 1 << 20

_PER_PIPELINE: tuple[tuple[str, str, Callable[[Progress, int], float | None]], ...] = (
    ("records", "Records that a pipeline's run has moved; a route: has read.", lambda word, _: word.records),
    ("records_per_second", "How fast, since the run began.", lambda word, _: word.records_per_s),
    ("lag", "Seqs that a pipeline has before it.", lambda word, _: word.lag),
    ("lost", "Records that its run has met as lost.", lambda word, _: word.lost),
    ("failed", "1 when its run has failed.", lambda word, _: int(word.state == "failed")),
    ("running", "1 while its run has not said that it is over.", lambda word, _: int(word.state == "running")),
    ("silent_seconds", "Since it was last heard of.", lambda word, now: max(now - word.ts, 0) / 1000),
)

_PER_QUEUE = (
    ("ready", "Jobs that a claim would get."),
    ("in_flight", "Jobs that somebody holds."),
    ("delayed", "Jobs that were given back for later."),
    ("blocked", "Jobs that are set aside."),
    ("dead_lettered", "Jobs that were delivered too often, so far."),
    ("lost", "Jobs that a cap, a TTL or a crash took, so far."),
    ("ack_holes", "Runs of jobs that are not done below the highest that is."),
)
_PER_TOPIC = (
    ("head_seq", "Highest assigned seq."),
    ("earliest_seq", "First live seq."),
    ("evict_floor", "Below it live records were lost."),
    ("count", "Live records."),
    ("bytes", "Bytes of live records."),
)
