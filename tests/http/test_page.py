"""`/ui` without a browser: who may have it, what it may do, how it is kept."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from tests.http.server import LocalServer, error_of, local_server

UI = files("topics.http").joinpath("ui")
NAMES = sorted(entry.name for entry in UI.iterdir())


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that wants a key for everything that it may want one for."""
    with (
        local_server(tmp_path_factory.mktemp("locked"), api_keys="secret", probe_auth=True) as server,
        server.client() as client,
    ):
        yield client


def test_the_page_is_html(client: httpx.Client) -> None:
    answer = client.get("/ui")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.content == UI.joinpath("index.html").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_every_file_of_the_page_is_served(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/ui/{name}")
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == kinds[name.rpartition(".")[2]]
    assert answer.content == UI.joinpath(name).read_bytes()


def test_the_page_needs_no_key(locked: httpx.Client) -> None:
    assert locked.get("/v0/health").status_code == 401
    assert locked.get("/ui").status_code == 200
    for name in NAMES:
        assert locked.get(f"/ui/{name}").status_code == 200


def test_the_page_may_load_nothing_from_elsewhere_and_make_no_markup_of_text(client: httpx.Client) -> None:
    for path in ("/ui", "/ui/main.js"):
        headers = client.get(path).headers
        policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "'none'")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "icon.svg"])
def test_no_file_names_another_place(name: str) -> None:
    text = UI.joinpath(name).read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)[\w.]+", text)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert sink not in text


def test_only_the_theme_is_ever_stored() -> None:
    stores = [line for name in NAMES for line in UI.joinpath(name).read_text().splitlines() if "Storage" in line]
    assert len(stores) == 2
    assert all("topics.theme" in line for line in stores)
    assert not [name for name in NAMES if "document.cookie" in UI.joinpath(name).read_text()]


def test_a_file_that_the_browser_has_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/ui/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", {tag}', tag.removeprefix("W/"), "*"):
        again = client.get("/ui/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag), known
        assert "content-length" not in again.headers
        assert "content-security-policy" in again.headers
    assert client.get("/ui/main.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert client.get("/ui").headers["etag"] != tag


def test_it_is_not_sent_again_over_http_2_either(server: LocalServer) -> None:
    with server.client(http1=False, http2=True) as client:
        tag = client.get("/ui").headers["etag"]
        again = client.get("/ui", headers={"if-none-match": tag})
        assert (again.http_version, again.status_code, again.content) == ("HTTP/2", 304, b"")


def test_the_page_has_one_address(client: httpx.Client) -> None:
    answer = client.get("/ui/")
    assert answer.status_code == 308
    assert str(answer.next_request and answer.next_request.url) == str(client.get("/ui").url)


def test_head_and_refusals(client: httpx.Client) -> None:
    head = client.head("/ui")
    assert (head.status_code, head.content) == (200, b"")
    assert error_of(client.get("/ui/nothing.js")) == (404, "not_found")
    assert error_of(client.get("/ui/../routes.py")) == (404, "not_found")
    assert error_of(client.get("/ui/%2e%2e%2froutes.py")) == (404, "not_found")
    assert error_of(client.get("/ui/a/b")) == (404, "not_found")
    assert error_of(client.post("/ui", json={})) == (405, "method_not_allowed")


def test_a_wheel_has_every_file(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.removeprefix("topics/http/ui/") for name in archive.namelist() if "/ui/" in name}
    assert packed == set(NAMES)
