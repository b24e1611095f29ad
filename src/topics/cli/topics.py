"""`topics put`, `get`, `list`, `drop`: topics and queues themselves."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any, get_args

import msgspec
import typer

from topics.cli.common import DEFAULT_URL, Json, Key, RetryMs, TopicName, Url, command, connect
from topics.cli.show import emit, fields, note, table, time_of
from topics.core.answers import TopicState
from topics.core.config import ConfigPatch, TopicConfig

_ALIASES = ("visibility_timeout_ms", "max_delivery_attempts", "auto_create")
_HELP = {
    "type": "log or queue; cannot be changed later.",
    "ttl_ms": "Records older than this expire; 0 is never.",
    "cap_records": "Live records that are kept; 0 is unbounded.",
    "cap_bytes": "Live bytes that are kept; 0 is unbounded.",
    "discard": "When full: old (evict the oldest) or reject.",
    "durability": "ephemeral, memory, disk or fsync.",
    "durable": "Alias of durability fsync, or disk.",
    "seq_base": "The first seq; at creation only.",
    "priority": "Orders delivery work; -1000 to 1000.",
    "auto_priority": "Topics that are read count more.",
    "idempotency_window_ms": "How long an idempotency key is remembered.",
    "dedupe_node": "A reader's node filter is active.",
    "lease_ms": "Queue: how long a claimed job is held.",
    "claim_jitter_ms": "Queue: claims within this time share what is there.",
    "max_deliveries": "Queue: deliveries before a job is poison; 0 is unlimited.",
    "dead_letter": "Queue: the topic for poison jobs.",
    "dlq_strategy": "Queue: skip, block or block_and_dlq.",
    "ordering_required": "Queue: one consumer at a time, in strict order.",
    "max_ack_holes": "Queue: 0 is unlimited.",
    "max_in_flight": "Queue: 0 is unlimited.",
    "leases_durable": "Queue: lease events are fsynced (or not).",
}


def _options() -> list[inspect.Parameter]:
    """One option for each field of the configuration; what is not given stays as it is."""
    options: list[inspect.Parameter] = []
    for field in msgspec.structs.fields(ConfigPatch):
        if field.name in _ALIASES:
            continue
        kinds = get_args(field.type)
        kind: Any = bool if bool in kinds else int if int in kinds else str
        name = field.name.replace("_", "-")
        declaration = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
        option = typer.Option(declaration, help=_HELP[field.name], show_default=False, rich_help_panel="Configuration")
        options.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    return options


def _put(
    topic: TopicName,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=JSON", help="Any field, as JSON: --set priority=null.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
    **config: Any,
) -> None:
    given = {name: value for name, value in config.items() if value is not None}
    for each in set_ or []:
        name, is_there, text = each.partition("=")
        if not is_there:
            raise typer.BadParameter(f"--set takes FIELD=JSON, got {each!r}")
        try:
            given[name] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            given[name] = text
    with connect(url, key, retry_ms) as client:
        answer = client.put(topic, given)
    if as_json:
        emit(answer)
        return
    print(f"{topic} {'is created' if answer.created else 'is changed' if given else 'is there'}")
    chosen = _chosen(answer.config)
    if chosen:
        fields(chosen)


_parameters = list(inspect.signature(_put, eval_str=True).parameters.values())
_keywords = [
    each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in _parameters[1:] if each.kind != each.VAR_KEYWORD
]
_put.__signature__ = inspect.Signature([_parameters[0], *_options(), *_keywords])  # type: ignore[attr-defined]
_put.__annotations__ = {each.name: each.annotation for each in (_parameters[0], *_options(), *_keywords)}
put = command(_put)


@command
def get(
    topic: TopicName,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        state = client.get(topic, touch=False)
    if as_json:
        emit(state)
    else:
        _show(state)


def _show(state: TopicState) -> None:
    shown: dict[str, Any] = {
        name: getattr(state, name)
        for name in ("topic", "type", "head_seq", "earliest_seq", "evict_floor", "count", "bytes", "holes", "epoch")
    }
    shown["last_write"] = time_of(state.last_write_ts)
    shown["last_read"] = time_of(state.last_read_ts)
    alarming = {"holes"} if state.holes else set()
    if state.evict_floor > state.config.seq_base:
        shown["lost"] = f"seqs below {state.evict_floor} fell out of a cap or TTL"
        alarming.add("lost")
    if state.queue is not None:
        queue = msgspec.structs.asdict(state.queue)
        queue["oldest_ready"] = time_of(queue.pop("oldest_ready_ts"))
        shown |= {f"queue.{name}": value for name, value in queue.items()}
        alarming |= {f"queue.{name}" for name in ("lost", "blocked") if queue[name]}
    shown |= {f"config.{name}": value for name, value in _chosen(state.config).items() if name != "type"}
    fields(shown, alarming)


def _chosen(config: TopicConfig) -> dict[str, Any]:
    """What is not as it is by default."""
    default = TopicConfig()
    strategy = TopicConfig(ordering_required=config.ordering_required).strategy
    return {
        name: value
        for name, value in msgspec.structs.asdict(config).items()
        if value != (strategy if name == "dlq_strategy" else getattr(default, name))
    }


@command
def list_(
    prefix: Annotated[str, typer.Argument(help="Only names that start so.")] = "",
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        if as_json:
            for state in client.topics(prefix):
                emit(state)
            return
        rows = [
            [
                *(state.topic, state.type, state.config.durability, str(state.count), str(state.bytes)),
                *(str(state.earliest_seq), str(state.head_seq), time_of(state.last_write_ts)),
            ]
            for state in client.topics(prefix)
        ]
    if rows:
        table(["topic", "type", "durability", "count", "bytes", "earliest", "head", "last write"], rows)
    else:
        note("no topics" + (f" start with {prefix}" if prefix else ""))


@command
def drop(
    topic: TopicName,
    if_empty: Annotated[bool, typer.Option("--if-empty", help="Only if it has no records.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    if not yes and not if_empty and sys.stdin.isatty():
        typer.confirm(f"Delete {topic} with everything in it?", abort=True)
    with connect(url, key, retry_ms) as client:
        answer = client.drop(topic, if_empty=if_empty)
    if as_json:
        emit(answer)
    else:
        print(f"{topic} is deleted" if answer.deleted else f"there was no {topic}")
