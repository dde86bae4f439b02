"""Builds infer the types of a function once, and passes return what they return without that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.parts import needs

needs("Relay")

from tests.support.networks import NETWORKS, relay_module
from tvm_pipeline_tvm.relay import fold
from tvm_pipeline_tvm.relay.infer_once import InferOnce

import tvm  # isort: skip
from tvm import relay  # isort: skip

TARGET = "llvm -mcpu=x86-64-v3"


@tvm.instrument.pass_instrument
class Counter:
    """Counts how often InferType runs."""

    def __init__(self) -> None:
        self.count = 0

    def run_before_pass(self, _mod: tvm.IRModule, info: object) -> None:
        self.count += info.name == "InferType"  # type: ignore[attr-defined]


def optimized(name: str, monkeypatch: pytest.MonkeyPatch, once: Callable[[], object]) -> tuple[tvm.IRModule, int]:
    """Return a network as `relay.build` fuses it, and how often its types were inferred."""
    monkeypatch.setattr(fold, "InferOnce", once)
    mod, params = relay_module(name)
    counter = Counter()
    with fold.building(instruments=[counter]):
        return relay.optimize(mod, TARGET, params)[0], counter.count


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_modules_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always, often = optimized(name, monkeypatch, Counter)
    once, seldom = optimized(name, monkeypatch, InferOnce)
    tvm.ir.assert_structural_equal(once, always)
    assert seldom < often / 3


def test_what_has_changed_gets_new_types() -> None:
    x = relay.var("x", shape=(2, 3))
    infer, counter = relay.transform.InferType(), Counter()
    with fold.fast_context(instruments=[counter]):
        mod = infer(infer(tvm.IRModule.from_expr(relay.Function([x], relay.nn.relu(x)))))
        assert counter.count == 1
        mod["main"] = relay.Function([x], relay.transpose(x))
        assert infer(mod)["main"].checked_type.ret_type == relay.TensorType((3, 2))
        mod["other"] = relay.Function([x], relay.sum(x))
        assert infer(mod)["other"].checked_type.ret_type == relay.TensorType(())
    assert counter.count == 3
