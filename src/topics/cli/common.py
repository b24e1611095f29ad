"""What commands that talk to a server share: where it is, how it is asked, and what an error is to a script."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NoReturn, ParamSpec

import typer

from topics.core.errors import InvalidRequest, ShuttingDown, TopicsError

if TYPE_CHECKING:
    from topics.client.sync import Client

OK, REFUSED, USAGE, UNREACHABLE, LOSS, INTERRUPTED = 0, 1, 2, 3, 4, 130
DEFAULT_URL = "http://127.0.0.1:4000"
# Completion runs at every press of a key: it answers at once, or not at all.
_COMPLETION_MS = 1000
_COMPLETIONS = 200
P = ParamSpec("P")


def complete_topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of topics, for the shell."""
    from topics.client.sync import Client

    url = (ctx.params or {}).get("url") or os.environ.get("TOPICS_URL") or DEFAULT_URL
    key = (ctx.params or {}).get("key") or os.environ.get("TOPICS_KEY")
    try:
        with Client(url, key, timeout_ms=_COMPLETION_MS, connect_timeout_ms=_COMPLETION_MS, retry_ms=0) as client:
            return [state.topic for state in client.list_topics(incomplete, _COMPLETIONS).topics]
    except TopicsError:
        return []


def complete_routers(ctx: typer.Context, incomplete: str) -> list[str]:
    from topics.client.sync import Client

    url = (ctx.params or {}).get("url") or os.environ.get("TOPICS_URL") or DEFAULT_URL
    key = (ctx.params or {}).get("key") or os.environ.get("TOPICS_KEY")
    try:
        with Client(url, key, timeout_ms=_COMPLETION_MS, connect_timeout_ms=_COMPLETION_MS, retry_ms=0) as client:
            return [router.router for router in client.routers(incomplete)][:_COMPLETIONS]
    except TopicsError:
        return []


Url = Annotated[str, typer.Option("--url", envvar="TOPICS_URL", help="The server.", rich_help_panel="Server")]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="TOPICS_KEY", help="API key.", show_default=False, rich_help_panel="Server"),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text, one object a line.")]
RetryMs = Annotated[int, typer.Option("--retry-ms", min=0, help="How long to try again.", rich_help_panel="Server")]
FailOnLoss = Annotated[bool, typer.Option("--fail-on-loss", help="Exit with 4 when a loss was seen.")]
TopicName = Annotated[str, typer.Argument(help="A topic.", autocompletion=complete_topics)]
QueueName = Annotated[str, typer.Argument(help="A queue.", autocompletion=complete_topics)]
MatchTag = Annotated[str | None, typer.Option("--match", help="Only records with exactly this tag.")]
MatchPrefix = Annotated[str | None, typer.Option("--match-prefix", help="Only records whose tag starts so.")]


def connect(url: str, key: str | None, retry_ms: int = 2_000) -> Client:
    from topics.client.sync import Client

    return Client(url, key, retry_ms=retry_ms)


def selector(match: str | None, prefix: str | None) -> list[str] | None:
    if match is not None and prefix is not None:
        raise typer.BadParameter("--match and --match-prefix exclude each other")
    if match is not None:
        return ["tag", "Eq", match]
    return None if prefix is None else ["tag", "Glob", prefix + "*"]


def code_of(error: TopicsError) -> int:
    from topics.client.errors import NotReady, Unreachable

    if isinstance(error, Unreachable | NotReady | ShuttingDown):
        return UNREACHABLE
    return USAGE if isinstance(error, InvalidRequest) else REFUSED


def fail(error: TopicsError, as_json: bool) -> NoReturn:
    """Says what was refused, on standard error, and ends."""
    if as_json:
        import msgspec

        body = {"error": {"code": error.code, "message": error.message, "detail": error.detail}}
        print(msgspec.json.encode(body).decode(), file=sys.stderr)
    else:
        from topics.cli.show import complain

        complain(error.message)
    raise typer.Exit(code_of(error))


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Errors without tracebacks, and an end that breaks nothing."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except TopicsError as error:
            fail(error, bool(kwargs.get("as_json")))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever reads has enough. What is left in the buffer has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(OK) from None

    return run
