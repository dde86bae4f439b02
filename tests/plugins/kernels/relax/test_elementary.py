"""Elementary functions of vectors and of numbers are right to two units of the last place, and call no library."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule

from tests.relax.fused import target_of
from tests.support.elementary import CALL, FUNCTIONS, VALUES, assert_within_two_ulp
from tvm_pipeline_kernels.relax.schedules import lowering


@pytest.mark.parametrize("lanes", [16, 8, 4, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_call_no_library(name: str, lanes: int) -> None:
    target = target_of(max(lanes, 4))
    data = te.placeholder((VALUES.size // lanes, lanes))
    result = te.compute(data.shape, lambda *at: getattr(tirx, name)(data(*at)), name="result")
    s = Schedule(te.create_prim_func([data, result]))
    s.vectorize(s.get_loops("result")[1])
    library = tvm.compile(s.mod, target=target, tir_pipeline=lowering.PIPELINE)
    assert not re.search(CALL, library.mod.inspect_source("asm"))

    held = [tvm.runtime.tensor(array.reshape(-1, lanes)) for array in (VALUES, np.zeros_like(VALUES))]
    library.jit()["main"](*held)
    assert_within_two_ulp(name, held[1].numpy())
