"""The command line: one file per command or group of commands, imported when it is asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

# Where each command lives, and the line that the list shows of it. To add one, add a line.
COMMANDS = {
    "serve": ("topics.cli.serve:serve", "Run the server until SIGTERM or Ctrl-C."),
    "put": ("topics.cli.topics:put", "Create a topic or queue, or change its configuration."),
    "get": ("topics.cli.topics:get", "Show a topic: watermarks, counts, losses, configuration."),
    "list": ("topics.cli.topics:list_", "List topics."),
    "drop": ("topics.cli.topics:drop", "Delete a topic with everything in it."),
    "write": ("topics.cli.write:write", "Append records, from arguments or JSON lines on standard input."),
    "diff": ("topics.cli.read:diff", "Read records and losses behind a cursor."),
    "tail": ("topics.cli.read:tail", "Follow a topic: records as they come, losses in red."),
    "watch": ("topics.cli.watch:watch", "Follow several topics over one live stream."),
    "seek": ("topics.cli.read:seek", "The cursor from which a read starts at a time."),
    "delete": ("topics.cli.delete:delete", "Delete records by seq, by tag, or by both."),
    "deletes": ("topics.cli.delete:deletes", "List past deletes of records."),
    "queue": ("topics.cli.queue:app", "Jobs: claim, ack, nack, extend, work, redrive, unblock, leases."),
    "routers": ("topics.cli.routers:app", "Routers between topics: put, get, list, delete."),
    "pipeline": ("topics.cli.pipeline:app", "The lake and SQL on Spark: tier, route, replay, verify, compact, files."),
    "verify": ("topics.cli.verify:verify", "Check a data directory offline; exit code 1 when something is wrong."),
    "bench": ("topics.cli.bench:bench", "A small load against a server: writes, reads and claims a second."),
}

EPILOG = (
    "Exit codes: 0 done, 1 refused or not found, 2 bad usage or input, 3 no server to be reached, 4 a loss was seen "
    "with --fail-on-loss, 130 Ctrl-C."
)


class Commands(TyperGroup):
    """Lists commands without importing them; imports the one that is run."""

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        home, help_ = COMMANDS[cmd_name]
        if self._is_listing:
            return TyperCommand(cmd_name, help=help_)
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name, home, help_)
        return self.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._is_listing = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._is_listing = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # What a typing error may have meant is looked for among the commands that are known.
        for name in COMMANDS:
            if args and args[0] not in COMMANDS:
                self.commands.setdefault(name, TyperCommand(name))
        return super().resolve_command(ctx, args)


def _load(name: str, home: str, help_: str) -> Any:
    module, _, attribute = home.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        command = found
        found = typer.Typer(add_completion=False)
        found.command(name=name, help=help_)(command)
    loaded = typer.main.get_command(found)
    loaded.name = name
    return loaded


app = typer.Typer(
    name="topics",
    cls=Commands,
    help="A durable event log and job queue in which no loss is ever silent.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    # Plain text for the list of commands and for errors: rich costs 0.1 s here. Each command's own help has panels.
    rich_markup_mode=None,
)


def _version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"topics {version('topics')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        # Before a command could see it.
        sys.exit(130)
