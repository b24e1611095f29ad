"""Frames: the one form in which anything is durable.

A frame names its kind, the topic instance (`epoch`) and the seq range it is about in a header with a checksum of its
own, so that a damaged payload still tells exactly what was lost. The header's checksum is seeded with the position:
bytes that look like a frame (inside somebody's data, or left over from an earlier life of a file) are not one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

_MAGIC = 0x7C54
_VERSION = 1
_FIELDS = struct.Struct("<HBBIQQQQ")
_CHECK = struct.Struct("<I")
HEADER = _FIELDS.size + _CHECK.size
_MAGIC_BYTES = struct.pack("<HB", _MAGIC, _VERSION)
MAX_PAYLOAD = 2**32 - 1

# What a frame carries, whole or in the pieces of which it is made.
Buffer = bytes | memoryview
Payload = bytes | tuple[Buffer, ...]

# Positions in numbered files, as one number that grows over files: 1 TiB a file is out of reach.
_POSITION_BITS = 40


def position(number: int, offset: int) -> int:
    return (number << _POSITION_BITS) | offset


def file_number(at: int) -> int:
    return at >> _POSITION_BITS


def file_offset(at: int) -> int:
    return at & ((1 << _POSITION_BITS) - 1)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A frame as read back: `at` is its position, `end` the position behind it."""

    at: int
    kind: int
    epoch: int
    first: int
    last: int
    payload: bytes
    end: int


class Header(msgspec.Struct, frozen=True, gc=False):
    kind: int
    length: int
    epoch: int
    first: int
    last: int
    checksum: int


def encode(at: int, kind: int, epoch: int, first: int, last: int, payload: Payload) -> bytes:
    """The header of a frame that will stand at `at`, to be followed by its payload."""
    if isinstance(payload, tuple):
        length, checksum = length_of(payload), _checksum(payload)
    else:
        length, checksum = len(payload), xxh3_64_intdigest(payload)
    assert length <= MAX_PAYLOAD
    fields = _FIELDS.pack(_MAGIC, _VERSION, kind, length, epoch, first, last, checksum)
    return fields + _CHECK.pack(xxh3_64_intdigest(fields, at) & 0xFFFFFFFF)


def length_of(payload: Payload) -> int:
    return sum(map(len, payload)) if isinstance(payload, tuple) else len(payload)


def _checksum(pieces: tuple[Buffer, ...]) -> int:
    digest = xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def decode_header(data: bytes | memoryview, at: int) -> Header | None:
    """The header at the start of `data`, or None if its checksum does not say so."""
    if len(data) < HEADER:
        return None
    fields = bytes(data[: _FIELDS.size])
    if xxh3_64_intdigest(fields, at) & 0xFFFFFFFF != _CHECK.unpack_from(data, _FIELDS.size)[0]:
        return None
    magic, version, kind, length, epoch, first, last, checksum = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION:
        return None
    return Header(kind, length, epoch, first, last, checksum)


def decode_payload(data: bytes, at: int) -> memoryview | None:
    """The proven payload of the frame at the start of `data`, not copied; None if any of it is missing or wrong."""
    header = decode_header(data, at)
    if header is None or len(data) < HEADER + header.length:
        return None
    payload = memoryview(data)[HEADER : HEADER + header.length]
    return payload if xxh3_64_intdigest(payload) == header.checksum else None


def decode(data: bytes | memoryview, at: int) -> Frame | None:
    """The whole frame at the start of `data`, or None if any of it is missing or wrong."""
    header = decode_header(data, at)
    if header is None or len(data) < HEADER + header.length:
        return None
    payload = bytes(data[HEADER : HEADER + header.length])
    if xxh3_64_intdigest(payload) != header.checksum:
        return None
    return Frame(at, header.kind, header.epoch, header.first, header.last, payload, at + HEADER + header.length)


class Damage(msgspec.Struct, frozen=True):
    """Bytes that are no frame. `header` is there when only the payload is wrong: it says what was lost.

    `torn` means that the file ends inside the frame, as a write that was cut off leaves it.
    """

    at: int
    end: int
    header: Header | None
    torn: bool


def scan(data: bytes, base: int, offset: int = 0) -> Iterator[Frame | Damage]:
    """Walks a file's frames from `offset`; behind damage it looks for the next whole frame and goes on."""
    view = memoryview(data)
    while offset < len(data):
        frame = decode(view[offset:], base + offset)
        if frame is not None:
            yield frame
            offset = frame.end - base
            continue
        header = decode_header(view[offset:], base + offset)
        if header is not None:
            end = offset + HEADER + header.length
            yield Damage(base + offset, base + min(end, len(data)), header, torn=end > len(data))
            offset = end
            continue
        end = _next_frame(view, data, base, offset + 1)
        yield Damage(base + offset, base + end, None, torn=len(data) - offset < HEADER)
        offset = end


def _next_frame(view: memoryview, data: bytes, base: int, offset: int) -> int:
    while True:
        offset = data.find(_MAGIC_BYTES, offset)
        if offset < 0:
            return len(data)
        if decode_header(view[offset:], base + offset) is not None:
            return offset
        offset += 1
