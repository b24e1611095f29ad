"""The README's tour ends in a lake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_readme import blocks, run_shell, serving


@pytest.mark.timeout(600)
def test_the_tour_ends_with_a_pipeline(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        for word in ("curl", "topics queue work"):
            run_shell(blocks("sh", word), url, tmp_path)
        printed = run_shell(blocks("sh", "pipeline tier"), url, tmp_path)
    assert "topic=orders/" in printed
    assert "topic=clicks/" in printed
    assert ".parquet" in printed
