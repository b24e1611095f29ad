"""What a router is told to do: from where to where, what it carries along, and what it leaves out."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from topics.core.check import show
from topics.core.errors import InvalidRequest
from topics.core.names import check_topic_name
from topics.core.selector import Selector, parse_selector

Start = Literal["head", "earliest"]
Guarantee = Literal["exactly_once", "at_least_once"]
MAX_URL = 2000
MAX_KEY = 1000


class Remote(msgspec.Struct, frozen=True):
    """A topic of another server. The key goes in, and is never shown again."""

    url: str
    topic: str
    key: str | None = None

    def to_json(self) -> dict[str, str]:
        return {"url": self.url, "topic": self.topic}


End = str | Remote


class RouterPatch(msgspec.Struct, kw_only=True):
    """The body of a PUT: what was not sent stays as it is, or gets its default."""

    source: End | UnsetType = UNSET
    dest: End | UnsetType = UNSET
    start: Start | UnsetType = UNSET
    preserve_node: bool | UnsetType = UNSET
    preserve_tag: bool | UnsetType = UNSET
    create_dest: bool | UnsetType = UNSET
    filter: Any = UNSET
    allow_cycle: bool | UnsetType = UNSET
    guarantee: Guarantee | UnsetType = UNSET


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    source: End
    dest: End
    start: Start = "head"
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Selector | None = None
    allow_cycle: bool = False
    guarantee: Guarantee = "exactly_once"

    @property
    def is_remote(self) -> bool:
        return isinstance(self.source, Remote) or isinstance(self.dest, Remote)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        for end in ("source", "dest"):
            if isinstance(fields[end], Remote):
                fields[end] = fields[end].to_json()
        fields["filter"] = self.filter.to_json() if self.filter is not None else None
        return fields


def resolve(patch: RouterPatch, known: RouterConfig | None) -> RouterConfig:
    """A whole configuration out of what was sent and what was there."""
    fields = {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}
    if fields.get("filter") is not None:
        fields["filter"] = parse_selector(fields["filter"], "filter")
    base = {name: getattr(known, name) for name in known.__struct_fields__} if known is not None else {}
    for end in ("source", "dest"):
        if end not in fields and end not in base:
            raise InvalidRequest(f"{end} is required")
        if end in fields:
            fields[end] = _check_end(fields[end], end, base.get(end))
    config = RouterConfig(**{**base, **fields})
    if isinstance(config.source, Remote) and isinstance(config.dest, Remote):
        raise InvalidRequest("source and dest are both remote: one of them must be a topic of this server")
    if config.source == config.dest:
        raise InvalidRequest(f"source and dest are the same topic {show(config.source)}")
    return config


def _check_end(end: End, field: str, known: End | None) -> End:
    if isinstance(end, str):
        return check_topic_name(end, field)
    check_topic_name(end.topic, f"{field}.topic")
    try:
        parts = urlsplit(end.url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    # What `urlsplit` would quietly leave out must not be there.
    is_plain = end.url.isascii() and end.url.isprintable() and " " not in end.url
    if not is_good or len(end.url) > MAX_URL or not is_plain:
        raise InvalidRequest(f"{field}.url must be http://HOST:PORT or https://HOST:PORT, got {show(end.url)}")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise InvalidRequest(f"{field}.url must have no user, password, query or fragment: a key goes into {field}.key")
    if end.key is not None and not (0 < len(end.key) <= MAX_KEY and end.key.isascii() and end.key.isprintable()):
        raise InvalidRequest(f"{field}.key must be 1 to {MAX_KEY} printable ASCII characters")
    if end.key is None and isinstance(known, Remote) and (known.url, known.topic) == (end.url, end.topic):
        # The key is not shown, so nobody can send it back.
        return known
    return end
