"""Every output of a model becomes a tensor that an operator computes, whatever the model gives out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.networks import module_of
from tests.support.parts import needs

needs("tvm")

from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.numbering import numbered
from tvm_pipeline_tvm.relay.distinct_outputs import distinct_outputs
from tvm_pipeline_tvm.relay.kernel_walkers import kernels_of_module

import tvm  # isort: skip
from tvm import relay  # isort: skip

X = relay.var("x", shape=(1, 4))
Y = relay.exp(X)
OUTPUTS: dict[str, Callable[[], relay.Expr]] = {
    "one tensor three times": lambda: relay.Tuple([Y, Y, Y]),
    "one tensor under two shapes": lambda: relay.Tuple([Y, relay.reshape(Y, (2, 2)), relay.tanh(Y)]),
    "equal calls": lambda: relay.Tuple([relay.exp(X), relay.reshape(relay.exp(X), (2, 2))]),
    "a transpose that moves nothing": lambda: relay.Tuple([Y, relay.transpose(Y, (0, 1))]),
    "an input": lambda: relay.Tuple([X, Y]),
    "an input twice": lambda: relay.Tuple([relay.squeeze(X, [0]), Y, relay.reshape(X, (2, 2))]),
    "an input alone": lambda: relay.reshape(X, (4,)),
    "fields of one split": lambda: relay.Tuple([*relay.split(Y, 2, 1), relay.split(Y, 2, 1)[1]]),
}


def values(mod: tvm.IRModule) -> list[tuple[int, int]]:
    """Return what computes each output, as the operator graph will have it once equal calls are one."""
    with tvm.transform.PassContext(opt_level=3):
        for each in ("SimplifyExpr", "EliminateCommonSubexpr", "InferType"):
            mod = getattr(relay.transform, each)()(mod)
    kernels, _, heads = kernels_of_module(mod, mod["main"].params)
    return list(numbered(kernels, heads).heads)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_tensors_of_operators(name: str) -> None:
    mod = module_of(OUTPUTS[name]())
    made = distinct_outputs(mod)
    assert tvm.ir.structural_equal(made["main"].checked_type, mod["main"].checked_type)
    before, after = values(mod), values(made)
    assert len(set(before)) < len(before) or any(operator < 0 for operator, _ in before), "nothing was tested"
    assert len(set(after)) == len(after)
    assert all(operator >= 0 for operator, _ in after)


def test_outputs_that_differ_stay_as_they_are() -> None:
    mod = module_of(relay.Tuple([Y, relay.tanh(Y), *relay.split(Y, 2, 1)]))
    assert distinct_outputs(mod).same_as(mod)


def test_outputs_of_different_sizes_need_no_simplifying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tvm_pipeline_tvm.relay.distinct_outputs._simplified")
    mod = module_of(relay.Tuple([relay.tanh(relay.concatenate([X, X], 1)), relay.sum(X), relay.cast(Y, "int8")]))
    assert distinct_outputs(mod).same_as(mod)


def test_a_constant_as_output_is_refused() -> None:
    weight = relay.var("weight", shape=(3,))
    for constant in (relay.const(np.ones(3, "float32")), relay.tanh(weight)):
        with pytest.raises(
            ModelError,
            match=r"output 1 \(the first is 0\) does not depend on the inputs; leave it out of the exported model",
        ):
            distinct_outputs(module_of(relay.Tuple([Y, constant])), ["weight"])
