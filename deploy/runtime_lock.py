"""Prints the part of requirements.lock that a server needs, hashes and all: no Spark, no test tools.

The lock says of each package what brought it (`# via`). Whatever leads back to the dependencies in pyproject.toml, or
to what builds the package, is needed.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def runtime_lock(root: Path = ROOT) -> str:
    with open(root / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    roots = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    needed = {name_of(requirement) for requirement in roots}
    entries = re.findall(r"^\S+==.*?(?=^\S|\Z)", (root / "requirements.lock").read_text(), re.DOTALL | re.MULTILINE)
    brought_by = {
        entry: set(re.findall(r"^    #(?: via)?\s+([\w.-]+)", entry, re.MULTILINE)) - {"via"} for entry in entries
    }
    while True:
        more = {name_of(entry) for entry, sources in brought_by.items() if sources & needed} - needed
        if not more:
            return "".join(entry for entry in entries if name_of(entry) in needed)
        needed |= more


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0].lower().replace("_", "-")


if __name__ == "__main__":
    print(runtime_lock(), end="")
