"""Checks of single values, with messages that name the field and the limit."""

from __future__ import annotations

from typing import Any

from topics.core.errors import InvalidRequest
from topics.core.limits import MAX_INTEGER


def check_integer(name: str, value: Any, low: int = 0, high: int = MAX_INTEGER) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number between {low} and {high}, got {value!r:.100}")
    return value


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r:.100}")
    return value
