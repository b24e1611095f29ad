"""Routers as a graph, pipelines with their progress, and the server itself."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import msgspec

from tests.http.server import datas, write
from tests.ui.conftest import DASH, Page
from topics.core.progress import Progress

# Answers of a server with these routers, where a test wants a state that is hard to bring about.
_ROUTERS = """
const routers = __ROUTERS__;
const real = window.fetch;
window.fetch = (url, options) => {
  const { pathname, searchParams } = new URL(url);
  if (pathname !== "/v0/routers") return real(url, options);
  const source = searchParams.get("source");
  const found = routers.filter(each => !source || each.source === source);
  return Promise.resolve(new Response(JSON.stringify({ routers: found })));
};
"""


def router(
    name: str, source: object, dest: object, state: str = "running", lag: int = 0, **more: Any
) -> dict[str, Any]:
    fields = {"router": name, "source": source, "dest": dest, "state": state, "lag": lag, "cursor": 3}
    return {**fields, "forwarded_total": 3, "last_error": None, **more}


def serve(page: Page, *routers: dict[str, Any]) -> str:
    script = _ROUTERS.replace("__ROUTERS__", json.dumps(routers))
    made = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    identifier: str = made["identifier"]
    return identifier


def test_a_router_is_made_drawn_and_deleted(page: Page, client: httpx.Client, topic: str) -> None:
    page.expect("400 (Bad Request)")
    write(client, f"{topic}.a", *range(5))
    page.open("routers")
    page.click(".head button", "New router")
    page.fill("#field-router", topic)
    page.fill("#field-source", f"{topic}.a")
    page.fill("#field-dest", f"{topic}.a")
    page.click("dialog button.main", "Create")
    page.see("dialog .problem", "dest")
    page.fill("#field-dest", f"{topic}.b")
    page.choose("#field-start", "earliest")
    page.click("dialog button.main", "Create")
    page.find(f".edge.running[data-router='{topic}']")
    page.see(".box", f"{topic}.a", f"{topic}.b")
    page.see(f"tr[data-router='{topic}'] .tag", "running")
    assert datas(client, f"{topic}.b") == [0, 1, 2, 3, 4]
    page.shoot("router")
    # Its cursor stands on the axis of its source.
    page.go(f"topics/{topic}.a").see(".axis .reader", f"{topic} 5")
    page.go("routers")
    page.click("td button", topic)
    page.see(".facts", "forwarded_total", "exactly_once")
    page.click(".facts button", "Delete")
    page.fill("#delete-name", topic)
    page.click("dialog button.danger", "Delete for good")
    page.gone(f".edge[data-router='{topic}']")
    assert client.get(f"/v0/routers/{topic}").status_code == 404


def test_a_router_that_is_blocked_says_why_and_how_far_it_is_behind(
    page: Page, client: httpx.Client, topic: str
) -> None:
    client.put(f"/v0/topics/{topic}.b", json={"discard": "reject", "cap_records": 2})
    write(client, f"{topic}.a", *range(7))
    made = client.put(f"/v0/routers/{topic}", json={"source": f"{topic}.a", "dest": f"{topic}.b", "start": "earliest"})
    assert made.status_code == 201, made.text
    page.open("routers")
    page.find(f".edge.blocked[data-router='{topic}']")
    page.see(f".edge[data-router='{topic}']", "lag ")
    page.until(lambda: page.text(f"tr[data-router='{topic}'] td.problem"), "the last error")
    page.shoot("router-blocked")
    client.delete(f"/v0/routers/{topic}")


def test_a_graph_with_cycles_states_and_remote_ends(page: Page, client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(9))
    script = serve(
        page,
        router("r1", topic, "mid", lag=6),
        router("r2", "mid", "last", "blocked", 88, last_error="422 topic_full: last is full"),
        router("r3", "last", topic, "catching_up", 7),
        router("r4", topic, "last"),
        router("r5", "mid", {"url": "https://far.example", "topic": "copy"}, "running", 1),
        router("<b>r6</b>", "x", "x.1", "a new state"),
    )
    try:
        page.open("routers")
        page.until(lambda: len(page.all(".edge")) == 6, "six edges")
        # One of the three in the circle goes back, and only that one.
        assert page.run("return [...document.querySelectorAll('.edge.back')].map(e => e.dataset.router)") == ["r3"]
        places = dict(
            page.run(
                "return [...document.querySelectorAll('.box')].map(b =>"
                " [b.querySelector('title').textContent, b.getBoundingClientRect().left])"
            )
        )
        assert places[topic] < places["mid"] < places["last"] == places["copy @ https://far.example"]
        boxes = page.run("return [...document.querySelectorAll('.box')].map(b => b.getBoundingClientRect().toJSON())")
        for number, one in enumerate(boxes):
            for other in boxes[number + 1 :]:
                assert (
                    one["right"] <= other["left"]
                    or other["right"] <= one["left"]
                    or one["bottom"] <= other["top"]
                    or other["bottom"] <= one["top"]
                )
        page.see(".edge.blocked", "lag 88")
        page.click("td button", "r2")
        page.see(".facts .problem", "topic_full")
        assert page.run("return document.querySelector('.edge.chosen').dataset.router") == "r2"
        page.shoot("routers")
        # Where they read is drawn on the axis, and how far they are behind stands in the list.
        page.go(f"topics/{topic}").see(".axis .reader", "r1 3", "r4 3")
        page.see("[data-field=lag]", "6")
        page.see(".row[aria-selected=true] .lag", "lag 6")
        page.shoot("cursors")
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": script})


def test_a_server_without_routers_says_what_they_are(page: Page) -> None:
    script = serve(page)
    try:
        page.open("routers").see(".empty", "No routers", "exactly once")
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": script})


def test_pipelines_show_their_progress(page: Page, client: httpx.Client) -> None:
    client.delete("/v0/topics/pipelines.progress")
    page.open("pipelines").see(".empty", "No pipeline has said anything yet")
    now = time.time_ns() // 1_000_000

    def say(pipeline: str, name: str, **more: Any) -> None:
        write(client, "pipelines.progress", msgspec.to_builtins(Progress(pipeline, name, "run-7", now, **more)))

    for turn in range(20):
        say("tier", "orders", stage="write", records=turn * 1000, records_per_s=1000.0 + turn * 50, lag=30 - turn)
    say("route", "eu", records_per_s=5.0, lost=80)
    say("route", "us")
    write(client, "pipelines.progress", "not an object", 5, None, [])
    page.see("[data-pipeline='tier orders']", "orders", "tier", "write ·", "run-7")
    page.see("[data-pipeline='route us']", "us", "route", "running ·")
    assert page.text("[data-pipeline='tier orders'] [data-field=speed] b") == "1,950"
    assert page.text("[data-pipeline='tier orders'] [data-field=records] b") == "19K"
    assert page.text("[data-pipeline='tier orders'] [data-field=lag] b") == "11"
    assert page.text("[data-pipeline='tier orders'] [data-field=lost] b") == "0"
    assert page.text("[data-pipeline='route eu'] [data-field=lost].bad b") == "80"
    assert page.text("[data-pipeline='route us'] [data-field=records] b") == "0"
    assert len(page.all(".pipeline")) == 3
    page.shoot("pipelines")
    say("tier", "orders", records=20_000, error="the lake is full", state="failed")
    page.see("[data-pipeline='tier orders']", "the lake is full", "failed")
    assert page.text("[data-pipeline='tier orders'] [data-field=records] b") == "20K"


def test_the_server_says_how_it_is(page: Page, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 1})
    write(client, topic, 1, 2, 3)
    client.post(f"/v0/topics/{topic}/diff", json={})
    page.open("server")
    page.see(".head", "version", "up")
    page.see(".levels + p", "none")
    page.see(".bars", "cap")
    page.see("tbody", "write", "diff", "≤")
    records = client.get("/v0/metrics", headers={"accept": "application/json"}).json()["metrics"]["topics_records"]
    page.until(lambda: page.text("[data-field=records] b") != DASH, "live records")
    assert records["samples"][0]["value"] > 0
    # Rates need two looks.
    page.until(lambda: page.text("[data-field=requests] b").endswith("/s"), "requests a second")
    page.shoot("server")
