"""Every path and method, with the scope that it needs. `*` is a name."""

from __future__ import annotations

from topics.http import health, page, queues, ranges, records, routers, topics, txns, watch, ws
from topics.http.app import Route
from topics.http.auth import Scope

ROUTES: dict[str, dict[str, Route]] = {
    "/v0/topics": {"GET": Route("list_topics", topics.list_, Scope.READ)},
    "/v0/topics/*": {
        "PUT": Route("put_topic", topics.put, Scope.ADMIN, topic=True, changes=True),
        "GET": Route("get_topic", topics.get, Scope.READ, topic=True, looks=True),
        "POST": Route("write", records.write, Scope.WRITE, topic=True),
        "DELETE": Route("delete_topic", topics.delete, Scope.DELETE, topic=True, changes=True, looks=True),
    },
    "/v0/topics/*/diff": {"POST": Route("diff", records.diff, Scope.READ, topic=True, looks=True)},
    "/v0/topics/*/seek": {"GET": Route("seek", records.seek, Scope.READ, topic=True, looks=True)},
    "/v0/topics/*/delete": {
        "POST": Route("delete_records", records.delete, Scope.DELETE, topic=True, changes=True, looks=True)
    },
    "/v0/topics/*/deletes": {"GET": Route("list_deletes", records.deletes, Scope.READ, topic=True)},
    "/v0/topics/*/ranges": {"GET": Route("list_ranges", ranges.ranges, Scope.READ, topic=True, looks=True)},
    "/v0/topics/*/claim": {"POST": Route("claim", queues.claim, Scope.READ | Scope.WRITE, topic=True, looks=True)},
    "/v0/topics/*/ack": {"POST": Route("ack", queues.ack, Scope.WRITE, topic=True)},
    "/v0/topics/*/nack": {"POST": Route("nack", queues.nack, Scope.WRITE, topic=True)},
    "/v0/topics/*/extend": {"POST": Route("extend", queues.extend, Scope.WRITE, topic=True)},
    "/v0/topics/*/unblock": {"POST": Route("unblock", queues.unblock, Scope.ADMIN, topic=True)},
    "/v0/topics/*/redrive": {
        "POST": Route("redrive", queues.redrive, Scope.ADMIN, topic=True, changes=True, looks=True)
    },
    "/v0/topics/*/leases": {"GET": Route("list_leases", queues.leases, Scope.READ, topic=True, looks=True)},
    "/v0/topics/*/work": {"GET": Route("work", queues.work, Scope.READ | Scope.WRITE, topic=True, stream=True)},
    "/v0/routers": {"GET": Route("list_routers", routers.list_, Scope.READ)},
    "/v0/routers/*": {
        "PUT": Route("put_router", routers.put, Scope.ADMIN, changes=True),
        "GET": Route("get_router", routers.get, Scope.READ),
        "DELETE": Route("delete_router", routers.delete, Scope.DELETE, changes=True),
    },
    "/v0/txns/*": {"GET": Route("get_txn", txns.get, Scope.WRITE)},
    "/v0/txns/*/commit": {"POST": Route("commit_txn", txns.commit, Scope.WRITE, changes=True)},
    "/v0/txns/*/abort": {"POST": Route("abort_txn", txns.abort, Scope.WRITE)},
    "/v0/watch": {"POST": Route("create_watch", watch.create, Scope.READ)},
    "/v0/watch/*": {"GET": Route("watch", watch.stream, Scope.READ, stream=True)},
    "/v0/ws": {"GET": Route("websocket", ws.open_, Scope.NONE, stream=True)},
    "/v0/health": {"GET": Route("health", health.health, Scope.NONE)},
    "/healthz": {"GET": Route("health", health.health, Scope.NONE)},
    "/v0/ready": {"GET": Route("ready", health.ready, Scope.NONE)},
    "/readyz": {"GET": Route("ready", health.ready, Scope.NONE)},
    "/v0/metrics": {"GET": Route("metrics", health.metrics, Scope.READ)},
    "/openapi.json": {"GET": Route("openapi", health.openapi, Scope.READ)},
    "/ui": {"GET": Route("page", page.page, Scope.NONE, public=True)},
    "/ui/*": {"GET": Route("page_file", page.asset, Scope.NONE, public=True)},
}
