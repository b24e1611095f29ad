"""The command line: one file per command or group of commands."""

from __future__ import annotations

import typer

from topics.cli.serve import serve
from topics.cli.verify import verify

app = typer.Typer(
    name="topics",
    help="A durable event log in which no loss is ever silent.",
    no_args_is_help=True,
    add_completion=True,
)
app.command(name="serve", help="Run the server until SIGTERM or Ctrl-C.")(serve)
app.command(name="verify", help="Check a data directory offline; exit code 1 when something is wrong.")(verify)


def main() -> None:
    app()
