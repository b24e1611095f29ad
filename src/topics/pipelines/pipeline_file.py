"""A file of pipelines, in TOML: read, checked, and every complaint with the line that it is about."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from topics.core.errors import InvalidRequest
from topics.core.names import check_topic_name
from topics.core.selector import parse_selector

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"\s*\[(\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*("[^"]*"|'[^']*'|[A-Za-z0-9_.-]+)\s*=""")
_INTERVAL = re.compile(r"\d+\s+(millisecond|second|minute|hour|day)s?")
_TOP = {"url": str, "pipeline": list}
_PIPELINE = {
    "name": str,
    "sql": str,
    "destination": str,
    "trigger": str,
    "checkpoint": str,
    "output_mode": str,
    "sources": dict,
}
_SOURCE = {
    "topic": str,
    "topics": list,
    "prefix": str,
    "schema": str,
    "watermark": str,
    "starting_seq": (str, int),
    "starting_ts": (str, int),
    "max_records": int,
    "tag_match": (str, list),
}
ONCE = "once"


class SourceSpec(msgspec.Struct, frozen=True):
    """A view over topics. `options` are those of `format("topics")`."""

    view: str
    options: dict[str, str]
    schema: str | None
    watermark: str | None
    line: int


class PipelineSpec(msgspec.Struct, frozen=True):
    """`sql_line` is the line of the file on which the query's text begins."""

    name: str
    sql: str
    sql_line: int
    sources: tuple[SourceSpec, ...]
    destination: str
    trigger: str
    checkpoint: str
    output_mode: str
    line: int


class PipelineFile(msgspec.Struct, frozen=True):
    path: str
    url: str | None
    pipelines: tuple[PipelineSpec, ...]


class PipelineError(InvalidRequest):
    """What is wrong, and where: `file:line: message`."""

    def __init__(self, path: str, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: {message}")
        self.line = line


def is_interval(text: str) -> bool:
    """A time as in `10 seconds`."""
    return _INTERVAL.fullmatch(text) is not None


def read_file(path: str | Path) -> PipelineFile:
    return read_text(str(path), Path(path).read_text(encoding="utf-8"))


def read_text(path: str, text: str) -> PipelineFile:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found is not None else text.count("\n") + 1
        raise PipelineError(path, line, re.sub(r" \(at .*\)$", "", str(error))) from None
    return _Check(path, _Lines(text)).file(tables)


# Where something stands: `()` for the file, `(0,)` for the first pipeline, then the names inside it.
_Place = tuple[Any, ...]


class _Lines:
    """The line on which each table and key begins. TOML's own reader does not say."""

    def __init__(self, text: str) -> None:
        self._lines: dict[_Place, int] = {(): 1}
        # The line on which the text of a string begins that is written over several.
        self.texts: dict[_Place, int] = {}
        place: _Place = ()
        count = -1
        quote: str | None = None
        for number, line in enumerate(text.splitlines(), 1):
            if quote is not None:
                quote = None if quote in line else quote
                continue
            header = _HEADER.match(line)
            if header is not None:
                names = [name.strip().strip("\"'") for name in header[2].split(".")]
                if names[0] == "pipeline":
                    count += 1 if header[1] else 0
                    place = (count, *names[1:])
                else:
                    place = tuple(names)
                self._lines.setdefault(place, number)
                continue
            key = _KEY.match(line)
            if key is None:
                continue
            at = (*place, *(part.strip("\"'") for part in key[1].split(".")))
            self._lines[at] = number
            rest = line[key.end() :]
            for each in ('"""', "'''"):
                if each in rest and rest.count(each) == 1:
                    quote = each
                    self.texts[at] = number if rest.split(each, 1)[1].strip() else number + 1

    def of(self, place: _Place) -> int:
        while place not in self._lines:
            place = place[:-1]
        return self._lines[place]


class _Check:
    def __init__(self, path: str, lines: _Lines) -> None:
        self._path = path
        self._lines = lines

    def _fail(self, place: _Place, message: str) -> PipelineError:
        return PipelineError(self._path, self._lines.of(place), message)

    def _keys(self, place: _Place, table: dict[str, Any], known: dict[str, Any]) -> None:
        for name, value in table.items():
            if name not in known:
                raise self._fail((*place, name), f"{name!r} is not known here; there are {', '.join(known)}")
            if not isinstance(value, known[name]) or isinstance(value, bool):
                kinds = known[name] if isinstance(known[name], tuple) else (known[name],)
                shown = {str: "a string", int: "a number", list: "a list", dict: "a table"}
                raise self._fail((*place, name), f"{name} must be {' or '.join(shown[kind] for kind in kinds)}")

    def file(self, tables: dict[str, Any]) -> PipelineFile:
        self._keys((), tables, _TOP)
        pipelines = tables.get("pipeline", [])
        if not pipelines or not all(isinstance(each, dict) for each in pipelines):
            raise self._fail((), "there is no [[pipeline]]")
        specs = [self._pipeline(number, table) for number, table in enumerate(pipelines)]
        for field in ("name", "checkpoint"):
            seen: dict[str, PipelineSpec] = {}
            for number, spec in enumerate(specs):
                value = getattr(spec, field)
                if value in seen:
                    first = seen[value].line
                    raise self._fail((number, field), f"the pipeline of line {first} has the {field} {value!r} already")
                seen[value] = spec
        return PipelineFile(self._path, tables.get("url"), tuple(specs))

    def _pipeline(self, number: int, table: dict[str, Any]) -> PipelineSpec:
        place: _Place = (number,)
        self._keys(place, table, _PIPELINE)
        for name in ("name", "sql", "destination", "checkpoint", "sources"):
            if not table.get(name):
                raise self._fail(place, f"a pipeline needs {name}")
        for name in ("name", "destination"):
            self._name((number, name), table[name], name)
        mode = table.get("output_mode", "append")
        if mode not in ("append", "update"):
            raise self._fail(
                (number, "output_mode"),
                f"output_mode is append or update, got {mode!r}: a topic can only be appended to",
            )
        trigger = table.get("trigger", "10 seconds")
        if trigger != ONCE and not is_interval(trigger):
            raise self._fail((number, "trigger"), f"trigger is 'once' or a time as in '10 seconds', got {trigger!r}")
        at = (number, "sql")
        return PipelineSpec(
            name=table["name"],
            sql=table["sql"],
            sql_line=self._lines.texts.get(at, self._lines.of(at)),
            sources=tuple(self._source(number, view, source) for view, source in table["sources"].items()),
            destination=table["destination"],
            trigger=trigger,
            checkpoint=table["checkpoint"],
            output_mode=mode,
            line=self._lines.of(place),
        )

    def _name(self, place: _Place, value: str, field: str) -> None:
        try:
            check_topic_name(value, field)
        except InvalidRequest as error:
            raise self._fail(place, error.message) from None

    def _source(self, number: int, view: str, table: Any) -> SourceSpec:
        place: _Place = (number, "sources", view)
        if not _IDENTIFIER.fullmatch(view):
            raise self._fail(place, f"a view is named with letters, digits and _, got {view!r}")
        if not isinstance(table, dict):
            raise self._fail(place, f"the source {view} must be a table: [pipeline.sources.{view}]")
        self._keys(place, table, _SOURCE)
        named = [name for name in ("topic", "topics", "prefix") if name in table]
        if len(named) != 1:
            raise self._fail(place, f"the source {view} needs exactly one of topic, topics and prefix")
        options = self._topics(place, table, named[0])
        if "starting_seq" in table and "starting_ts" in table:
            raise self._fail((*place, "starting_ts"), "starting_seq and starting_ts exclude each other")
        for name, option in (("starting_seq", "startingSeq"), ("starting_ts", "startingTs")):
            if name in table:
                options[option] = str(table[name])
        if table.get("max_records", 1) < 1:
            raise self._fail((*place, "max_records"), "max_records must be 1 or more")
        if "max_records" in table:
            options["maxRecordsPerTrigger"] = str(table["max_records"])
        if "tag_match" in table:
            try:
                parse_selector(table["tag_match"], "tag_match")
            except InvalidRequest as error:
                raise self._fail((*place, "tag_match"), error.message) from None
            match = table["tag_match"]
            options["tagMatch"] = match if isinstance(match, str) else msgspec.json.encode(match).decode()
        watermark = table.get("watermark")
        if watermark is not None and not is_interval(watermark):
            raise self._fail((*place, "watermark"), f"watermark is a time as in '10 minutes', got {watermark!r}")
        return SourceSpec(view, options, table.get("schema"), watermark, self._lines.of(place))

    def _topics(self, place: _Place, table: dict[str, Any], named: str) -> dict[str, str]:
        if named == "prefix":
            return {"topicPrefix": table["prefix"]}
        names = [table["topic"]] if named == "topic" else table["topics"]
        for name in names:
            if not isinstance(name, str):
                raise self._fail((*place, named), "topics is a list of names")
            self._name((*place, named), name, named)
        return {"topics": ",".join(names)}
