"""schemathesis over `/openapi.json` of a real server: what the document says comes back, for good data and for bad."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from tests.fuzz.serving import Running
from topics.http.openapi import document

# `positive_data_acceptance` and `negative_data_rejection` stay out: the contract refuses what no schema can say (a cap
# that contradicts another field, a selector with two stars, a transaction that is not there), ignores unknown fields
# and takes `1` for `true` in a query. What is accepted and what is not, test_bodies says exactly.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
_CONFIG = SchemathesisConfig(
    projects=ProjectsConfig(
        default=ProjectConfig(
            generation=GenerationConfig(modes=list(schemathesis.GenerationMode), max_examples=25, deterministic=True)
        )
    )
)
_BOUNDED = settings(
    max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
SCHEMA = schemathesis.openapi.from_dict(msgspec.json.decode(document()), config=_CONFIG)
SEEDED = "seeded"
# What an earlier example may have set so that nothing more fits.
_OPEN: Any = {"discard": "old", "cap_bytes": 0, "cap_records": 0, "ttl_ms": 0}
_numbers = itertools.count()


@schemathesis.serializer("application/vnd.apache.arrow.stream")
def _serialize_arrow(_: schemathesis.SerializationContext, value: Any) -> bytes:
    """What schemathesis makes up for a binary body is no Arrow; streams that nearly are one stand in test_bodies."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("schema")
    with Running(str(directory)) as running:
        yield running


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def test_the_server_serves_the_document_that_is_tested(server: Running) -> None:
    assert requests.get(f"{server.url}/openapi.json", timeout=10).content == document()


@SCHEMA.parametrize()
@_BOUNDED
def test_every_operation_answers_as_documented(
    case: schemathesis.Case[Any], server: Running, session: requests.Session
) -> None:
    _bound_wait(case)
    case.call_and_validate(base_url=server.url, session=session, checks=CHECKS, timeout=20)


@SCHEMA.include(path_regex="{(topic|id)}").parametrize()
@_BOUNDED
def test_every_operation_on_what_exists_answers_as_documented(
    case: schemathesis.Case[Any], server: Running, session: requests.Session
) -> None:
    """The same, where there is a topic with records and a transaction with a part: names at random never hit one."""
    topic = f"{server.url}/v0/topics/{SEEDED}"
    txn = f"{SEEDED}-{next(_numbers)}"
    records: Any = [{"data": n, "tag": f"tag{n}", "node": "n", "meta": {"k": "v"}} for n in range(3)]
    assert session.put(topic, json=_OPEN, timeout=20).status_code in (200, 201)
    assert session.post(topic, json={"records": records}, timeout=20).status_code == 200
    spooled = session.post(topic, params={"txn": txn, "part": "p", "chunk": "0"}, json={"records": records}, timeout=20)
    assert spooled.status_code == 200, spooled.text
    for name in case.path_parameters:
        case.path_parameters[name] = SEEDED if name == "topic" else txn
    _bound_wait(case)
    try:
        case.call_and_validate(base_url=server.url, session=session, checks=CHECKS, timeout=20)
    finally:
        session.post(f"{server.url}/v0/txns/{txn}/abort", timeout=20)


def _bound_wait(case: schemathesis.Case[Any]) -> None:
    """A long poll that is asked to wait does wait; here it need not be long."""
    body: Any = case.body
    if isinstance(body, dict) and isinstance(body.get("wait_ms"), int) and body["wait_ms"] > 20:
        body["wait_ms"] = 20
