"""Topics on the page: make, write, tail, and every loss where it is."""

from __future__ import annotations

import httpx

from tests.http.server import datas, diff, write
from tests.ui.conftest import DASH, DOWN, ENTER, ESCAPE, UP, Page


def test_a_topic_is_made_and_written_to(page: Page, client: httpx.Client, topic: str) -> None:
    page.open()
    page.click("aside button.main", "New topic")
    page.fill("#field-topic", topic)
    page.fill("#field-cap_records", "50")
    page.fill("#field-ttl_ms", "7d")
    page.shoot("create")
    page.click("dialog button.main", "Create")
    page.see("h1", topic)
    config = client.get(f"/v0/topics/{topic}").json()["config"]
    assert (config["cap_records"], config["ttl_ms"], config["type"]) == (50, 604_800_000, "log")
    page.see(".row .name", topic)
    page.see(".axis", "Nothing was written yet")

    page.click("button", "Write")
    page.find("#write-text").send_keys('{"a": 1.0, "b": 12345678901234567890}\n"x"\n')
    page.fill("#field-tag", "t<1>")
    page.click("dialog button.main", "Write")
    page.see("#toasts", f"2 written as 1 {DASH} 2")
    raw = client.post(f"/v0/topics/{topic}/diff", json={"include_tags": True}).text
    # As it stands: no number was read and written again.
    assert '"data":{"a": 1.0, "b": 12345678901234567890}' in raw
    assert raw.count('"$tag":"t<1>"') == 2
    page.press(ESCAPE)
    page.see("[data-field=head_seq]", "2")
    page.until(lambda: page.ranges() == [(1, 2, "live")], "two records on the axis")


def test_what_the_server_refuses_is_said_at_the_field(page: Page, client: httpx.Client, topic: str) -> None:
    page.expect("400 (Bad Request)", "409 (Conflict)")
    page.open()
    page.click("aside button.main", "New topic")
    page.fill("#field-topic", f"-{topic}")
    page.click("dialog button.main", "Create")
    page.see("dialog .problem", "starts with a letter or digit")
    assert page.find("#field-topic").get_attribute("aria-invalid") == "true"
    page.fill("#field-topic", topic)
    page.fill("#field-cap_records", "many")
    page.click("dialog button.main", "Create")
    page.see("dialog .problem", "cap_records")
    assert page.find("#field-cap_records").get_attribute("aria-invalid") == "true"
    assert page.find("#field-topic").get_attribute("aria-invalid") is None
    page.shoot("create-refused")
    assert client.get(f"/v0/topics/{topic}").status_code == 404
    # A line that is no JSON does not leave the page.
    page.press(ESCAPE)
    write(client, topic, 1)
    page.go(f"topics/{topic}").see("[data-field=head_seq]", "1")
    page.press("w")
    page.find("#write-text").send_keys('{"fine": 1}\n{broken')
    page.click("dialog button.main", "Write")
    page.see("dialog .problem", "line 2 is not JSON")
    assert datas(client, topic) == [1]


def test_a_topic_is_changed_and_deleted(page: Page, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 5, "ttl_ms": 60_000})
    page.open(f"topics/{topic}")
    page.click(".detail button", "Change")
    assert page.find("#field-ttl_ms").get_attribute("value") == "60000"
    page.fill("#field-cap_records", "9")
    page.click("dialog button.main", "Change")
    page.see("#toasts", "is changed")
    config = client.get(f"/v0/topics/{topic}").json()["config"]
    assert (config["cap_records"], config["ttl_ms"]) == (9, 60_000)
    page.click(".detail button", "Delete")
    assert not page.find("dialog button.danger").is_enabled()
    page.fill("#delete-name", topic)
    page.click("dialog button.danger", "Delete for good")
    page.see(".welcome", "No loss is ever silent")
    assert client.get(f"/v0/topics/{topic}").status_code == 404


def test_the_tail_shows_records_as_they_come(page: Page, client: httpx.Client, topic: str) -> None:
    write(client, topic, "old")
    page.open(f"topics/{topic}")
    page.click(".tail button.main", "Start tail")
    page.see(".tail header", "live")
    records = [{"data": {"n": 1.0}, "node": "web-1", "tag": "a"}, {"data": "two", "meta": {"k": "v"}}]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    page.until(lambda: len(page.all(".rec")) == 2, "two records")
    assert page.texts(".rec .data") == ['{"n":1.0}', '"two"']
    assert page.texts(".rec .tag") == ["web-1", "a"]
    page.click(".rec .data", "two")
    page.see(".rec pre", '"two"', '"k": "v"')
    page.see(".axis .reader", "tail 3")
    page.shoot("tail")


def test_a_tail_that_is_paused_misses_nothing_and_is_told_what_was_lost(
    page: Page, client: httpx.Client, topic: str
) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 20})
    page.open(f"topics/{topic}")
    page.see(".axis", "Nothing was written yet")
    page.press("t")
    page.see(".tail header", "live")
    write(client, topic, *range(1, 6))
    page.until(lambda: len(page.all(".rec")) == 5, "five records")
    page.press("t")
    page.see(".tail header", "paused behind seq 5")
    write(client, topic, *range(6, 31))
    page.press("t")
    page.until(lambda: len(page.all(".rec")) == 25, "the rest")
    told = page.run(
        "return [...document.querySelectorAll('.records > *')].map(row =>"
        " row.dataset.seq ? Number(row.dataset.seq) : [Number(row.dataset.from), Number(row.dataset.to)])"
    )
    assert told == [1, 2, 3, 4, 5, [6, 10], *range(11, 31)]
    page.see(".records .loss", f"lost 6 {DASH} 10", "5 seqs")
    page.run("document.querySelector('.records .loss').scrollIntoView({block: 'center'})")
    page.shoot("tail-loss")


def test_a_tail_keeps_a_bounded_number_of_rows(page: Page, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 3000})
    for _ in range(4):
        write(client, topic, *range(1000))
    page.open(f"topics/{topic}")
    page.choose(".tail select", "zero")
    page.click(".tail button.main", "Start tail")
    page.until(lambda: page.text(".records > :last-child .seq") == "4,000", "the end")
    assert len(page.all(".records > *")) <= 500
    # Nothing is left out in silence: what is not in sight is counted.
    page.see(".above", "earlier records")
    shown, above = len(page.all(".rec")), page.text(".above")
    losses = len(page.all(".records .loss"))
    counted = int(above.split()[1].replace(",", ""))
    assert shown + counted == 3000
    assert losses == 1 or "1 loss" in above


def test_a_loss_is_drawn_when_a_cap_bites(page: Page, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 100})
    write(client, topic, *range(100))
    page.open(f"topics/{topic}")
    page.until(lambda: page.ranges() == [(1, 100, "live")], "a whole axis")
    write(client, topic, *range(60))
    page.until(lambda: page.ranges() == [(1, 60, "cap"), (61, 160, "live")], "the loss")
    client.post(f"/v0/topics/{topic}", json={"records": [{"hole": 8, "reason": "source_trim"}]})
    records = [{"data": n, "tag": "gone" if 10 <= n < 20 else "kept"} for n in range(40)]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    client.post(f"/v0/topics/{topic}/delete", json={"match": "gone"})
    expected = [(1, 100, "cap"), (101, 160, "live"), (161, 168, "source_trim"), (169, 178, "live")]
    expected += [(179, 188, "deleted"), (189, 208, "live")]
    page.until(lambda: page.ranges() == expected, "every kind")
    # Each is as long as it should be.
    widths = page.run(
        "const lane = document.querySelector('.lane .bed').getBBox().width;"
        "return [...document.querySelectorAll('.lane .range')].map(g =>"
        " [(Number(g.dataset.last) - Number(g.dataset.first) + 1) / 208, g.getBBox().width / lane])"
    )
    assert all(abs(wanted - drawn) < 0.003 for wanted, drawn in widths)
    page.see(".axis", "evict_floor = earliest_seq 101", "head_seq 208")
    assert page.find(".axis").get_attribute("aria-label") == (
        "Seqs 1 to 208: 90 live, 10 deleted, 100 evicted, 8 lost upstream"
    )
    page.see(".legend", "100evicted", "8lost upstream")
    page.click(".ranges summary")
    page.see(".ranges tbody tr", "evictedcap", "holesource_trim")
    page.shoot("loss")
    page.see(".row[aria-selected=true]", "100 lost · 1 hole")


def test_a_loss_is_never_thinner_than_three_pixels(page: Page, client: httpx.Client, topic: str) -> None:
    for number in range(20):
        client.post(f"/v0/topics/{topic}?return_seqs=false", json={"records": [{"data": 0}] * 5000})
        if number == 9:
            client.post(f"/v0/topics/{topic}", json={"records": [{"hole": 1, "reason": "source_trim"}]})
    page.open(f"topics/{topic}")
    page.until(lambda: (50_001, 50_001, "source_trim") in page.ranges(), "the one lost seq")
    width = page.run("return document.querySelector('.lane .source_trim').getBBox().width")
    assert width >= 3
    # One can go there: keys move and zoom the axis.
    page.run("document.querySelector('.axis').focus()")
    for _ in range(5):
        page.press("+")
    page.until(
        lambda: page.run("return document.querySelector('.extent').textContent") != f"1 {DASH} 100,001", "a zoom"
    )
    first, last = (int(part.replace(",", "")) for part in page.text(".extent").split(DASH))
    assert last - first < 5000
    page.shoot("zoom")
    page.press("0")
    page.see(".extent", f"1 {DASH} 100,001")


def test_more_ranges_than_an_answer_holds_are_said_and_found(page: Page, client: httpx.Client, topic: str) -> None:
    records = [{"data": n, "tag": "gone" if n % 2 else "kept"} for n in range(6000)]
    client.post(f"/v0/topics/{topic}?return_seqs=false", json={"records": records})
    client.post(f"/v0/topics/{topic}/delete", json={"match": "gone"})
    page.open(f"topics/{topic}")
    page.until(lambda: any(look == "unknown" for _, _, look in page.ranges()), "what was not asked for")
    page.see(".legend", "not asked for")
    page.run("document.querySelector('.axis').focus()")
    for _ in range(5):
        page.press("+")
    page.until(lambda: not any(look == "unknown" for _, _, look in page.ranges()), "what is in sight")


def test_everything_works_by_keys(page: Page, client: httpx.Client, topic: str) -> None:
    for name in ("a", "b", "c"):
        write(client, f"{topic}.{name}", name)
    page.open()
    page.find(".row")
    page.press("/")
    page.until(lambda: page.driver.switch_to.active_element.get_attribute("id") == "search", "the search")
    page.press(f"{topic}.")
    page.until(lambda: page.texts(".row .name") == [f"{topic}.a", f"{topic}.b", f"{topic}.c"], "three topics")
    page.press(DOWN, DOWN, UP, ENTER)
    page.see("h1", f"{topic}.b")
    # Out of the search, first emptied, and then back to the list.
    page.press(ESCAPE)
    page.until(lambda: len(page.texts(".row .name")) > 3, "the whole list")
    page.press(ESCAPE, ESCAPE)
    page.see(".welcome", "No loss")
    page.press("?")
    page.see("dialog", "Keys and colours", "lost in a crash")
    page.shoot("help")
    page.press(ESCAPE)
    page.gone("dialog")
    page.press("4")
    page.see("h1", "Server")
    page.press("1")
    page.find(".row")
    page.press("n")
    page.see("dialog h2", "New topic")
    assert page.driver.switch_to.active_element.get_attribute("id") == "field-topic"


def test_rates_come_from_one_look_to_the_next(page: Page, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    page.open(f"topics/{topic}")
    page.see("[data-field=rate]", "/s")
    write(client, topic, *range(500))
    page.until(lambda: page.text(".row[aria-selected=true] .rate").startswith(("1", "2", "3", "4", "5")), "a rate")
    assert diff(client, topic, from_seq=500)["head_seq"] == 501
