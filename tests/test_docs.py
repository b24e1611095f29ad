"""The pages in docs/ are run: what they show works as it stands, and what they list is all there is."""

from __future__ import annotations

import ast
import json
import re
import shlex
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.pages import DOCS, ROOT, Block, Served, agree, blocks, last_answer, run_page, run_python, run_shell, serving
from topics.core.config import ConfigPatch
from topics.core.errors import TopicsError
from topics.core.limits import Limits
from topics.http.openapi import document
from topics.http.routes import ROUTES
from topics.http.settings import Settings

PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
# Pages whose blocks are run by a test of their own.
ELSEWHERE = {
    "cli.md": "tests/cli/test_cli_docs.py::test_the_page_runs_as_it_stands",
    "client.md": "tests/client/test_client_docs.py::test_the_page_runs_as_it_stands",
    "api.md": "tests/test_docs.py::test_answers_are_as_shown_and_every_route_is_used",
    "pipelines.md": "tests/pipelines/test_docs_examples.py::test_the_page_runs_from_top_to_bottom",
    "spark.md": "tests/spark/test_spark_docs.py::test_the_example_runs_as_it_stands",
}
# Languages that are not run. `console` is for the reader's machine, the others are shown.
SHOWN = {"", "console", "ini", "json", "text", "toml"}
RUN = [
    page for page in PAGES if page.name not in ELSEWHERE and any(b.language in ("sh", "python") for b in blocks(page))
]
EXPECTED = {
    "getting-started.md": [
        '"next_from_seq":3,"head_seq":3,"earliest_seq":1,"caught_up":true',
        '"next_from_seq":5,"head_seq":5,"earliest_seq":3,"caught_up":true,"tombstone":null',
        '"tombstone":{"gap_from":2,"gap_to":2,"reason":"cap","missed_estimate":1,"earliest_seq":3,"head_seq":5}',
        '"deduped":true',
        "lost 1 to 2: cap\n3 {'t': 21.0}",
    ],
    "live.md": ["event: tombstone", '"gap_to":1', 'event: record\ndata: {"topic":"news"', "event: caught-up"],
    "operations.md": ["3 topics, 3 records, 3 bytes: sound", '"topic":"a","first_seq":2', '"topic":"c","first_seq":2'],
    "queues.md": ['"acked":1', '"nacked":1', '"deliveries":2', '"moved":1', '"dead_lettered":1'],
    "page.md": ['"kind":"evicted","reason":"cap"', '"kind":"live"', '"complete":true', "<title>topics</title>"],
    "routers.md": ['"forwarded_total":2', '"$tag":"large-eu"', "from the west", '"deleted":true'],
}


def ids(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


@pytest.mark.parametrize("page", RUN, ids=ids(RUN))
def test_the_commands_of_a_page_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        if page.name == "operations.md":
            some_topics(served)
        printed = run_page(page, served)
    for text in EXPECTED.get(page.name, []):
        assert text in printed, printed


def some_topics(served: Served) -> None:
    for name in "abc":
        ask(served, "POST", f"/v0/topics/{name}", {"records": [{"data": 1}]})


def ask(served: Served, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        served.url + path, data, {"content-type": "application/json", "accept": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_block_is_run_or_says_that_it_is_not(page: Path) -> None:
    for block in blocks(page):
        assert block.language in {*SHOWN, "sh", "python"}, block
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_page_that_is_run_elsewhere_is(name: str) -> None:
    assert (DOCS / name).exists()
    assert exists(ELSEWHERE[name])


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], target


def test_the_index_has_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert listed == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_the_commands_for_the_readers_machine_exist(page: Path) -> None:
    """What is not run is at least there: targets of make, commands and flags of topics."""
    makefile = (ROOT / "Makefile").read_text()
    for line in console_lines(blocks(page)):
        words = shlex.split(line)
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), line
            for tests in re.findall(r"ARGS=(tests/\S+)", line):
                assert (ROOT / tests).exists(), line
            flags = re.findall(r"--[\w-]+", line) if "run" in targets else []
        else:
            flags = re.findall(r"--[\w-]+", line) if words[0] == "topics" else []
        assert set(flags) <= flags_of_topics(), line


def console_lines(found: list[Block]) -> list[str]:
    text = "\n".join(block.text for block in found if block.language == "console")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#") and "<" not in line]


@cache
def flags_of_topics() -> set[str]:
    names = [field for owner in (Settings, Limits) for field in owner.__struct_fields__]
    return {f"--{name.replace('_', '-')}" for name in names} | {"--help", "--repair", "--json"}


# -- concepts ----------------------------------------------------------------------------------------------------------

PROOFS = re.findall(r"`(tests/[\w/]+\.py::\w+)`", (DOCS / "concepts.md").read_text())


def test_every_promise_names_its_proof() -> None:
    page = (DOCS / "concepts.md").read_text()
    promises = page[page.index("## Loss") : page.index("## What is not promised")]
    for item in re.findall(r"^- \*\*.*?(?=^- |^$)", promises, re.DOTALL | re.MULTILINE):
        assert "Proof: `tests/" in item, item
    assert len(PROOFS) > 60
    assert len(PROOFS) == len(re.findall(r"`tests/", promises))


@pytest.mark.parametrize("proof", sorted(set(PROOFS)))
def test_a_proof_exists(proof: str) -> None:
    assert exists(proof)


def exists(proof: str) -> bool:
    file, _, name = proof.partition("::")
    return name in names_of(ROOT / file)


@cache
def names_of(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_files_that_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:tests|src|deploy|benchmarks)/[\w/.]+\w)[`:]", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`((?:core|engine|http|storage)/\w+\.py)`", text):
        assert (ROOT / "src" / "topics" / name).exists(), name


# -- the API -----------------------------------------------------------------------------------------------------------

API = DOCS / "api.md"


def test_answers_are_as_shown_and_every_route_is_used(tmp_path: Path) -> None:
    found = blocks(API)
    shells = [index for index, block in enumerate(found) if block.language == "sh"]
    with serving(tmp_path) as served:
        printed = run_shell(served, [found[index].text for index in shells])
        socket = run_python(served, "\n".join(block.text for block in found if block.language == "python"))
        metrics = ask(served, "GET", "/v0/metrics")["metrics"]
    shown = 0
    for index, text in zip(shells, printed, strict=True):
        after = found[index + 1]
        if after.language == "json":
            agree(json.loads(after.text), last_answer(text), found[index].text)
            shown += 1
    assert shown > 25
    assert "'type': 'ack', 'request_id': 1, 'topic': 'orders', 'first_seq': 7" in socket
    for frame in ("event: tombstone", "event: job"):
        assert any(frame in text for text in printed)
    used = {
        sample["labels"]["route"]
        for sample in metrics["topics_requests"]["samples"]
        if int(sample["labels"]["status"]) < 300
    }
    assert {route.name for methods in ROUTES.values() for route in methods.values()} - used == set()


def test_the_page_names_every_route_of_the_description() -> None:
    text = API.read_text()
    for path, methods in json.loads(document())["paths"].items():
        assert path in text, path
        for method in set(methods) - {"parameters"}:
            named = re.search(rf"`{method.upper()} {re.escape(path)}[`?]", text)
            used = re.search(pattern_of(method, path), text)
            assert named or used, f"{method.upper()} {path}"


def pattern_of(method: str, path: str) -> str:
    """A command that asks for this path by this method."""
    where = re.sub(r"\\\{\w+\\\}", r"[\\w.-]+", re.escape(path))
    flag = "" if method in ("get", "post") else f"-X {method.upper()} "
    return rf'curl {flag}"?\$TOPICS{where}[\s?"]'


def test_the_page_names_every_error_and_every_field_of_a_configuration() -> None:
    text = API.read_text()
    codes = {error.code for error in refusals(TopicsError)}
    # Errors of a start never reach a client.
    told = {code for code in codes if f"{code}" in document().decode()}
    assert len(told) > 20
    assert [code for code in told if f"`{code}`" not in text] == []
    aliases = {"visibility_timeout_ms", "max_delivery_attempts", "auto_create", "durable"}
    assert [name for name in set(ConfigPatch.__struct_fields__) - aliases if f"`{name}`" not in text] == []


def refusals(kind: type[TopicsError]) -> list[type[TopicsError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in refusals(below))]


# -- operations --------------------------------------------------------------------------------------------------------

OPERATIONS = DOCS / "operations.md"


def test_every_setting_is_there_with_its_default() -> None:
    rows = re.findall(r"^\| `TOPICS_(\w+)` \| (.*?) \| (.+?) \|$", OPERATIONS.read_text(), re.MULTILINE)
    listed = {name.lower(): default.strip("`") for name, default, _ in rows}
    fields = [*msgspec.structs.fields(Settings), *msgspec.structs.fields(Limits)]
    expected = {field.name: shown_default(field.default) for field in fields if field.name != "limits"}
    assert listed == expected
    assert len(rows) == len(listed)


def shown_default(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def test_every_variable_that_pages_name_exists() -> None:
    known = {f"TOPICS_{name.upper()}" for name in (*Settings.__struct_fields__, *Limits.__struct_fields__)}
    # What commands take, and what the command of a worker is given.
    known |= {f"TOPICS_{name}" for name in ("URL", "KEY", "NODE", "QUEUE", "SEQ", "DELIVERIES", "TAG")}
    files = [*PAGES, *(path for path in (ROOT / "deploy").iterdir() if path.is_file())]
    for file in files:
        named = set(re.findall(r"\bTOPICS_[A-Z][A-Z_]*[A-Z]\b", file.read_text()))
        assert named <= known, f"{file.name}: {named - known}"


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The families and the samples of a server on which everything has happened once."""
    with serving(tmp_path_factory.mktemp("scraped")) as served:
        ask(served, "PUT", "/v0/topics/a", {"cap_records": 1})
        ask(served, "PUT", "/v0/topics/q", {"type": "queue"})
        ask(served, "PUT", "/v0/routers/r", {"source": "a", "dest": "b"})
        ask(served, "POST", "/v0/topics/a", {"records": [{"data": 1}, {"data": 2}]})
        ask(served, "POST", "/v0/topics/a/diff", {})
        word = {"pipeline": "tier", "name": "a", "run": "1", "ts": 1, "lag": 5}
        ask(served, "POST", "/v0/topics/pipelines.progress", {"records": [{"data": word}]})
        with urllib.request.urlopen(served.url + "/v0/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    return {family.name for family in families}, {sample.name for family in families for sample in family.samples}


def test_every_metric_is_there_and_every_one_that_is_named_exists(scraped: tuple[set[str], set[str]]) -> None:
    families, samples = scraped
    named = set(re.findall(r"`(topics_[a-z_]+)`", OPERATIONS.read_text()))
    assert named <= samples | families
    assert {name.removesuffix("_total") for name in named} == families


def test_alerts_are_rules_over_metrics_that_exist(scraped: tuple[set[str], set[str]]) -> None:
    from importlib import import_module

    # No types of its own; it is in the lock with schemathesis.
    yaml: Any = import_module("yaml")
    (group,) = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    assert len(group["rules"]) > 10
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        named = set(re.findall(r"\btopics_[a-z_]+", rule["expr"]))
        assert named or rule["alert"] == "TopicsDown"
        assert named <= scraped[1], rule
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
