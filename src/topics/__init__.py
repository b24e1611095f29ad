"""topics: a durable event log in which no loss is ever silent."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topics.client.aio import AsyncClient
    from topics.client.cursor import Cursor
    from topics.client.errors import NotReady, ServerError, Unreachable
    from topics.client.sync import Client
    from topics.client.worker import Postpone, Worker
    from topics.core.answers import Job, Record
    from topics.core.config import TopicConfig
    from topics.core.errors import TopicsError
    from topics.core.limits import Limits
    from topics.core.tombstone import Tombstone
    from topics.engine.options import Options
    from topics.log import Log
    from topics.log import open_log as open

__all__ = [
    "AsyncClient",
    "Client",
    "Cursor",
    "Job",
    "Limits",
    "Log",
    "NotReady",
    "Options",
    "Postpone",
    "Record",
    "ServerError",
    "Tombstone",
    "TopicConfig",
    "TopicsError",
    "Unreachable",
    "Worker",
    "open",
]

# Where each name lives. Imported when it is asked for: a client has no use for the engine, nor the engine for httpx.
_HOMES = {
    "AsyncClient": "topics.client.aio",
    "Client": "topics.client.sync",
    "Cursor": "topics.client.cursor",
    "Job": "topics.core.answers",
    "Limits": "topics.core.limits",
    "Log": "topics.log",
    "NotReady": "topics.client.errors",
    "Options": "topics.engine.options",
    "Postpone": "topics.client.worker",
    "Record": "topics.core.answers",
    "ServerError": "topics.client.errors",
    "Tombstone": "topics.core.tombstone",
    "TopicConfig": "topics.core.config",
    "TopicsError": "topics.core.errors",
    "Unreachable": "topics.client.errors",
    "Worker": "topics.client.worker",
    "open": "topics.log",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'topics' has no attribute {name!r}")
    value = getattr(import_module(home), "open_log" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
