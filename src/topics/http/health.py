"""Health, readiness, metrics, and the description of the whole surface."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version

from topics.http.app import App
from topics.http.exchange import Exchange
from topics.http.metrics import Scrape

try:
    VERSION = version("topics")
except PackageNotFoundError:
    VERSION = "unknown"

_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


def health(app: App, exchange: Exchange, _: str) -> None:
    uptime = int((time.monotonic() - app.started) * 1000)
    exchange.answer({"status": "ok", "version": VERSION, "uptime_ms": uptime})


def ready(app: App, exchange: Exchange, _: str) -> None:
    read_only = app.engine.committer.read_only
    fields = {
        "status": "ready" if read_only is None else "read_only",
        "wal_replay_complete": True,
        "topics": len(app.engine.state.topics),
    }
    if read_only is not None:
        fields["reason"] = read_only.message
    exchange.answer(fields)


def metrics(app: App, exchange: Exchange, _: str) -> None:
    accept = exchange.headers.get(b"accept", b"")
    assert exchange.key is not None
    scrape = Scrape(app, exchange.key)
    if b"application/json" in accept:
        exchange.answer({"metrics": scrape.json()})
    else:
        exchange.send(200, scrape.text(), _TEXT)


def openapi(app: App, exchange: Exchange, _: str) -> None:
    from topics.http.openapi import document

    exchange.send(200, document())
