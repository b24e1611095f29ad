"""The ledger of one instance of a topic: what became of each seq. Ranges in order, none over another, as few as it
takes.

What no range covers is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

What = Literal["archived", "lost", "deleted"]
# First and last seq, both inclusive.
Seqs = tuple[int, int]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Seqs that share a fate. `reason` is the log's reason for a loss; a deletion has none."""

    first: int
    last: int
    what: What
    reason: str = ""

    def cut(self, first: int, last: int) -> Span:
        return Span(max(self.first, first), min(self.last, last), self.what, self.reason)


def joined(spans: Iterable[Span]) -> list[Span]:
    """In order, neighbours of the same fate as one. Two that overlap are a bug of whoever made them."""
    result: list[Span] = []
    for span in sorted(spans, key=lambda each: each.first):
        assert span.first <= span.last, span
        last = result[-1] if result else None
        assert last is None or last.last < span.first, f"{last} and {span} overlap"
        if last is not None and last.last + 1 == span.first and (last.what, last.reason) == (span.what, span.reason):
            result[-1] = Span(last.first, span.last, last.what, last.reason)
        else:
            result.append(span)
    return result


def covered(spans: Iterable[Span]) -> list[Seqs]:
    """The seqs that an ordered ledger accounts for, whatever their fate."""
    return union((span.first, span.last) for span in spans)


def union(ranges: Iterable[Seqs]) -> list[Seqs]:
    result: list[Seqs] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], last))
        else:
            result.append((first, last))
    return result


def without(ranges: Iterable[Seqs], taken: Iterable[Seqs]) -> list[Seqs]:
    """What is left of some ranges; both are in order."""
    left: list[Seqs] = []
    cuts = list(taken)
    start = 0
    for first, last in ranges:
        while start < len(cuts) and cuts[start][1] < first:
            start += 1
        index = start
        while index < len(cuts) and cuts[index][0] <= last and first <= last:
            if cuts[index][0] > first:
                left.append((first, cuts[index][0] - 1))
            first = max(first, cuts[index][1] + 1)
            index += 1
        if first <= last:
            left.append((first, last))
    return left


def within(ranges: Iterable[Seqs], frame: Iterable[Seqs]) -> list[Seqs]:
    """What some ranges have in common with others; both are in order."""
    whole = list(ranges)
    return without(whole, without(whole, frame))


def seqs(ranges: Iterable[Seqs]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def restated(spans: Iterable[Span], deleted: Iterable[Seqs]) -> list[Span]:
    """The ledger after some of what was archived is deleted from the lake too."""
    gone = union(deleted)
    result: list[Span] = []
    archived: list[Seqs] = []
    for span in spans:
        if span.what == "archived":
            archived.append((span.first, span.last))
        else:
            result.append(span)
    result += [Span(first, last, "archived") for first, last in without(archived, gone)]
    result += [Span(first, last, "deleted") for first, last in within(archived, gone)]
    return joined(result)


def account(first: int, last: int, archived: Iterable[Seqs], lost: Iterable[Span]) -> list[Span]:
    """The ledger of a range that was read: what came neither as a record nor as a loss had been deleted."""
    frame = [(first, last)] if first <= last else []
    kept = within(union(archived), frame)
    gaps = joined(_apart(lost))
    spans = [Span(start, end, "archived") for start, end in kept]
    for gap in gaps:
        # A record that was read is there, whatever a later attempt of the same task was told.
        spans += [gap.cut(start, end) for start, end in without(within([(gap.first, gap.last)], frame), kept)]
    rest = without(frame, union((span.first, span.last) for span in spans))
    return joined([*spans, *(Span(start, end, "deleted") for start, end in rest)])


def _apart(lost: Iterable[Span]) -> Iterator[Span]:
    """Losses of which none is over another."""
    reached = -1
    for span in sorted(lost, key=lambda each: (each.first, -each.last)):
        first = max(span.first, reached + 1)
        if first <= span.last:
            yield Span(first, span.last, span.what, span.reason)
            reached = span.last
