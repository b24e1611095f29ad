"""Everything that an operator can set: `TOPICS_…` in the environment, or the flag of the same name."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta

from topics.core.errors import InvalidRequest
from topics.core.limits import Limits


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port to listen on; 0 picks a free one.")] = 4000
    data_dir: Annotated[str, Meta(description="Where the log lives; made if it is not there.")] = "./data"
    api_keys: Annotated[
        str,
        Meta(description="Comma-separated keys, each `key`, `key:scopes`, `key:scopes:prefixes` or `key::prefixes`."),
    ] = ""
    allow_insecure_no_auth: Annotated[bool, Meta(description="Listen beyond loopback without keys.")] = False
    allow_link_local: Annotated[bool, Meta(description="Routers may reach link-local and metadata addresses.")] = False
    probe_auth: Annotated[bool, Meta(description="Health and readiness need a key too.")] = False
    access_log: Annotated[bool, Meta(description="One JSON line per request on standard error.")] = False
    checkpoint_bytes: Annotated[int, Meta(description="WAL growth after which a checkpoint is due.")] = 64 << 20
    cache_bytes: Annotated[int, Meta(description="Sealed records that are kept in memory.")] = 64 << 20
    max_header_bytes: Annotated[int, Meta(description="Bytes of a request's line and headers.")] = 32 << 10
    header_timeout_ms: Annotated[int, Meta(description="Time for a request's headers to arrive.")] = 10_000
    body_timeout_ms: Annotated[int, Meta(description="Time without progress while a body arrives.")] = 30_000
    idle_timeout_ms: Annotated[int, Meta(description="Time after which an idle connection is closed.")] = 75_000
    shutdown_timeout_ms: Annotated[int, Meta(description="Time for requests in flight at shutdown.")] = 10_000
    stuck_timeout_ms: Annotated[int, Meta(description="Time without progress after which a stream is closed.")] = 30_000
    watch_ttl_ms: Annotated[int, Meta(description="Idle time after which a watch session is dropped.")] = 300_000
    max_connections: Annotated[int, Meta(description="Open connections; 0 is off.")] = 50_000
    metrics_topics: Annotated[int, Meta(description="Topics that the metrics list one by one.")] = 1000
    pressure_delay_ms: Annotated[int, Meta(description="Event-loop delay at which requests are throttled.")] = 1000
    pressure_bytes: Annotated[int, Meta(description="Bytes waiting for the disk at which writes are throttled.")] = (
        256 << 20
    )
    limits: Limits = Limits()

    def check(self) -> None:
        """Refuses to start where starting would be wrong."""
        for name, value in self.shown().items():
            if isinstance(value, int) and value < 0:
                raise InvalidRequest(f"TOPICS_{name.upper()} must be 0 or more, got {value}")
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"TOPICS_PORT must be between 0 and 65535, got {self.port}")
        if not self.api_keys.strip() and not self.allow_insecure_no_auth and not is_loopback(self.host):
            raise InvalidRequest(
                f"TOPICS_HOST {self.host} is reachable from outside and TOPICS_API_KEYS is empty: set keys, listen on "
                "127.0.0.1, or say TOPICS_ALLOW_INSECURE_NO_AUTH=1"
            )

    def shown(self) -> dict[str, object]:
        """What is in force, without secrets."""
        whole: dict[str, object] = {}
        for name in self.__struct_fields__:
            if name == "limits":
                whole |= {each: getattr(self.limits, each) for each in self.limits.__struct_fields__}
            elif name != "api_keys":
                whole[name] = getattr(self, name)
        return whole

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.shown().items())})"


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
