"""The contract reads as documentation: its example runs, and it stays short enough to be read."""

from __future__ import annotations

import doctest
from pathlib import Path

from tvm_pipeline.backends import contract


def test_the_example_runs() -> None:
    tried = doctest.testmod(contract)
    assert tried.attempted > 10
    assert tried.failed == 0


def test_it_stays_short() -> None:
    assert len(Path(contract.__file__).read_text().splitlines()) <= 170
