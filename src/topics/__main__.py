"""`python -m topics [DIRECTORY]`: opens an embedded log, shows what it does, and hands it over at a prompt."""

from __future__ import annotations

import code
import sys

import topics
from topics.core.tombstone import Tombstone


def main(arguments: list[str]) -> int:
    directory = arguments[0] if arguments else "./data"
    try:
        log = topics.open(directory)
    except topics.TopicsError as error:
        print(f"topics: {error.message}", file=sys.stderr)
        return 1
    with log:
        print(f"An embedded log is open in {directory}. A topic that keeps three records gets five:\n")
        log.put("tour", cap_records=3, durability="fsync")
        result = log.append("tour", [{"data": {"order": number}, "tag": f"order-{number}"} for number in range(1, 6)])
        print(f'>>> log.append("tour", [five records])\n    seqs {result.first_seq} to {result.last_seq}, fsynced')
        print(f'>>> list(log.read("tour", {result.first_seq - 1}))')
        for item in log.read("tour", result.first_seq - 1):
            if isinstance(item, Tombstone):
                print(f"    lost {item.gap_from} to {item.gap_to}, reason {item.reason}: told, never silent")
            else:
                print(f"    {item}")
        if sys.stdin.isatty():
            code.interact(
                banner="\n`log` is yours: log.append, log.diff, log.read, log.delete; Ctrl-D ends.", local={"log": log}
            )
        else:
            print(f'\nIn your own code: import topics; log = topics.open("{directory}")')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
