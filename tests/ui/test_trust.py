"""Who may see what, and that nothing that others wrote is ever more than text."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.http.server import Child, child, client_of, write
from tests.live_clients.conftest import Mortal, mortal
from tests.ui.conftest import ESCAPE, MakesPage, Page

__all__ = ["mortal"]

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\"'`${window.pwned=1}"
SECRET, READER = "the-secret-key", "only-reads"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    keys = f"{SECRET},{READER}:read:open."
    with child(tmp_path_factory.mktemp("locked"), TOPICS_API_KEYS=keys) as started:
        yield started.wait_until_ready()


def with_key(server: Child, key: str) -> httpx.Client:
    return client_of(server.url, headers={"authorization": f"Bearer {key}"})


def test_the_page_asks_for_a_key_and_keeps_it_to_itself(make_page: MakesPage, locked: Child) -> None:
    page = make_page(locked.url)
    page.expect("401 (Unauthorized)")
    with with_key(locked, SECRET) as client:
        write(client, "open.orders", 1, 2, 3)
        page.open("topics/open.orders")
        page.see("dialog", "This server asks for a key")
        page.shoot("key")
        page.fill("#key-input", "wrong")
        page.click("dialog button.main", "Use this key")
        page.see("dialog .problem", "the key is not known")
        page.fill("#key-input", SECRET)
        page.click("dialog button.main", "Use this key")
        page.gone("dialog")
        page.see("[data-field=head_seq] b", "3")
        page.see("#state", "connected")
        # A stream carries it in its head, too.
        page.choose(".tail select", "zero")
        page.click(".tail button.main", "Start tail")
        page.until(lambda: len(page.all(".rec")) == 3, "the tail")
        write(client, "open.orders", 4)
        page.until(lambda: len(page.all(".rec")) == 4, "what is new")
    kept = page.run(
        "return JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, history.state,"
        " performance.getEntriesByType('resource').map(entry => entry.name), document.documentElement.outerHTML])"
    )
    assert SECRET not in kept
    assert "token" not in kept
    # Gone with the page.
    page.open("topics").see("dialog", "This server asks for a key")


def test_who_closes_the_question_is_not_asked_again_and_again(make_page: MakesPage, locked: Child) -> None:
    page = make_page(locked.url)
    page.expect("401 (Unauthorized)")
    page.open("topics/open.orders")
    page.see("dialog", "This server asks for a key")
    page.press(ESCAPE)
    page.gone("dialog")
    page.see("#state", "needs a key")
    asked = page.run("return performance.getEntriesByType('resource').length")
    page.until(lambda: page.run("return performance.getEntriesByType('resource').length") > asked, "another look")
    assert not page.all("dialog")
    page.click("#key", "Key")
    page.fill("#key-input", SECRET)
    page.click("dialog button.main", "Use this key")
    page.see("#state", "connected")


def test_a_key_sees_what_it_may_and_is_told_what_it_may_not(make_page: MakesPage, locked: Child) -> None:
    page = make_page(locked.url)
    page.expect("401 (Unauthorized)", "403 (Forbidden)")
    with with_key(locked, SECRET) as client:
        write(client, "open.orders", 1)
        write(client, "hidden.orders", 1)
    page.open("topics/open.orders")
    page.fill("#key-input", READER)
    page.click("dialog button.main", "Use this key")
    page.see(".row .name", "open.orders")
    assert not [name for name in page.texts(".row .name") if name.startswith("hidden")]
    page.click(".detail button", "Write")
    page.find("#write-text").send_keys("1")
    page.click("dialog button.main", "Write")
    page.see("dialog .problem", "lacks the scope write")
    page.press(ESCAPE)
    page.go("topics/hidden.orders").see(".detail .problem", "no access to topic")


def test_what_others_wrote_is_only_ever_text(page: Page, client: httpx.Client) -> None:
    name = "constructor"
    record = {"data": {HOSTILE: HOSTILE}, "node": HOSTILE[:120], "tag": HOSTILE[:200], "meta": {HOSTILE: HOSTILE}}
    client.put(f"/v0/topics/{name}", json={"type": "queue"})
    client.post(f"/v0/topics/{name}", json={"records": [record, record]})
    client.post(f"/v0/topics/{name}/claim", json={"node": HOSTILE})
    fields = {HOSTILE: HOSTILE, "__proto__": {"polluted": 1}, "name": HOSTILE, "error": HOSTILE, "stage": HOSTILE}
    fields |= {"records": [HOSTILE], "state": HOSTILE, "ts": HOSTILE, "records_per_s": HOSTILE}
    write(client, "pipelines.progress", {"pipeline": HOSTILE, "lag": HOSTILE, "lost": {HOSTILE: HOSTILE}, **fields})
    page.open(f"topics/{name}")
    page.see(".leases .who", HOSTILE)
    page.choose(".tail select", "zero")
    page.click(".tail button.main", "Start tail")
    page.until(lambda: len(page.all(".rec")) == 2, "two records")
    page.click(".rec .data")
    page.see(".rec pre", "onerror=window.pwned=1", "meta")
    page.see(".rec .data", "onerror=window.pwned=1")
    page.click(".try button", "Claim")
    page.see(".held code", "onerror")
    page.shoot("hostile")
    assert page.run("const part = document.querySelector('.detail'); return part.scrollWidth <= part.clientWidth")
    page.go("pipelines").see(".pipeline", HOSTILE)
    page.go(f"topics/{'%3Cimg%20src=x%20onerror=window.pwned=1%3E'}")
    page.expect("400 (Bad Request)")
    page.see(".detail .problem", "a name is 1 to 255")
    assert page.run("return [window.pwned ?? null, ({}).polluted ?? null]") == [None, None]
    assert page.run("return document.querySelectorAll('main img, main script, dialog img').length") == 0
    long = "x" * 255
    write(client, long, 1)
    page.go(f"topics/{long}").see("h1", long)
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_nothing_is_asked_of_anybody_else(page: Page, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    for place in ("topics", f"topics/{topic}", "routers", "pipelines", "server"):
        page.open(place)
        page.find("h1")
        asked = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert asked
        assert all(address.startswith(page.url) for address in asked)


def test_an_error_in_the_console_would_be_seen(page: Page) -> None:
    """The other tests rely on it."""
    page.open()
    page.run(
        "console.error('deliberate'); const image = document.createElement('img');"
        "image.src = 'https://elsewhere.invalid/'; document.body.append(image)"
    )
    seen: list[str] = []

    def has_seen_both() -> bool:
        seen.extend(page.problems())
        return any("deliberate" in line for line in seen) and any("Content Security Policy" in line for line in seen)

    page.until(has_seen_both, "both problems")


def test_the_page_outlives_a_server_that_is_killed(make_page: MakesPage, mortal: Mortal) -> None:
    page = make_page(mortal.url)
    page.expect(
        "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "503 (Service", "ERR_INCOMPLETE"
    )
    page.expect("404 (Not Found)", "ERR_SOCKET")
    with mortal.client() as client:
        write(client, "t", *range(1, 6))
    page.open("topics/t")
    page.choose(".tail select", "zero")
    page.click(".tail button.main", "Start tail")
    page.until(lambda: len(page.all(".rec")) == 5, "five records")
    mortal.kill()
    page.see("#state", "not reachable")
    mortal.restart()
    with mortal.client() as client:
        write(client, "t", *range(6, 11))
    page.until(lambda: len(page.all(".rec")) == 10, "ten records")
    assert page.texts(".rec .data") == [str(number) for number in range(1, 11)]
    page.see("#state", "connected")
