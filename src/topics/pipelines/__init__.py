"""Pipelines over topics, on Spark: `tier`, `route`, `replay`, `verify`, `compact`; and how others read the lake.

`files` and `ledger` need neither Spark nor a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topics.pipelines.compacting import compact
    from topics.pipelines.reading import archived, files, ledger
    from topics.pipelines.replaying import replay, replay_into
    from topics.pipelines.routing import route
    from topics.pipelines.tiering import tier
    from topics.pipelines.verifying import verify

__all__ = ["archived", "compact", "files", "ledger", "replay", "replay_into", "route", "tier", "verify"]

_WHERE = {
    "archived": "reading",
    "compact": "compacting",
    "files": "reading",
    "ledger": "reading",
    "replay": "replaying",
    "replay_into": "replaying",
    "route": "routing",
    "tier": "tiering",
    "verify": "verifying",
}


def __getattr__(name: str) -> object:
    """Only what is used is loaded: PySpark takes its time."""
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
