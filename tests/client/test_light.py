"""`import topics` is cheap, and what is not asked for is not loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

import topics


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_the_package_alone_loads_neither_the_engine_nor_httpx() -> None:
    loaded = loaded_by("import topics")
    assert "topics" in loaded
    assert not loaded & {"httpx", "msgspec", "asyncio", "topics.engine", "topics.log", "topics.http"}


def test_a_client_does_not_load_the_engine() -> None:
    loaded = loaded_by("import topics; topics.Client; topics.AsyncClient; topics.Worker")
    assert "httpx" in loaded
    assert not {name for name in loaded if name.startswith(("topics.engine", "topics.http", "topics.storage"))}


def test_the_engine_does_not_load_httpx() -> None:
    assert not loaded_by("import topics; topics.open") & {"httpx", "topics.http"}


def test_the_list_of_commands_loads_none_of_them() -> None:
    loaded = loaded_by("import topics.cli\ntry: topics.cli.app(['--help'])\nexcept SystemExit: pass")
    assert not loaded & {"httpx", "rich.console", "topics.cli.serve", "topics.cli.write", "topics.engine"}


@pytest.mark.parametrize("name", topics.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(topics, name) is not None
    assert name in dir(topics)


def test_a_name_that_is_not_there_is_said_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        topics.Clinet  # noqa: B018  # that is the test
