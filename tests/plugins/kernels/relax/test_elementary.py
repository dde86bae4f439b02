"""Elementary functions of vectors and of numbers are right to the last bits, and call no library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule

from tests.relax.fused import target_of
from tvm_pipeline_kernels.relax.schedules import lowering

REFERENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 88.7, 88.8, -87.4, -200.0, 200.0]
VALUES = np.concatenate([np.linspace(-90, 90, 20_001), np.linspace(-5, 5, 20_001), np.geomspace(1e-8, 1, 998)])


@pytest.mark.parametrize("lanes", [16, 8, 4, 1])
@pytest.mark.parametrize("name", REFERENCES)
def test_functions_call_no_library(name: str, lanes: int) -> None:
    target = target_of(max(lanes, 4))
    values = np.concatenate([VALUES, np.resize(SPECIAL, -VALUES.size % 16 + 16)]).astype("float32")
    data = te.placeholder((values.size // lanes, lanes))
    result = te.compute(data.shape, lambda *at: getattr(tirx, name)(data(*at)), name="result")
    s = Schedule(te.create_prim_func([data, result]))
    s.vectorize(s.get_loops("result")[1])
    library = tvm.compile(s.mod, target=target, tir_pipeline=lowering.PIPELINE)
    assert not re.search(r"\tcallq?\t\w*(exp|tanh|erf)f?@", library.mod.inspect_source("asm"))

    held = [tvm.runtime.tensor(array.reshape(-1, lanes)) for array in (values, np.zeros_like(values))]
    library.jit()["main"](*held)
    with np.errstate(over="ignore"):
        expected = REFERENCES[name](values.astype("float64")).astype("float32")
    np.testing.assert_allclose(held[1].numpy().ravel(), expected, rtol=6e-7, atol=2e-38)
