"""Names of topics and routers. A name never becomes a path on disk."""

from __future__ import annotations

import re

from topics.core.check import show
from topics.core.errors import InvalidRequest

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
_ROUTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")


def check_topic_name(name: str, field: str = "topic") -> str:
    if not isinstance(name, str) or not _TOPIC.fullmatch(name):
        raise InvalidRequest(
            f"{field}: a name is 1 to 255 of A-Z a-z 0-9 . _ : - and starts with a letter or digit, got {show(name)}"
        )
    return name


def check_router_name(name: str, field: str = "router") -> str:
    if not isinstance(name, str) or not _ROUTER.fullmatch(name):
        raise InvalidRequest(
            f"{field}: a name is 1 to 255 of A-Z a-z 0-9 . _ : > - and starts with a letter or digit, got {show(name)}"
        )
    return name
