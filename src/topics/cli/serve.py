"""`topics serve`: every setting is a flag, and an environment variable of the same name."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import typer

from topics.core.errors import TopicsError
from topics.core.limits import Limits
from topics.http.server import Server
from topics.http.server import serve as run_server
from topics.http.settings import Settings, url_of


def _options(owner: type[msgspec.Struct]) -> list[inspect.Parameter]:
    """One option for each field, with its description, default and variable."""
    hints = get_type_hints(owner, include_extras=True)
    options: list[inspect.Parameter] = []
    for field in msgspec.structs.fields(owner):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, meta = get_args(hint)
        name = field.name.replace("_", "-")
        declaration = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
        secret = field.name == "api_keys"
        option = typer.Option(
            declaration,
            envvar=f"TOPICS_{field.name.upper()}",
            help=meta.description,
            show_default=not secret,
        )
        options.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
            )
        )
    return options


_PARAMETERS = [*_options(Settings), *_options(Limits)]


def serve(**values: Any) -> None:
    limits = Limits(**{name: values.pop(name) for name in Limits.__struct_fields__})
    settings = Settings(**values, limits=limits)
    try:
        settings.check()
    except TopicsError as error:
        print(f"topics: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(run_server(settings, _announce))


serve.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]  # typer reads it
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}


def _announce(server: Server) -> None:
    """What is in force, without secrets, and where to go."""
    shown = {**server.settings.shown(), "api_keys": f"{server.key_count} keys"}
    url = url_of(server.settings.host, server.port)
    print(f"topics serves {shown['data_dir']} on {url}", flush=True)
    print("  with: " + " ".join(f"{name}={value}" for name, value in sorted(shown.items())), flush=True)
    print(f"  open: {url}/ui", flush=True)
    body = '{"records": [{"data": "hello"}]}'
    print(f"  try:  curl {url}/v0/topics/first -H 'content-type: application/json' -d '{body}'", flush=True)
