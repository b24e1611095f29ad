"""The command line: `topics serve` today, one file per group of commands."""

from __future__ import annotations

import typer

from topics.cli.serve import serve

app = typer.Typer(
    name="topics",
    help="A durable event log in which no loss is ever silent.",
    no_args_is_help=True,
    add_completion=True,
)
app.command(name="serve", help="Run the server until SIGTERM or Ctrl-C.")(serve)


@app.callback()
def _commands() -> None:
    """Keeps `serve` a command of its own while it is the only one."""


def main() -> None:
    app()
