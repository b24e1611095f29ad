"""Rendering many plain records at once, with Arrow's C++ where pyarrow is installed: half the time.

0.2 instead of 0.4 µs a record of 100 bytes, splitting included.
"""

from __future__ import annotations

from array import array
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from topics.core.records import Batch, render_plain, template_of

# Below this, the way there costs more than it saves.
_MANY = 1000


def render_text(text: bytes, between: bytes, count: int, node: str | None, first_seq: int, ts: int) -> Batch:
    """A run of records whose `data` stands in one text, with a byte between them that none of them has."""
    if count < _MANY or not _has_arrow():
        return render_plain(text.split(between), node, first_seq, ts)
    import pyarrow as pa
    import pyarrow.compute as pc

    datas = pc.split_pattern(pa.array([text], pa.binary()), between).flatten()
    assert len(datas) == count
    seqs = pc.cast(pc.add(_numbers(count), first_seq), pa.string()).cast(pa.binary())
    head, middle, tail = template_of(node, ts)
    body = pc.binary_join_element_wise(_text(pa, head), seqs, _text(pa, middle), datas, _text(pa, tail), _text(pa, b""))
    lens = _ints(pa, pc.binary_length(body))
    sizes = _ints(pa, pc.binary_length(datas))
    nodes: list[str | None] | None = [node] * count if node is not None else None
    whole = memoryview(body.buffers()[2])[: sum(lens)]
    return Batch(first_seq, ts, lens, sizes, None, None, nodes, whole, sum(sizes))


def _text(pa: Any, text: bytes) -> Any:
    return pa.scalar(text, pa.binary())


@lru_cache(maxsize=4)
def _numbers(count: int) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(array("q", range(count)))])


def _ints(pa: Any, column: Any) -> array[int]:
    numbers = array("I")
    numbers.frombytes(memoryview(column.buffers()[1])[: 4 * len(column)])
    return numbers


@cache
def _has_arrow() -> bool:
    return find_spec("pyarrow") is not None
