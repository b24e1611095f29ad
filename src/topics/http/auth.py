"""Who may do what: API keys with scopes and topic-name prefixes. Only digests of keys are kept."""

from __future__ import annotations

import hashlib
import hmac
from enum import Flag, auto

from topics.core.errors import Forbidden, InvalidRequest, Unauthorized


class Scope(Flag):
    NONE = 0
    READ = auto()
    WRITE = auto()
    DELETE = auto()
    ADMIN = auto()

    @property
    def label(self) -> str:
        return "+".join(str(scope.name).lower() for scope in Scope if scope in self)


_ALL = Scope.READ | Scope.WRITE | Scope.DELETE | Scope.ADMIN
_WORDS = {
    "read": Scope.READ,
    "write": Scope.WRITE,
    "delete": Scope.DELETE,
    "admin": Scope.ADMIN,
    "r": Scope.READ,
    "w": Scope.WRITE,
    "d": Scope.DELETE,
    "a": Scope.ADMIN,
    "rw": Scope.READ | Scope.WRITE,
}


class Key:
    """What a caller may do. `id` names it in metrics and owns what it makes, and says nothing about the secret."""

    __slots__ = ("_digest", "id", "inflight", "prefixes", "scopes")

    def __init__(self, digest: bytes, scopes: Scope, prefixes: tuple[str, ...], number: int) -> None:
        self._digest = digest
        self.scopes = scopes
        self.prefixes = prefixes
        self.id = f"key{number}"
        self.inflight = 0

    def is_secret(self, digest: bytes) -> bool:
        return hmac.compare_digest(self._digest, digest)

    def need(self, scope: Scope) -> None:
        if scope & ~self.scopes:
            raise Forbidden(f"this key lacks the scope {(scope & ~self.scopes).label}")

    def need_topic(self, name: str) -> None:
        if not self.may_see(name):
            raise Forbidden(f"this key has no access to topic {name!r:.300}")

    def may_see(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)


class Keys:
    """The keys of a server; none means that everybody may do everything."""

    def __init__(self, keys: list[Key]) -> None:
        self._keys = keys
        self.anyone = Key(b"", _ALL, (), 0)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_on(self) -> bool:
        return bool(self._keys)

    def check(self, header: str | None) -> Key:
        """The key of an `Authorization` header. Every key is compared, so time tells nothing."""
        if not self._keys:
            return self.anyone
        if header is None:
            raise Unauthorized("an Authorization header with a Bearer key is required")
        kind, _, secret = header.partition(" ")
        if kind.lower() != "bearer" or not secret.strip():
            raise Unauthorized("the Authorization header must be `Bearer KEY`")
        digest = _digest(secret.strip())
        found: Key | None = None
        for key in self._keys:
            if key.is_secret(digest):
                found = key
        if found is None:
            raise Unauthorized("the key is not known")
        return found


def parse_keys(text: str) -> Keys:
    """Reads `TOPICS_API_KEYS`; an entry that is malformed stops the start, and is named by its place, not its text."""
    keys: list[Key] = []
    seen: set[bytes] = set()
    for number, entry in enumerate(text.split(","), 1):
        if not text.strip():
            break
        secret, _, rest = entry.strip().partition(":")
        scopes, _, prefixes = rest.partition(":")
        if not secret.strip():
            raise InvalidRequest(f"TOPICS_API_KEYS: entry {number} has no key")
        digest = _digest(secret.strip())
        if digest in seen:
            raise InvalidRequest(f"TOPICS_API_KEYS: entry {number} repeats an earlier key")
        seen.add(digest)
        keys.append(Key(digest, _parse_scopes(scopes, number), _parse_prefixes(prefixes, number), number))
    return Keys(keys)


def _parse_scopes(text: str, number: int) -> Scope:
    if not text.strip():
        return _ALL
    scopes = Scope.NONE
    for word in text.split("+"):
        scope = _WORDS.get(word.strip())
        if scope is None:
            raise InvalidRequest(
                f"TOPICS_API_KEYS: entry {number}: scopes are read, write, delete and admin, joined by +"
            )
        scopes |= scope
    return scopes


def _parse_prefixes(text: str, number: int) -> tuple[str, ...]:
    if not text.strip():
        return ()
    prefixes = tuple(prefix.strip() for prefix in text.split("|"))
    if not all(prefixes):
        raise InvalidRequest(f"TOPICS_API_KEYS: entry {number} has an empty prefix")
    return prefixes


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
