"""Checks of single values, with messages that name the field and the limit."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from msgspec import Raw

from topics.core.errors import InvalidRequest
from topics.core.limits import MAX_INTEGER


def show(value: Any) -> str:
    """A value as a message shows it: short, and never a reason to fail by itself."""
    try:
        text = repr(value)
    except ValueError:
        return "a number with too many digits"
    return text if len(text) <= 100 else text[:100] + "…"


def check_integer(name: str, value: Any, low: int = 0, high: int = MAX_INTEGER) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number between {low} and {high}, got {show(value)}")
    return value


def check_count(name: str, value: Any) -> int:
    """A number that is clamped, not refused, when it is large."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"{name} must be a whole number of 0 or more, got {show(value)}")
    return value


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {show(value)}")
    return value


def check_text(name: str, value: Any, most: int) -> str:
    """A string of 1 to `most` characters that is Unicode text."""
    if not isinstance(value, str) or not 1 <= len(value) <= most:
        raise InvalidRequest(f"{name} must be a string of 1 to {most} characters, got {show(value)}")
    return check_unicode(name, value)


def check_unicode(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} has a lone surrogate, got {show(value)}") from None
    return value


# Python refuses to write longer numbers as text.
_MAX_BITS = 14_000
_PATH = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`", re.DOTALL)


def explain(error: msgspec.DecodeError) -> str:
    """What msgspec says, in the words of the contract: the field first, as its owner would write it."""
    text = str(error)
    if text == "Input data was truncated":
        return "JSON is malformed: the text ends too soon, or a string ends in half a surrogate pair"
    match = _PATH.fullmatch(text)
    if match is not None:
        what = match[1][0].lower() + match[1][1:]
        return f"{match[2]}: {what}" if match[2] else what
    if text.startswith("Expected `object`"):
        return f"the body must be an object: {text[0].lower() + text[1:]}"
    return text


def check_jsonable(name: str, value: Any) -> None:
    """Refuses Python values that JSON does not have, where an encoder would write something else."""
    stack: list[tuple[str, Any]] = [(name, value)]
    while stack:
        where, item = stack.pop()
        if item is None or isinstance(item, bool | Raw):
            continue
        if isinstance(item, int):
            if item.bit_length() > _MAX_BITS:
                raise InvalidRequest(f"{where}: a number has too many digits")
            continue
        if isinstance(item, str):
            check_unicode(where, item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidRequest(f"{where}: {item} is not a JSON number")
        elif isinstance(item, dict):
            for key, each in item.items():
                if not isinstance(key, str):
                    raise InvalidRequest(f"{where}: a JSON object has strings as keys, got {show(key)}")
                stack.append((f"{where}.{key}", each))
        elif isinstance(item, list | tuple):
            stack.extend((f"{where}[{index}]", each) for index, each in enumerate(item))
        else:
            raise InvalidRequest(f"{where}: JSON has no {type(item).__name__}, got {show(item)}")
