"""`/ui`: the page, as it lies in `ui/`. It is no secret; whatever it shows it asks of the API, with a key."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

import msgspec

from topics.core.errors import NotFound
from topics.http.app import App
from topics.http.exchange import Exchange

_KINDS = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
# Nothing from elsewhere, nothing inline, nothing that turns text into markup or code.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Kept, but asked for again each time: a page never runs with the scripts of another version.
    (b"cache-control", b"no-cache"),
)


class File(msgspec.Struct, frozen=True):
    kind: bytes
    body: bytes
    tag: bytes


@cache
def page_files() -> dict[str, File]:
    """All of them, read once. The tag is a weak one: the same file goes out packed and not."""
    found: dict[str, File] = {}
    for entry in files("topics.http").joinpath("ui").iterdir():
        kind = _KINDS.get(entry.name.rpartition(".")[2])
        if kind is not None:
            body = entry.read_bytes()
            found[entry.name] = File(kind, body, b'W/"%b"' % hashlib.sha256(body).hexdigest()[:32].encode())
    return found


def page(app: App, exchange: Exchange, _: str) -> None:
    _send(exchange, "index.html")


def asset(app: App, exchange: Exchange, name: str) -> None:
    if not name:
        # Links in the page are relative, so that it works below any prefix of a proxy; they start from `/ui`.
        exchange.send(308, b"", b"text/plain", ((b"location", b"../ui"), *_HEADERS))
        return
    _send(exchange, name)


def _send(exchange: Exchange, name: str) -> None:
    file = page_files().get(name)
    if file is None:
        raise NotFound(f"there is nothing at {exchange.path:.300}")
    headers = (*_HEADERS, (b"etag", file.tag))
    if _has(exchange.headers.get(b"if-none-match"), file.tag):
        exchange.send(304, b"", file.kind, headers)
    else:
        exchange.send(200, file.body, file.kind, headers)


def _has(known: bytes | None, tag: bytes) -> bool:
    """Whether a client has it already. Tags are compared weakly, as for If-None-Match they are."""
    if known is None:
        return False
    tags = [each.strip().removeprefix(b"W/") for each in known.split(b",")]
    return b"*" in tags or tag.removeprefix(b"W/") in tags
