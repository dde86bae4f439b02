"""The contract reads as documentation: its example runs, and it stays short enough to be read."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.support.fake_backend import chain_model
from tvm_pipeline.backends import contract
from tvm_pipeline.backends.ports import Port, input_for_timing, noise


def test_the_example_runs() -> None:
    tried = doctest.testmod(contract)
    assert tried.attempted > 10
    assert tried.failed == 0


def test_it_stays_short() -> None:
    assert len(Path(contract.__file__).read_text().splitlines()) <= 170


def test_integers_of_other_operators_are_zero_where_a_stage_is_timed() -> None:
    """They may be indices into a tensor; what the model itself is given stays noise."""
    graph = chain_model(3).graph
    own, inner = (Port(name, (100,), "int64") for name in ("x", "t0"))
    assert np.array_equal(input_for_timing(graph, own), noise(own))
    assert noise(inner).any()
    assert not input_for_timing(graph, inner).any()
    floats = replace(inner, dtype="float32")
    assert np.array_equal(input_for_timing(graph, floats), noise(floats))
