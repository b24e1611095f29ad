"""Tag selectors: `["tag","Eq","X"]`, `["tag","Glob","X*"]`, or a bare string for Eq."""

from __future__ import annotations

from typing import Any

import msgspec

from topics.core.check import check_unicode, show
from topics.core.errors import InvalidRequest


class Selector(msgspec.Struct, frozen=True, array_like=True):
    """Matches a tag exactly, or every tag that starts with `text`. A record without a tag never matches."""

    text: str
    prefix: bool = False

    def matches(self, tag: str) -> bool:
        return tag.startswith(self.text) if self.prefix else tag == self.text

    def to_json(self) -> list[str]:
        return ["tag", "Glob", self.text + "*"] if self.prefix else ["tag", "Eq", self.text]


def parse_selector(value: Any, field: str = "match") -> Selector:
    if isinstance(value, Selector):
        return value
    if isinstance(value, str):
        return Selector(check_unicode(field, value))
    if isinstance(value, list | tuple) and len(value) == 3:
        attribute, operator, text = value
        if attribute == "tag" and operator in ("Eq", "Glob") and isinstance(text, str):
            check_unicode(field, text)
            if operator == "Eq":
                return Selector(text)
            if text.endswith("*") and "*" not in text[:-1]:
                return Selector(text[:-1], prefix=True)
            raise InvalidRequest(f'{field}: "Glob" takes one star, at the end, got {show(text)}')
    raise InvalidRequest(f'{field} must be a string, ["tag","Eq","X"] or ["tag","Glob","X*"], got {show(value)}')
