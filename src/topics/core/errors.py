"""Every error that a caller can cause or must handle, with the stable code of the contract."""

from __future__ import annotations

from typing import Any, ClassVar


class TopicsError(Exception):
    """A refusal or a fault, as the contract names it: `code` is stable, `message` says what and where."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail


class InvalidRequest(TopicsError):
    code = "invalid_request"
    status = 400


class BatchTooLarge(TopicsError):
    code = "batch_too_large"
    status = 400


class RecordTooLarge(TopicsError):
    code = "record_too_large"
    status = 400


class Unauthorized(TopicsError):
    code = "unauthorized"
    status = 401


class Forbidden(TopicsError):
    code = "forbidden"
    status = 403


class NotFound(TopicsError):
    code = "not_found"
    status = 404


class TopicNotFound(TopicsError):
    code = "topic_not_found"
    status = 404


class RouterNotFound(TopicsError):
    code = "router_not_found"
    status = 404


class RouterCycle(TopicsError):
    code = "router_cycle"
    status = 409


class WrongInstance(TopicsError):
    """A router means another life of this name."""

    code = "wrong_instance"
    status = 409


class NotAQueue(TopicsError):
    code = "not_a_queue"
    status = 409


class AckHoleCapExceeded(TopicsError):
    code = "ack_hole_cap_exceeded"
    status = 429


class InFlightCapExceeded(TopicsError):
    code = "in_flight_cap_exceeded"
    status = 429


class TxnNotFound(TopicsError):
    code = "txn_not_found"
    status = 404


class MethodNotAllowed(TopicsError):
    code = "method_not_allowed"
    status = 405


class NotAcceptable(TopicsError):
    code = "not_acceptable"
    status = 406


class TopicExistsIncompatible(TopicsError):
    code = "topic_exists_incompatible"
    status = 409


class TopicNotEmpty(TopicsError):
    code = "topic_not_empty"
    status = 409


class IdempotencyConflict(TopicsError):
    code = "idempotency_conflict"
    status = 409


class TxnIncomplete(TopicsError):
    code = "txn_incomplete"
    status = 409


class PayloadTooLarge(TopicsError):
    code = "payload_too_large"
    status = 413


class UnsupportedMediaType(TopicsError):
    code = "unsupported_media_type"
    status = 415


class TopicFull(TopicsError):
    code = "topic_full"
    status = 422


class Throttled(TopicsError):
    code = "throttled"
    status = 429


class ReadOnly(TopicsError):
    """The log could not be written: nothing more is accepted until a restart. Reading goes on."""

    code = "read_only"
    status = 503


class ShuttingDown(TopicsError):
    code = "shutting_down"
    status = 503


class StorageFault(TopicsError):
    """The disk could not be read or written; nothing is known to be lost."""


class DirectoryInUse(TopicsError):
    """Another process holds this data directory."""


class UnknownFormat(TopicsError):
    """The data directory was written by a version that this one does not know."""


class CorruptDirectory(TopicsError):
    """Bytes that were durable once are proven wrong; the message names the file, the offset and the way out."""
