"""What a server's refusal is on this side: the same class that the engine raises."""

from __future__ import annotations

import msgspec

from topics.core import errors
from topics.core.errors import TopicsError


class Unreachable(TopicsError):
    """Nobody answered, or the answer did not arrive: whether the request was carried out is not known."""

    code = "unreachable"
    status = 503


class NotReady(TopicsError):
    """The server is replaying its log."""

    code = "not_ready"
    status = 503


class ServerError(TopicsError):
    """An answer that this version does not know."""


_KINDS: dict[str, type[TopicsError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TopicsError) and kind.code != "internal"
} | {"not_ready": NotReady}


class _Body(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, object] = {}


class _Refusal(msgspec.Struct):
    error: _Body


def error_of(status: int, body: bytes) -> TopicsError:
    """The error that an answer tells; one that is not of the contract is shown as it came."""
    try:
        told = msgspec.json.decode(body, type=_Refusal).error
    except msgspec.DecodeError:
        return ServerError(f"the server answered {status}: {body[:200].decode('utf-8', 'replace')}")
    # `detail` comes as it is; it may have names that an argument cannot have.
    error = error_named(told.code, told.message)
    error.detail = told.detail
    return error


def error_named(code: str, message: str) -> TopicsError:
    return _KINDS.get(code, ServerError)(message)
