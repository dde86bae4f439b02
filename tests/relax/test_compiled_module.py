"""`tvm_pipeline.compile` takes a Relax module: its outputs are TVM's own, and what cannot run is named."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import tvm_pipeline as tp
from tvm_pipeline.errors import ModelError


class Net(nn.Module):
    def __init__(self) -> None:
        self.stem = nn.Conv2D(3, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.head(nn.op.sum(nn.op.relu(self.stem(x)), [2, 3]))


def module() -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """A module whose weights are parameters of main, and the weights."""
    mod, parameters = Net().export_tvm(spec={"forward": {"x": nn.spec.Tensor((1, 3, 16, 16), "float32")}})
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal([int(n) for n in p.shape]).astype("float32") for name, p in parameters}
    return tvm.IRModule({"main": mod["forward"].with_attr("global_symbol", "main")}), weights


def test_a_module_and_its_parameters_compute_what_tvm_does() -> None:
    mod, weights = module()
    bound = relax.transform.BindParams("main", {name: tvm.runtime.tensor(w) for name, w in weights.items()})(mod)
    frame = np.random.default_rng(1).standard_normal((1, 3, 16, 16)).astype("float32")
    expected = relax.VirtualMachine(tvm.compile(bound, "llvm"), tvm.cpu())["main"](tvm.runtime.tensor(frame)).numpy()
    with tp.compile(mod, weights, verify_s=0) as by_name, tp.compile(bound, verify_s=0) as as_constants:
        np.testing.assert_allclose(by_name(frame), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(by_name(frame), as_constants(frame))


def test_what_cannot_run_is_named() -> None:
    mod, _ = module()
    with pytest.raises(ModelError, match=r"the weights stem\.weight, stem\.bias, .* give them as `params`"):
        tp.compile(mod)
    with pytest.raises(ModelError, match="needs a Relax function `main`, and its functions are forward"):
        tp.compile(tvm.IRModule({"forward": mod["main"]}))
