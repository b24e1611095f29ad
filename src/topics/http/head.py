"""A request without its body: what it asks for, and how its bytes are recognised when they come again.

A client sends the same few heads over and over; only the bodies differ. Bytes that were parsed, checked and admitted
once need not be again: a small write costs a third less that way (`python -m benchmarks wire`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topics.http.app import Access

_MAX_HEADS = 1024
_MAX_HEAD_BYTES = 1024
END = b"\r\n\r\n"


class Head:
    """`headers` is not to be changed: the same head may serve many requests. `length` is that of the body, as far as it
    was said; `access` is who asks and for what, once that was found out."""

    __slots__ = (
        *("accepts_gzip", "access", "headers", "is_old", "keep_alive", "length", "method", "path", "raw_query"),
        "wants_websocket",
    )

    def __init__(self, method: str, target: bytes, headers: dict[bytes, bytes]) -> None:
        path, _, self.raw_query = target.partition(b"?")
        if not path.startswith(b"/"):
            path = _origin_form(path)
        self.method = method
        self.path = path.decode("latin-1")
        self.headers = headers
        self.keep_alive = True
        # HTTP/1.0: to be told that the connection stays.
        self.is_old = False
        self.length = 0
        self.accepts_gzip = b"accept-encoding" in headers and accepts_gzip(headers[b"accept-encoding"])
        self.access: Access | None = None
        self.wants_websocket = False


class Heads:
    """Heads that were admitted, by their bytes. With keys, by a digest of them: no key stays in memory."""

    def __init__(self, hide: bool) -> None:
        self._heads: dict[bytes, Head] = {}
        self._hide = hide

    def __len__(self) -> int:
        return len(self._heads)

    def __iter__(self) -> Iterator[Head]:
        return iter(self._heads.values())

    def find(self, head: bytes) -> Head | None:
        if self._hide:
            head = hashlib.sha256(head).digest()
        return self._heads.get(head)

    def remember(self, head_bytes: bytes, head: Head) -> None:
        if len(head_bytes) > _MAX_HEAD_BYTES or head.access is None or b"token" in head.raw_query:
            return
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        if self._hide:
            head_bytes = hashlib.sha256(head_bytes).digest()
            head.headers.pop(b"authorization", None)
        self._heads[head_bytes] = head


def accepts_gzip(header: bytes) -> bool:
    """Whether an Accept-Encoding asks for gzip, and not with q=0."""
    for item in header.lower().split(b","):
        name, _, parameters = item.partition(b";")
        if name.strip() in (b"gzip", b"*"):
            quality = parameters.replace(b" ", b"").removeprefix(b"q=")
            return not quality or quality.strip(b"0.") != b""
    return False


def _origin_form(target: bytes) -> bytes:
    """The path of a target that names the server too, as proxies send it."""
    scheme, mark, rest = target.partition(b"://")
    if mark and scheme.lower() in (b"http", b"https"):
        return b"/" + rest.partition(b"/")[2]
    return target
