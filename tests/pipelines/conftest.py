"""The Spark and the servers of `tests/spark`, and a lake for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.conftest import client, server, spark, topic

__all__ = ["client", "server", "spark", "topic"]


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")
