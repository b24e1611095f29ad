"""Every test of this folder is quiet: a traceback on standard error is a failure, whatever was answered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    shown = capsys.readouterr().err
    assert "Traceback" not in shown, shown
    assert "failed" not in shown, shown
