"""`python -m benchmarks [name …] [--json]`: runs the named benchmarks, or all but `readme`, which runs all tests."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks import append, growth, idle, lake, large, queue, read, readme, routers, soak, spark, watch, wire

ALL = {
    "append": append.run,
    "read": read.run,
    "large": large.run,
    "growth": growth.run,
    "wire": wire.run,
    "idle": idle.run,
    "spark": spark.run,
    "lake": lake.run,
    "watch": watch.run,
    "queue": queue.run,
    "soak": soak.run,
    "routers": routers.run,
    "readme": readme.run,
}


def main(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    names = [name for name in arguments if not name.startswith("-")] or [name for name in ALL if name != "readme"]
    unknown = [name for name in names if name not in ALL]
    if unknown:
        print(f"no benchmark is called {unknown[0]!r}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    for name in names:
        with tempfile.TemporaryDirectory(prefix="topics-bench-") as directory:
            for figure in ALL[name](Path(directory)):
                print(msgspec.json.encode(figure).decode() if as_json else figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
