"""The engine's own dials: how much it keeps in memory, how often it syncs and checkpoints."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    # A checkpoint is due when the WAL has grown by this much: the bound of start-up time.
    checkpoint_bytes: int = 64 << 20
    # Sealed chunks that are kept in memory.
    cache_bytes: int = 64 << 20
    # How long written bytes may stay unsynced, in milliseconds: half of what class `disk` promises.
    background_sync_ms: int = 50
    # A segment file is rewritten when less than this part of it lives.
    rewrite_below: float = 0.5
    # Unreachable bytes that make a checkpoint worthwhile by themselves.
    reclaim_bytes: int = 64 << 20
