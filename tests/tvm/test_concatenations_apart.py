"""Concatenations of consecutive bytes stand alone when operators are fused, and nothing else does."""

from __future__ import annotations

import pytest

from tests.support.parts import needs

needs("tvm")

from tvm_pipeline_tvm.relay.concatenations_apart import ConcatenationsApart

import tvm  # isort: skip
from tvm import relay  # isort: skip


def kernels(body: relay.Expr) -> list[list[str]]:
    """Return the operators of each kernel that FuseOps makes behind the pass."""
    mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body))
    fused = relay.transform.FuseOps(2)(ConcatenationsApart()(mod))
    found: list[list[str]] = []

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function):
            names: list[str] = []
            relay.analysis.post_order_visit(
                expr.op.body, lambda e: names.append(e.op.name) if isinstance(e, relay.Call) else None
            )
            found.append(names)

    relay.analysis.post_order_visit(fused["main"], visit)
    return found


def data(*shape: int) -> relay.Var:
    return relay.var("x", shape=shape)


def test_channels_of_one_image_are_joined_apart() -> None:
    x = data(1, 4, 2, 2)
    joined = relay.concatenate([relay.nn.relu(x), relay.exp(x)], axis=1)
    assert sorted(kernels(relay.tanh(joined))) == [["concatenate"], ["exp"], ["nn.relu"], ["tanh"]]


@pytest.mark.parametrize(("shape", "axis"), [((2, 4, 2, 2), 1), ((1, 4, 2, 2), 3)])
def test_others_stay_where_they_are(shape: tuple[int, ...], axis: int) -> None:
    x = data(*shape)
    joined = relay.concatenate([relay.nn.relu(x), relay.exp(x)], axis=axis)
    assert kernels(relay.tanh(joined)) == [["nn.relu", "exp", "concatenate", "tanh"]]


def test_an_output_stays_where_it_is() -> None:
    x = data(1, 4, 2, 2)
    assert kernels(relay.concatenate([relay.nn.relu(x), x], axis=1)) == [["nn.relu", "concatenate"]]


@pytest.mark.thorough
def test_fields_of_one_operator_and_deep_networks_pass() -> None:
    joined = relay.concatenate(relay.split(data(1, 4, 2, 2), 2, axis=1).astuple(), axis=1)
    body = joined
    for _ in range(3000):
        body = relay.nn.relu(body)
    made = ConcatenationsApart()(tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body)))
    assert tvm.ir.structural_equal(made["main"].checked_type, relay.FuncType([joined_type()], joined_type()))


def joined_type() -> relay.TensorType:
    return relay.TensorType((1, 4, 2, 2), "float32")
