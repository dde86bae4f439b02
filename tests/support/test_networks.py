"""The models that tests and benchmarks make are the same ones in each process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import as_model, relay_module

import tvm  # isort: skip

PROGRAM = (
    "from tests.support.networks import as_model, relay_module; print(as_model('m', *relay_module('mobile')).digest)"
)


@pytest.mark.thorough
def test_a_model_has_one_digest() -> None:
    """What is compiled in one process is found by the others, whatever order its parameters have there."""
    mod, params = relay_module("mobile")
    model = as_model("m", mod, params)
    read = tvm.runtime.load_param_dict(model.params)
    assert set(read) == set(params)
    for name, array in params.items():
        np.testing.assert_array_equal(read[name].numpy(), array.numpy())
    assert as_model("m", mod, dict(reversed(params.items()))).digest == model.digest
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == model.digest
