"""What a pipeline says of itself: pipelines publish it to a topic, and the server shows it from there."""

from __future__ import annotations

from typing import Literal

import msgspec

TOPIC = "pipelines.progress"

State = Literal["running", "done", "failed"]


class Progress(msgspec.Struct):
    """One moment of a pipeline. `records` are those that it has moved since its start (a route: has read), `lag` is how
    many seqs wait, `lost` how many of those that it met are lost."""

    pipeline: str
    name: str
    run: str
    ts: int
    state: State = "running"
    stage: str = ""
    records: int = 0
    records_per_s: float = 0.0
    bytes: int = 0
    lag: int | None = None
    lost: int = 0
    deleted: int = 0
    error: str = ""
