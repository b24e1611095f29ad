"""A topic's configuration: what a caller may send, how it resolves, and what is reported back."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from topics.core.check import check_integer, explain, show
from topics.core.errors import InvalidRequest, TopicExistsIncompatible
from topics.core.limits import MAX_INTEGER
from topics.core.names import check_topic_name

TopicType = Literal["log", "queue"]
Discard = Literal["old", "reject"]
Durability = Literal["ephemeral", "memory", "disk", "fsync"]
DlqStrategy = Literal["skip", "block", "block_and_dlq"]


class ConfigPatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of one `PUT`, as sent: what is UNSET stays as it was."""

    type: TopicType | UnsetType = UNSET
    ttl_ms: int | UnsetType = UNSET
    cap_records: int | UnsetType = UNSET
    cap_bytes: int | UnsetType = UNSET
    discard: Discard | UnsetType = UNSET
    durability: Durability | UnsetType = UNSET
    durable: bool | UnsetType = UNSET
    seq_base: int | UnsetType = UNSET
    priority: int | UnsetType | None = UNSET
    auto_priority: bool | UnsetType = UNSET
    auto_create: bool | UnsetType = UNSET
    idempotency_window_ms: int | UnsetType = UNSET
    dedupe_node: bool | UnsetType = UNSET
    lease_ms: int | UnsetType = UNSET
    visibility_timeout_ms: int | UnsetType = UNSET
    claim_jitter_ms: int | UnsetType = UNSET
    max_deliveries: int | UnsetType = UNSET
    max_delivery_attempts: int | UnsetType = UNSET
    dead_letter: str | UnsetType | None = UNSET
    dlq_strategy: DlqStrategy | UnsetType = UNSET
    ordering_required: bool | UnsetType = UNSET
    max_ack_holes: int | UnsetType = UNSET
    max_in_flight: int | UnsetType = UNSET
    leases_durable: bool | UnsetType | None = UNSET


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved configuration. `dlq_strategy` None means that nobody chose one: the default then depends on
    `ordering_required`."""

    type: TopicType = "log"
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: Discard = "old"
    durability: Durability = "disk"
    seq_base: int = 1
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = 120_000
    dedupe_node: bool = True
    lease_ms: int = 30_000
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    dlq_strategy: DlqStrategy | None = None
    ordering_required: bool = False
    max_ack_holes: int = 0
    max_in_flight: int = 0
    leases_durable: bool | None = None

    @property
    def strategy(self) -> DlqStrategy:
        """What happens to a job that was delivered too often."""
        return self.dlq_strategy or ("block" if self.ordering_required else "skip")

    def to_json(self) -> dict[str, Any]:
        """The whole configuration, as every topic answer echoes it."""
        whole = msgspec.structs.asdict(self)
        whole["durable"] = self.durability == "fsync"
        whole["dlq_strategy"] = self.strategy
        return whole


_ALIASES = (("visibility_timeout_ms", "lease_ms"), ("max_delivery_attempts", "max_deliveries"))
_CHOICES: dict[str, tuple[str, ...]] = {
    "type": get_args(TopicType),
    "discard": get_args(Discard),
    "durability": get_args(Durability),
    "dlq_strategy": get_args(DlqStrategy),
}
_COUNTS = (
    *("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms"),
    *("max_deliveries", "max_ack_holes", "max_in_flight"),
)
_CLAMPS = {"lease_ms": (100, 86_400_000), "claim_jitter_ms": (0, 5000)}


def parse_patch(value: Any, field: str = "config") -> ConfigPatch:
    """Takes a patch as a struct, a dict or None; a wrong type names the field."""
    if isinstance(value, ConfigPatch):
        return value
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be an object, got {show(value)}")
    for name, allowed in _CHOICES.items():
        if value and name in value and value[name] not in allowed:
            raise InvalidRequest(f"{field}: {name} must be one of {', '.join(allowed)}, got {show(value[name])}")
    try:
        return msgspec.convert(value or {}, ConfigPatch)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{field}: {explain(error)}") from None
    except (OverflowError, ValueError):
        raise InvalidRequest(f"{field}: a number is out of range") from None


def resolve(patch: ConfigPatch, current: TopicConfig | None, topic: str) -> TopicConfig:
    """The configuration after a patch; refuses what cannot be, and then nothing has changed."""
    sent = {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}
    for alias, name in _ALIASES:
        if alias in sent:
            if name not in _CLAMPS:
                check_integer(alias, sent[alias])
            value = sent.pop(alias)
            sent.setdefault(name, value)
    durable = sent.pop("durable", None)
    if durable is not None and "durability" not in sent:
        sent["durability"] = "fsync" if durable else "disk"
    _check_values(sent, topic)
    if current is None:
        config = TopicConfig(**sent)
    else:
        for name in ("type", "seq_base"):
            if name in sent and sent[name] != getattr(current, name):
                raise TopicExistsIncompatible(
                    f"{name} of topic {topic!r} is {getattr(current, name)!r} and cannot become {sent[name]!r}"
                )
        config = msgspec.structs.replace(current, **sent)
    _check_whole(config)
    return config


def _check_values(sent: dict[str, Any], topic: str) -> None:
    for name in _COUNTS:
        if name in sent:
            check_integer(name, sent[name], 0, MAX_INTEGER)
    if "seq_base" in sent:
        check_integer("seq_base", sent["seq_base"], 1, MAX_INTEGER)
    for name, (low, high) in _CLAMPS.items():
        if name in sent:
            sent[name] = min(max(sent[name], low), high)
    if sent.get("priority") is not None:
        check_integer("priority", sent["priority"], -MAX_INTEGER, MAX_INTEGER)
    if sent.get("dead_letter") is not None:
        check_topic_name(sent["dead_letter"], "dead_letter")
        if sent["dead_letter"] == topic:
            raise InvalidRequest("dead_letter must not be the topic itself")


def _check_whole(config: TopicConfig) -> None:
    if config.dlq_strategy == "block_and_dlq" and config.dead_letter is None:
        raise InvalidRequest('dlq_strategy "block_and_dlq" needs dead_letter')
    if config.dlq_strategy == "skip" and config.ordering_required:
        raise InvalidRequest('dlq_strategy "skip" cannot keep the order: with ordering_required use "block"')
