"""Elementary functions are right to two units of the last place on all targets, fused or not, and call no library."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.support.elementary import CALL, FUNCTIONS, VALUES, assert_within_two_ulp
from tests.tvm.targets import LEVELS, TARGETS, run, runs_here
from tvm_pipeline_tvm.relay import fold

import tvm  # isort: skip
from tvm import relay  # isort: skip

SHAPE = (1, 64, -1, 1)  # of a picture with VALUES in it
X = relay.var("x", shape=VALUES.reshape(SHAPE).shape)


def built(result: relay.Expr, target: str) -> object:
    """Return a library that calls no library's elementary function."""
    library = fold.fast_build(tvm.IRModule.from_expr(relay.Function([X], result)), target)
    assert not re.search(CALL, library.get_lib().get_source("asm"))  # type: ignore[attr-defined]
    return library


@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_right(name, target):
    library = built(getattr(relay, name)(X), target)
    if runs_here(target):
        (found,) = run(library, {"x": VALUES.reshape(SHAPE)})
        assert_within_two_ulp(name, found)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("target", [*LEVELS, *TARGETS[-2:]])
def test_functions_behind_a_convolution_are_the_same(target):
    """A convolution with the identity computes the function's argument, and what lies behind it reads the value."""
    identity = relay.const(np.eye(64, dtype="float32").reshape(64, 64, 1, 1))
    convolved = relay.nn.conv2d(X, identity, channels=64, kernel_size=(1, 1))
    fused = built(convolved * relay.sigmoid(convolved), target)
    if runs_here(target):
        frame = {"x": np.nan_to_num(VALUES, posinf=1, neginf=1).reshape(SHAPE)}  # 0 times infinity is no number
        apart = built(X * relay.sigmoid(X), target)
        np.testing.assert_array_equal(*run(fused, frame), *run(apart, frame))
