"""A server as a client sees it: its URL, a key, bounds on every wait. All that is known before a socket is open."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import httpx

from topics.client.calls import Call
from topics.client.errors import Unreachable
from topics.client.retry import Answer, Attempts, Failure, T, Timing
from topics.core.check import check_integer
from topics.core.errors import InvalidRequest

DEFAULT_URL = "http://127.0.0.1:4000"
_KEY = re.compile("[!-~]+")
_MAX_CONNECTIONS = 100
# The request was never sent.
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.ProxyError)


class Endpoint:
    def __init__(self, url: str, key: str | None, timeout_ms: int, connect_timeout_ms: int, timing: Timing) -> None:
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"url must be http://HOST:PORT or https://HOST:PORT, got {url!r:.300}")
        try:
            parts.port  # noqa: B018  # it is read when it is asked for
        except ValueError:
            raise InvalidRequest(f"url: the port is not a number: {url!r:.300}") from None
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidRequest("key must be printable ASCII without white space")
        check_integer("timeout_ms", timeout_ms, 1)
        check_integer("connect_timeout_ms", connect_timeout_ms, 1)
        check_integer("retry_ms", timing.retry_ms)
        # Without the credentials that a URL may carry: it is shown in messages.
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self.headers = {"user-agent": "topics"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.timing = timing
        # A list of authorities takes 20 ms to load, and is of no use without TLS.
        self.has_tls = parts.scheme == "https"
        self.limits = httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=20, keepalive_expiry=60)
        self._seconds = timeout_ms / 1000
        self._connect_seconds = connect_timeout_ms / 1000

    def timeout(self, wait_ms: int = 0) -> httpx.Timeout:
        """Bounds on connecting and on each silence; a server that was asked to wait has that time on top."""
        return httpx.Timeout(self._seconds, connect=self._connect_seconds, read=self._seconds + wait_ms / 1000)

    def request(self, call: Call[T]) -> httpx.Request:
        headers = dict(self.headers)
        if call.body is not None:
            headers["content-type"] = "application/json"
        timeout = self.timeout(call.wait_ms).as_dict()
        return httpx.Request(
            call.method, self.url + call.target, headers=headers, content=call.body, extensions={"timeout": timeout}
        )

    def stream_request(self, target: str, last_event_id: str | None, heartbeat_ms: int) -> httpx.Request:
        headers = {**self.headers, "accept": "text/event-stream"}
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        # Two heartbeats may get lost; then it is the connection that is.
        timeout = self.timeout(2 * heartbeat_ms).as_dict()
        return httpx.Request("GET", self.url + target, headers=headers, extensions={"timeout": timeout})

    def attempts(self, call: Call[T]) -> Attempts[T]:
        return Attempts(call, self.timing, self.url)

    def failure_of(self, error: httpx.RequestError) -> Failure:
        text = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise Unreachable(f"cannot trust {self.url}: {text}") from None
        return Failure(text, was_sent=not isinstance(error, _UNSENT))


def answer_of(response: httpx.Response) -> Answer:
    return Answer(response.status_code, response.headers, response.content)
