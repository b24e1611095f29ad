"""Filters that Spark offers before a batch read: with the option `pushFilters`, those on `topic`, `seq`, `ts` and `tag`
are carried out here. It is not the default, because Spark 4.3 keeps the narrowed reader with what `load()` returned:
any other use of the same DataFrame would read as narrowly, and miss rows.

Each is carried out exactly and by nobody else, so that a tombstone, which has no tag, passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

_MICROSECOND = timedelta(microseconds=1)
_END_OF_TIME = datetime.max.replace(tzinfo=UTC)
# These are never null in a record, and a tombstone has them too (or must pass).
_NEVER_NULL = ("topic", "seq")


class Wanted(msgspec.Struct):
    """What the filters leave: seqs from `first` to `last`, times from `since` up to but not `until`."""

    topics: frozenset[str] | None = None
    first: int = 0
    last: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    tag: str | tuple[str, ...] | None = None

    def narrow(self, filters: Iterable[Filter]) -> Iterator[Filter]:
        """Takes in what it can; gives back what Spark must do itself."""
        # Spark says first that a column is not null: that goes without saying where a value was asked for.
        for each in sorted(filters, key=lambda each: isinstance(each, IsNotNull)):
            if not self._take(each):
                yield each

    def _take(self, each: Filter) -> bool:
        match each:
            case EqualTo(("topic",), str(name)):
                self._only({name})
            case In(("topic",), names):
                self._only(names)
            case GreaterThan(("seq",), int(seq)):
                self.first = max(self.first, seq + 1)
            case GreaterThanOrEqual(("seq",), int(seq)):
                self.first = max(self.first, seq)
            case LessThan(("seq",), int(seq)):
                self._up_to(seq - 1)
            case LessThanOrEqual(("seq",), int(seq)):
                self._up_to(seq)
            case EqualTo(("seq",), int(seq)):
                self.first = max(self.first, seq)
                self._up_to(seq)
            case GreaterThanOrEqual(("ts",), datetime() as moment):
                self._since(_utc(moment))
            case LessThanOrEqual(("ts",), datetime() as moment) if _utc(moment) == _END_OF_TIME:
                pass
            case GreaterThan(("ts",), datetime() as moment) if _utc(moment) < _END_OF_TIME:
                self._since(_utc(moment) + _MICROSECOND)
            case LessThan(("ts",), datetime() as moment):
                self._until(_utc(moment))
            case LessThanOrEqual(("ts",), datetime() as moment):
                self._until(_utc(moment) + _MICROSECOND)
            case EqualTo(("tag",), str(tag)) if self.tag is None:
                self.tag = tag
            case StringStartsWith(("tag",), str(prefix)) if self.tag is None and "*" not in prefix:
                self.tag = ("tag", "Glob", prefix + "*")
            case IsNotNull((name,)) if name in _NEVER_NULL:
                pass
            case IsNotNull(("tag",)) if self.tag is not None:
                pass
            case IsNotNull(("ts",)) if self.since is not None or self.until is not None:
                pass
            case _:
                return False
        return True

    def _only(self, names: Any) -> None:
        self.topics = frozenset(names) if self.topics is None else self.topics & frozenset(names)

    def _up_to(self, seq: int) -> None:
        self.last = seq if self.last is None else min(self.last, seq)

    def _since(self, moment: datetime) -> None:
        self.since = moment if self.since is None else max(self.since, moment)

    def _until(self, moment: datetime) -> None:
        self.until = moment if self.until is None else min(self.until, moment)


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def ceil_ms(moment: datetime) -> int:
    """The first millisecond that is not before a moment."""
    return -((datetime(1970, 1, 1, tzinfo=UTC) - moment) // timedelta(milliseconds=1))
