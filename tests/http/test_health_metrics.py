"""Section 10: health, readiness, metrics, and a description that is true."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.server import Background, LocalServer, eventually, local_server, write
from topics.core.progress import Progress
from topics.http.routes import ROUTES

JSON = {"accept": "application/json"}


def samples(client: httpx.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every number of the Prometheus text, by name and values of its sorted labels."""
    answer = client.get("/v0/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.mark.parametrize("path", ["/v0/health", "/healthz"])
def test_health(client: httpx.Client, path: str) -> None:
    body = client.get(path).json()
    assert body["status"] == "ok"
    assert isinstance(body["version"], str)
    assert body["version"]
    assert body["uptime_ms"] >= 0


def test_uptime_goes_up(client: httpx.Client) -> None:
    first = client.get("/v0/health").json()["uptime_ms"]
    eventually(lambda: client.get("/v0/health").json()["uptime_ms"] > first, "a later time")


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
def test_ready(client: httpx.Client, topic: str, path: str) -> None:
    before = client.get(path).json()["topics"]
    client.put(f"/v0/topics/{topic}")
    body = client.get(path).json()
    assert (body["status"], body["wal_replay_complete"], body["topics"]) == ("ready", True, before + 1)


def test_metrics_are_prometheus_text(client: httpx.Client) -> None:
    answer = client.get("/v0/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert list(text_string_to_metric_families(answer.text))


def test_metrics_are_json_when_asked(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = client.get("/v0/metrics", headers=JSON)
    assert answer.headers["content-type"] == "application/json"
    metrics = answer.json()["metrics"]
    text = {family.name for family in text_string_to_metric_families(client.get("/v0/metrics").text)}
    assert {name.removesuffix("_total") for name in metrics} == {name.removesuffix("_total") for name in text}
    heads = metrics["topics_topic_head_seq"]["samples"]
    assert {"name": "topics_topic_head_seq", "labels": {"topic": topic}, "value": 1} in heads


def test_every_topic_has_its_watermarks(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 2})
    write(client, topic, 1, 22, 333)
    found = samples(client)
    shown = {
        name: found[f"topics_topic_{name}", (topic,)]
        for name in ("head_seq", "earliest_seq", "evict_floor", "count", "bytes")
    }
    assert shown == {"head_seq": 3, "earliest_seq": 2, "evict_floor": 2, "count": 2, "bytes": 5}


def test_the_newest_word_of_every_pipeline(client: httpx.Client) -> None:
    now = time.time_ns() // 1_000_000
    words = [
        Progress("tier", "orders", "1", now, records=5, lag=9),
        Progress("tier", "orders", "1", now, records=8, records_per_s=2.5, lag=3, lost=2, state="failed"),
        Progress("route", "eu", "2", now - 60_000),
    ]
    junk = [{"pipeline": 5}, None, "x", {"pipeline": "p", "name": "n", "run": "", "ts": "now"}]
    write(client, "pipelines.progress", *junk, *map(msgspec.to_builtins, words), *junk)
    found = samples(client)
    told = {key[0].removeprefix("topics_pipeline_"): found[key] for key in found if key[1] == ("orders", "tier")}
    assert 0 <= told.pop("silent_seconds") < 60
    assert told == {"records": 8, "records_per_second": 2.5, "lag": 3, "lost": 2, "failed": 1, "running": 0}
    assert found["topics_pipeline_running", ("eu", "route")] == 1
    assert found["topics_pipeline_silent_seconds", ("eu", "route")] >= 60
    assert ("topics_pipeline_lag", ("eu", "route")) not in found
    assert not any("p" in key[1] for key in found)
    assert client.delete("/v0/topics/pipelines.progress").status_code == 200
    assert not any(key[0].startswith("topics_pipeline_") for key in samples(client))


def test_topics_are_counted_by_class(client: httpx.Client, topic: str) -> None:
    before = samples(client)
    for name in ("ephemeral", "memory", "disk", "fsync"):
        client.put(f"/v0/topics/{topic}.{name}", json={"durability": name})
    after = samples(client)
    for name in ("ephemeral", "memory", "disk", "fsync"):
        assert after["topics_topics", (name,)] - before["topics_topics", (name,)] == 1


def test_counters_move(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"durability": "fsync", "cap_records": 3})
    before = samples(client)
    write(client, topic, 1, 2, 3, 4)
    client.post(f"/v0/topics/{topic}/diff", json={})
    client.get(f"/v0/topics/{topic}.nobody")
    after = samples(client)

    def moved(name: str, *labels: str) -> float:
        return after[name, labels] - before.get((name, labels), 0)

    assert moved("topics_records_appended_total") == 4
    assert moved("topics_records_read_total") == 3
    assert moved("topics_tombstones_total", "cap") == 1
    assert moved("topics_records") == 3
    assert moved("topics_bytes") == 3
    assert moved("topics_wal_bytes_total") > 0
    assert moved("topics_wal_batches_total") >= 1
    assert moved("topics_wal_fsyncs_total") >= 1
    assert moved("topics_wal_fsync_seconds_count") >= 1
    assert moved("topics_requests_total", "write", "200") == 1
    assert moved("topics_requests_total", "diff", "200") == 1
    assert moved("topics_requests_total", "get_topic", "404") == 1
    assert moved("topics_request_seconds_count", "diff") == 1
    assert moved("topics_request_seconds_bucket", "+Inf", "diff") == 1


def test_evictions_are_counted(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 1})
    before = samples(client)
    write(client, topic, 1, 2, 3)
    after = samples(client)
    [name] = [name for name, labels in after if "evict" in name and not labels and after[name, labels] >= 2]
    assert after[name, ()] - before[name, ()] == 2


def test_a_repeat_is_not_counted_as_records(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, idempotency_key="k")
    before = samples(client)
    write(client, topic, 1, idempotency_key="k")
    after = samples(client)
    assert after["topics_records_appended_total", ()] == before["topics_records_appended_total", ()]


def test_records_of_a_transaction_are_counted(client: httpx.Client, topic: str) -> None:
    before = samples(client)
    client.post(f"/v0/topics/{topic}?txn={topic}&part=p&chunk=0", json={"records": [{"data": 1}, {"data": 2}]})
    client.post(f"/v0/txns/{topic}/commit", json={"parts": [{"part": "p", "records": {topic: 2}}]})
    after = samples(client)
    assert after["topics_records_appended_total", ()] - before["topics_records_appended_total", ()] == 2


def test_reads_that_wait_pressure_and_delay_are_shown(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    call = Background(lambda: client.post(f"/v0/topics/{topic}/diff", json={"wait_ms": 30_000}))
    server.wait_for_readings()
    found = samples(client)
    assert found["topics_waiting_reads", ()] == 1
    assert found["topics_connections", ()] >= 1
    assert found["topics_pressure", ()] >= 0
    assert found["topics_loop_delay_seconds", ()] >= 0
    assert found["topics_read_only", ()] == 0
    write(client, topic, 1)
    call.result()


def test_throttled_requests_are_counted(server: LocalServer, client: httpx.Client, topic: str) -> None:
    before = samples(client)["topics_throttled_total", ()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.app.pressure, "measure", lambda *_: None)
        patch.setattr(server.app.pressure, "level", 3)
        assert client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}]}).status_code == 429
    assert samples(client)["topics_throttled_total", ()] == before + 1


def test_topics_beyond_the_bound_are_said_to_be_missing(tmp_path: Path) -> None:
    with local_server(tmp_path, metrics_topics=2) as server, server.client() as client:
        for name in "abcde":
            client.put(f"/v0/topics/{name}")
        found = samples(client)
        assert {labels for name, labels in found if name == "topics_topic_head_seq"} == {("a",), ("b",)}
        assert found["topics_topics_not_listed", ()] == 3
        assert sum(value for (name, _), value in found.items() if name == "topics_topics") == 5


def test_a_strange_name_does_not_break_the_text(client: httpx.Client) -> None:
    client.put("/v0/topics/a.b_c:d-e")
    assert samples(client)["topics_topic_count", ("a.b_c:d-e",)] == 0


# -- openapi ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    body: dict[str, Any] = answer.json()
    return body


def test_the_description_is_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert document["info"]["title"]
    assert document["info"]["version"]


def test_the_description_has_every_route(document: dict[str, Any]) -> None:
    described = {
        (re.sub(r"\{\w+\}", "*", path), method.upper())
        for path, methods in document["paths"].items()
        for method in methods
        if method != "parameters"
    }
    assert described == {(path, method) for path, methods in ROUTES.items() for method in methods}


def test_operations_have_ids_of_their_own(document: dict[str, Any]) -> None:
    ids = [
        operation["operationId"]
        for methods in document["paths"].values()
        for method, operation in methods.items()
        if method != "parameters"
    ]
    assert len(ids) == len(set(ids))


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                where: Any = document
                for part in node["$ref"].removeprefix("#/").split("/"):
                    where = where[part]
            for each in node.values():
                walk(each)
        elif isinstance(node, list):
            for each in node:
                walk(each)

    walk(document)


def test_every_schema_is_a_schema(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        assert jsonschema_rs.meta.is_valid({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"})


@pytest.mark.parametrize(
    ("method", "path", "name", "body"),
    [
        ("put", "/v0/topics/{topic}", "described", {"ttl_ms": 60_000}),
        ("post", "/v0/topics/{topic}", "described2", {"records": [{"data": 1, "tag": "t", "meta": {"a": "b"}}]}),
        ("get", "/v0/topics/{topic}", "described", None),
        ("get", "/v0/topics", "", None),
        ("post", "/v0/topics/{topic}/diff", "described", {"limit": 5, "match": ["tag", "Eq", "x"], "node": ["a"]}),
        ("post", "/v0/topics/{topic}/delete", "described", {"before_seq": 1}),
        ("get", "/v0/topics/{topic}/deletes", "described", None),
        ("get", "/v0/topics/{topic}/seek", "described?ts=0", None),
        ("get", "/v0/health", "", None),
        ("get", "/v0/ready", "", None),
        ("delete", "/v0/topics/{topic}", "described", None),
        ("get", "/v0/topics/{topic}", "nobody", None),
        ("post", "/v0/topics/{topic}", "wrong", {"records": []}),
    ],
)
def test_answers_are_as_described(
    client: httpx.Client, document: dict[str, Any], method: str, path: str, name: str, body: Any
) -> None:
    name, _, query = name.partition("?")
    answer = client.request(method, path.replace("{topic}", name) + (f"?{query}" if query else ""), json=body)
    operation = document["paths"][path][method]
    schema = operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
    whole = json.loads(json.dumps({**schema, "components": document["components"]}))
    jsonschema_rs.validate(whole, answer.json())
    if body is not None:
        asked = operation["requestBody"]["content"]["application/json"]["schema"]
        jsonschema_rs.validate({**asked, "components": document["components"]}, body)


def test_the_description_names_every_error_of_the_contract(document: dict[str, Any]) -> None:
    described = json.dumps(document["paths"])
    for code in (
        *("invalid_request", "batch_too_large", "record_too_large", "unauthorized", "forbidden", "topic_not_found"),
        *("txn_not_found", "method_not_allowed", "not_acceptable", "topic_exists_incompatible", "topic_not_empty"),
        *("idempotency_conflict", "txn_incomplete", "payload_too_large", "unsupported_media_type", "topic_full"),
        *("throttled", "internal", "not_ready", "shutting_down", "read_only"),
    ):
        assert code in described, code
