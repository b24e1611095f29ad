"""One connection to a server: kept alive, with a bound on every wait, and tried again where that is safe.

On the standard library's `http.client`: a bulk read goes straight into one buffer (3 GB/s on loopback, where httpx
reaches 0.6), and there is nothing to install on an executor.
"""

from __future__ import annotations

import http.client
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from topics.client.errors import ServerError, Unreachable, error_of
from topics.core.errors import InvalidRequest, TopicsError

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
# What a server says that will not be so for long.
_PASSING = (429, 503)
_KEY = re.compile("[!-~]+")
_encode = msgspec.json.Encoder().encode


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytearray

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Connection:
    """Not for two threads at once. `retry_ms` is how long a request that may be repeated is tried again."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        timeout_ms: int = 60_000,
        retry_ms: int = 30_000,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"url must be http://HOST:PORT or https://HOST:PORT, got {url!r:.300}")
        try:
            port = parts.port
        except ValueError:
            raise InvalidRequest(f"url: the port is not a number: {url!r:.300}") from None
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._http = kind(parts.hostname, port, timeout=timeout_ms / 1000)
        self._path = parts.path.rstrip("/")
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidRequest("key must be printable ASCII without white space")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._retry_seconds = retry_ms / 1000
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self.send("GET", path + _query(query), None, {}, repeatable=True).json()

    def post(self, path: str, body: Any, repeatable: bool = True, **query: Any) -> Any:
        headers = {"content-type": JSON}
        return self.send("POST", path + _query(query), _encode(body), headers, repeatable).json()

    def post_arrow(self, path: str, body: Any, repeatable: bool = True, **query: Any) -> Any:
        """Sends columns; `body` is anything with a buffer."""
        headers = {"content-type": ARROW}
        return self.send("POST", path + _query(query), body, headers, repeatable).json()

    def read_arrow(self, path: str, body: Any) -> bytearray:
        """Asks with JSON, and is answered in columns."""
        headers = {"content-type": JSON, "accept": ARROW}
        return self.send("POST", path, _encode(body), headers, repeatable=True).body

    def send(self, method: str, path: str, body: Any, headers: dict[str, str], repeatable: bool) -> Answer:
        """One request, tried again while the server is away or busy, if it may be; raises what the server refuses."""
        deadline: float | None = None
        for pause in _pauses(self._jitter):
            was_sent = True
            try:
                answer = self._try(method, path, body, headers)
                if answer.status < 300 and answer.body and answer.headers.get("content-type") in (JSON, ARROW):
                    return answer
                if answer.status < 400:
                    shown = bytes(answer.body[:100]).decode("utf-8", "replace")
                    raise ServerError(f"{self.url} is not a topics server: it answered {answer.status} {shown}")
                failure: TopicsError = error_of(answer.status, bytes(answer.body))
                # A refusal changes nothing, so it may be repeated whatever it was.
                if answer.status not in _PASSING or failure.code == "read_only":
                    raise failure
                pause = max(pause, _retry_after(answer))
            except ssl.SSLCertVerificationError as error:
                raise Unreachable(f"cannot trust {self.url}: {error.verify_message}") from None
            except (OSError, http.client.HTTPException) as error:
                was_sent = not isinstance(error, ConnectionRefusedError)
                self._http.close()
                failure = Unreachable(f"cannot reach {self.url}: {error or type(error).__name__}")
            # However long the first try took, it is followed by others.
            now = self._clock()
            deadline = now + self._retry_seconds if deadline is None else deadline
            if (was_sent and not repeatable and isinstance(failure, Unreachable)) or now + pause > deadline:
                raise failure
            self._sleep(pause)
        raise AssertionError("unreachable")

    def _try(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        self._http.request(method, self._path + path, body, {**self._headers, **headers})
        response = self._http.getresponse()
        length = response.length
        if length is None and "transfer-encoding" not in {name.lower() for name, _ in response.getheaders()}:
            # A server of ours always says how long its answer is: the head itself was cut off.
            raise http.client.IncompleteRead(b"")
        if length is None:
            content = bytearray(response.read())
        else:
            content = bytearray(length)
            left = memoryview(content)
            while left:
                count = response.readinto(left)
                if not count:
                    raise http.client.IncompleteRead(bytes(content[: length - len(left)]), len(left))
                left = left[count:]
            # The response knows that it is at its end only when it was asked for more.
            response.read()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, content)


def topic_path(name: str, verb: str = "") -> str:
    return f"/v0/topics/{quote(name, safe='')}" + (f"/{verb}" if verb else "")


def _query(fields: dict[str, Any]) -> str:
    given = {name: value for name, value in fields.items() if value is not None}
    return "?" + urlencode(given) if given else ""


def _pauses(jitter: Callable[[], float]) -> Iterator[float]:
    """Longer and longer, and never in step with others."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * (0.5 + jitter())
        pause = min(2 * pause, _LONGEST_PAUSE)


def _retry_after(answer: Answer) -> float:
    with suppress(ValueError):
        return min(float(answer.headers.get("retry-after", "0")), _LONGEST_PAUSE)
    return 0.0
