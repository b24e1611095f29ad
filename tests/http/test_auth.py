"""Auth of section 1: keys, scopes, prefixes, who owns what, and that no key is ever shown."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server import LocalServer, child, error_of, local_server
from tests.http.wire import Wire, chunked, record, request
from topics.core.errors import InvalidRequest
from topics.http.auth import parse_keys
from topics.http.server import Server
from topics.http.settings import Settings

KEYS = {
    "all-secret": "",
    "read-secret": ":read",
    "write-secret": ":write",
    "delete-secret": ":delete",
    "admin-secret": ":admin",
    "short-secret": ":r+w+d+a",
    "rw-secret": ":rw",
    "many-secret": ":read+delete",
    "a-secret": ":rw:a",
    "ab-secret": "::a|b.",
    "other-secret": "",
    "colon-secret": "::a:b",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    keys = ",".join(key + rest for key, rest in KEYS.items())
    with local_server(tmp_path_factory.mktemp("auth"), api_keys=keys) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    """A client without a key of its own."""
    with server.client() as opened:
        yield opened


def ask(client: httpx.Client, key: str, method: str, path: str, body: Any = None) -> httpx.Response:
    return client.request(method, path, json=body, headers={"authorization": f"Bearer {key}-secret"})


def status(client: httpx.Client, key: str, method: str, path: str, body: Any = None) -> int:
    answer = ask(client, key, method, path, body)
    if answer.status_code in (401, 403):
        assert error_of(answer)[1] == {401: "unauthorized", 403: "forbidden"}[answer.status_code]
    return answer.status_code


RECORDS = {"records": [{"data": 1}]}
ROUTES: list[tuple[str, str, Any, set[str]]] = [
    ("GET", "/v0/topics", None, {"read"}),
    ("GET", "/v0/topics/t", None, {"read"}),
    ("POST", "/v0/topics/t/diff", {}, {"read"}),
    ("GET", "/v0/topics/t/seek?ts=0", None, {"read"}),
    ("GET", "/v0/topics/t/deletes", None, {"read"}),
    ("GET", "/v0/topics/t/ranges", None, {"read"}),
    ("GET", "/v0/metrics", None, {"read"}),
    ("POST", "/v0/topics/t", RECORDS, {"write"}),
    ("POST", "/v0/topics/t?txn=x&part=p&chunk=0", RECORDS, {"write"}),
    ("GET", "/v0/txns/x", None, {"write"}),
    ("POST", "/v0/txns/x/commit", {"parts": []}, {"write"}),
    ("POST", "/v0/txns/x/abort", None, {"write"}),
    ("POST", "/v0/topics/t/delete", {"before_seq": 0}, {"delete"}),
    ("DELETE", "/v0/topics/gone", None, {"delete"}),
    ("PUT", "/v0/topics/t", {}, {"admin"}),
    ("POST", "/v0/topics/t", {**RECORDS, "config": {}}, {"write", "admin"}),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "scopes"), ROUTES, ids=[f"{method} {path}" for method, path, _, _ in ROUTES]
)
def test_a_route_needs_its_scope(client: httpx.Client, method: str, path: str, body: Any, scopes: set[str]) -> None:
    ask(client, "all", "PUT", "/v0/topics/t")
    for key in ("read", "write", "delete", "admin"):
        expected = {key} >= scopes
        assert (status(client, key, method, path, body) != 403) is expected, key
    assert status(client, "all", method, path, body) not in (401, 403)
    assert status(client, "short", method, path, body) not in (401, 403)
    assert (status(client, "rw", method, path, body) != 403) is ({"read", "write"} >= scopes)
    assert (status(client, "many", method, path, body) != 403) is ({"read", "delete"} >= scopes)


@pytest.mark.parametrize(
    ("method", "path", "body", "scopes"), ROUTES, ids=[f"{method} {path}" for method, path, _, _ in ROUTES]
)
def test_a_route_needs_a_key(client: httpx.Client, method: str, path: str, body: Any, scopes: set[str]) -> None:
    answer = client.request(method, path, json=body)
    assert error_of(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_a_forbidden_answer_names_the_scope(client: httpx.Client) -> None:
    answer = ask(client, "read", "POST", "/v0/topics/t", RECORDS)
    assert "write" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Basic YWxsLXNlY3JldA==",
        "all-secret",
        "Bearer nobody",
        "Bearer all-secre",
        "Bearer all-secret2",
        "Bearer ALL-SECRET",
        "Bearer all-secret:read",
        "Token all-secret",
        "Bearer all-secret,read-secret",
        "Bearer " + "x" * 5000,
    ],
)
def test_a_header_that_is_no_known_key_is_401(client: httpx.Client, header: str) -> None:
    answer = client.get("/v0/topics", headers={"authorization": header})
    assert error_of(answer) == (401, "unauthorized")
    assert "secret" not in answer.text


def test_the_scheme_is_case_insensitive(client: httpx.Client) -> None:
    assert client.get("/v0/topics", headers={"authorization": "bearer all-secret"}).status_code == 200


def test_a_key_may_be_any_text(tmp_path: Path) -> None:
    with local_server(tmp_path, api_keys="schlüssel") as server, server.client() as client:
        assert client.get("/v0/topics", headers={b"authorization": "Bearer schlüssel".encode()}).status_code == 200
        for wrong in (b"Bearer schl\xfcssel", b"Bearer \xff"):
            assert client.get("/v0/topics", headers={b"authorization": wrong}).status_code in (400, 401)


def test_a_key_in_a_trailer_is_no_key(server: LocalServer, client: httpx.Client) -> None:
    body = record(1)
    head = request("POST", "/v0/topics/t", None, "transfer-encoding: chunked", "content-type: application/json")
    trailed = chunked(body)[:-2] + b"authorization: Bearer all-secret\r\n\r\n"
    with Wire(server.port) as wire:
        assert wire.ask(head + trailed).status == 401


def test_a_key_in_the_query_is_no_key(client: httpx.Client) -> None:
    assert error_of(client.get("/v0/topics?key=all-secret&api_key=all-secret")) == (401, "unauthorized")


def test_http_2_needs_a_key_too(server: LocalServer) -> None:
    with server.client(http1=False, http2=True) as own:
        assert error_of(own.get("/v0/topics")) == (401, "unauthorized")
        assert status(own, "read", "GET", "/v0/topics") == 200
        assert status(own, "read", "PUT", "/v0/topics/t") == 403


# -- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "name", "allowed"),
    [
        ("a", "a", True),
        ("a", "abc", True),
        ("a", "b", False),
        ("a", "A", False),
        ("ab", "a1", True),
        ("ab", "b.x", True),
        ("ab", "bx", False),
        ("colon", "a:b", True),
        ("colon", "a:bc", True),
        ("colon", "a", False),
        ("all", "zzz", True),
    ],
)
def test_the_path_must_have_a_prefix_of_the_key(client: httpx.Client, key: str, name: str, allowed: bool) -> None:
    for method, path, body in (
        ("GET", "", None),
        ("POST", "", RECORDS),
        ("POST", "?txn=prefixes&part=p&chunk=0", RECORDS),
        ("POST", "/diff", {}),
        ("GET", "/seek?ts=0", None),
        ("GET", "/deletes", None),
    ):
        assert (status(client, key, method, f"/v0/topics/{name}{path}", body) != 403) is allowed, path


def test_a_prefix_is_checked_before_existence_is_told(client: httpx.Client) -> None:
    ask(client, "all", "PUT", "/v0/topics/hidden")
    there = ask(client, "a", "GET", "/v0/topics/hidden")
    absent = ask(client, "a", "GET", "/v0/topics/hidde2")
    assert (there.status_code, absent.status_code) == (403, 403)
    assert there.text.replace("hidden", "hidde2") == absent.text


def test_an_escaped_name_is_checked_as_it_is_meant(client: httpx.Client) -> None:
    assert status(client, "a", "GET", "/v0/topics/%62") == 403
    assert status(client, "a", "GET", "/v0/topics/%61") in (200, 404)
    assert status(client, "a", "POST", "/v0/topics/a%2F..%2Fhidden/diff", {}) in (400, 403, 404)


def test_lists_are_filtered(client: httpx.Client) -> None:
    for name in ("a.list", "b.list", "bx.list", "c.list"):
        ask(client, "all", "PUT", f"/v0/topics/{name}")

    def names(key: str, query: str = "") -> list[str]:
        body = ask(client, key, "GET", f"/v0/topics?page_size=1000{query}").json()
        return [each["topic"] for each in body["topics"]]

    assert "c.list" in names("all")
    assert all(name.startswith("a") for name in names("a"))
    assert "a.list" in names("a")
    assert {name for name in names("ab") if name.endswith(".list")} == {"a.list", "b.list"}
    assert names("a", "&prefix=c") == []


def test_pages_of_a_filtered_list_do_not_tell_what_is_hidden(client: httpx.Client) -> None:
    for name in ("b.p1", "b.p2", "bz.hidden", "c.hidden2"):
        ask(client, "all", "PUT", f"/v0/topics/{name}")
    body = ask(client, "ab", "GET", "/v0/topics?prefix=b.p&page_size=2").json()
    assert [each["topic"] for each in body["topics"]] == ["b.p1", "b.p2"]
    assert "next_cursor" not in body


def test_metrics_list_only_what_a_key_may_see(client: httpx.Client) -> None:
    for name in ("a.seen", "z.unseen"):
        ask(client, "all", "PUT", f"/v0/topics/{name}")
    text = ask(client, "a", "GET", "/v0/metrics").text
    assert "a.seen" in text
    assert "z.unseen" not in text
    assert "z.unseen" in ask(client, "all", "GET", "/v0/metrics").text


def test_a_dead_letter_in_a_body_must_have_a_prefix(client: httpx.Client) -> None:
    config = {"type": "queue", "dead_letter": "z.dead"}
    assert status(client, "ab", "PUT", "/v0/topics/a.queue", config) == 403
    assert status(client, "ab", "POST", "/v0/topics/a.queue", {**RECORDS, "config": config}) == 403
    assert status(client, "all", "GET", "/v0/topics/a.queue") == 404
    assert status(client, "ab", "PUT", "/v0/topics/a.queue", {"type": "queue", "dead_letter": "a.dead"}) == 201


def test_the_topics_of_a_commit_must_have_a_prefix(client: httpx.Client) -> None:
    ask(client, "a", "POST", "/v0/topics/a.txn?txn=named&part=p&chunk=0", RECORDS)
    body = {"parts": [{"part": "p", "records": {"a.txn": 1, "z.txn": 1}}]}
    assert status(client, "a", "POST", "/v0/txns/named/commit", body) == 403
    assert status(client, "a", "GET", "/v0/txns/named") == 200


# -- owners ----------------------------------------------------------------------------------------------------------


def test_a_transaction_belongs_to_the_key_that_made_it(client: httpx.Client) -> None:
    path = "/v0/topics/a.mine?txn=mine&part=p&chunk="
    assert status(client, "all", "POST", f"{path}0", RECORDS) == 200
    commit = {"parts": [{"part": "p", "records": {"a.mine": 1}}]}
    assert status(client, "other", "GET", "/v0/txns/mine") == 404
    assert status(client, "other", "POST", f"{path}1", RECORDS) == 404
    assert status(client, "other", "POST", "/v0/txns/mine/commit", commit) == 404
    assert status(client, "other", "POST", "/v0/txns/mine/abort") == 404
    assert status(client, "all", "POST", "/v0/txns/mine/commit", commit) == 200


# -- probes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v0/health", "/healthz", "/v0/ready", "/readyz"])
def test_probes_are_open(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


def test_probes_need_a_key_when_told_so(tmp_path: Path) -> None:
    with local_server(tmp_path, api_keys="w-secret:write", probe_auth=True) as server, server.client() as client:
        for path in ("/v0/health", "/healthz", "/v0/ready", "/readyz"):
            assert error_of(client.get(path)) == (401, "unauthorized")
            assert status(client, "w", "GET", path) == 200


# -- start-up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        ",",
        "a-secret,",
        ",a-secret",
        "a-secret,,b-secret",
        ":read",
        "  :read",
        "a-secret:reed",
        "a-secret:read+",
        "a-secret:+",
        "a-secret:READ",
        "a-secret:read,b-secret:rx",
        "a-secret:read write",
        "a-secret:read:a||b",
        "a-secret:read:|",
        "a-secret::a|",
        "a-secret:read,a-secret:write",
    ],
)
def test_a_malformed_entry_stops_the_start_and_is_not_shown(tmp_path: Path, entry: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Server(Settings(data_dir=str(tmp_path), api_keys=entry))
    assert "TOPICS_API_KEYS" in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("entry", ["", "  "])
def test_no_keys_is_auth_off(entry: str) -> None:
    assert not parse_keys(entry).is_on


def test_spaces_around_entries_are_no_part_of_them(tmp_path: Path) -> None:
    with local_server(tmp_path, api_keys=" x-secret:read , y-secret ") as server, server.client() as client:
        assert status(client, "x", "GET", "/v0/topics") == 200
        assert status(client, "y", "PUT", "/v0/topics/a") == 201


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_a_bind_beyond_loopback_without_keys_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Settings(host=host).check()
    for word in ("TOPICS_HOST", "TOPICS_API_KEYS", "TOPICS_ALLOW_INSECURE_NO_AUTH"):
        assert word in caught.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    Settings(host=host).check()


def test_keys_or_the_word_for_it_allow_any_bind() -> None:
    Settings(host="0.0.0.0", api_keys="k").check()
    Settings(host="0.0.0.0", allow_insecure_no_auth=True).check()


def test_a_real_server_refuses_and_says_why(tmp_path: Path) -> None:
    with child(tmp_path, TOPICS_API_KEYS="hush-hush:reed") as server:
        code, said = server.wait_for_end()
    assert code == 1
    assert "TOPICS_API_KEYS" in said
    assert "hush" not in said


def test_a_real_server_beyond_loopback_without_keys_refuses(tmp_path: Path) -> None:
    with child(tmp_path, "--host", "0.0.0.0") as server:
        code, said = server.wait_for_end()
    assert code == 1
    assert "TOPICS_API_KEYS" in said


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_no_key_is_in_any_output_log_error_or_metric(tmp_path: Path) -> None:
    secrets = ("hush-hush", "mumble-mumble", "guess-guess")
    with child(tmp_path, TOPICS_API_KEYS="hush-hush:read,mumble-mumble:rw:a", TOPICS_ACCESS_LOG="true") as server:
        server.wait_until_ready()
        shown = []
        with server.client() as client:
            for secret in secrets:
                own = {"authorization": f"Bearer {secret}"}
                for method, path in (
                    ("GET", "/v0/topics"),
                    ("GET", "/v0/metrics"),
                    ("PUT", "/v0/topics/b"),
                    ("GET", "/v0/topics/b"),
                    ("GET", "/nothing"),
                    ("GET", "/openapi.json"),
                ):
                    shown.append(client.request(method, path, headers=own).text)
            broken = {"authorization": "Bearer hush-hush", "content-type": "application/json"}
            shown.append(client.post("/v0/topics/a/diff", content=b"{", headers=broken).text)
        server.terminate()
        code, said = server.wait_for_end()
    assert code == 0
    for secret in secrets:
        assert secret not in said
        assert secret not in "".join(shown)
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or secret.encode() not in file.read_bytes()
    lines = [json.loads(line) for line in server.err if line.startswith("{")]
    assert {line["status"] for line in lines} >= {200, 401, 403, 404, 400}


def test_only_digests_are_kept(server: LocalServer) -> None:
    keys = server.app.keys
    held: list[object] = [server.app.settings, server.server.settings, keys, *gc.get_referents(keys)]
    held += [item for each in gc.get_referents(keys) for item in gc.get_referents(each)]
    for each in held:
        assert "all-secret" not in repr(each)
