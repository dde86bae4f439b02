"""The door for kernels: without a guest TVM's own, correct; and what passes through it is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("Relay")

from tests.support.networks import Weights, as_model, image, module_of, relay_module
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.workflow.steps import compile_source
from tvm_pipeline_tvm import kernel_sets
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.kernel_sets import OWN, RelayKernels, choices_of, hashable, relay_kernels
from tvm_pipeline_tvm.relay.compiled import RelayModel


@pytest.fixture
def no_guest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An entry point is there, and its package is not."""
    entry = EntryPoint("relay", "no_such_guest.kernel_set:kernels", kernel_sets.GROUP)
    monkeypatch.setattr(kernel_sets, "entry_points", lambda **_: [entry])
    kernel_sets._installed.cache_clear()
    yield
    kernel_sets._installed.cache_clear()


@pytest.mark.usefixtures("no_guest")
def test_without_a_guest_there_are_tvms_own_and_tuning_names_the_package() -> None:
    assert relay_kernels().key == OWN
    with pytest.raises(PlatformError, match="the package tvm_pipeline_kernels, a part of tvm-pipeline, is not instal"):
        relay_kernels().tune(as_model("chain", *relay_module("branching")), "llvm", 1.0)


def test_a_guest_that_misses_something_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value, module = "relay", "guest.kernels:kernels", "guest.kernels"

        def load(self) -> object:
            raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(kernel_sets, "entry_points", lambda **_: [Entry()])
    kernel_sets._installed.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="scipy"):
        relay_kernels()
    kernel_sets._installed.cache_clear()


def test_weights_in_16_bits_are_refused_and_relax_is_named() -> None:
    with pytest.raises(PlatformError, match=r"cpu0.* left out: weights in 16 bits need Relax \(TVM 0.27\), "):
        compile_source("resnet-18", {"data": (1, 3, 32, 32)}, weights="float16")


def test_choices_cross_as_json_and_are_the_same() -> None:
    choices = {("conv2d", ("TENSOR", (1, 2)), (1, 1)): (1, 2, 3), '["text"]': "[]"}
    assert choices_of([[list(key) if isinstance(key, tuple) else key, value] for key, value in choices.items()]) == {
        hashable(key): value for key, value in choices.items()
    }
    with pytest.raises(ValueError, match="no workload"):
        hashable([{"a": 1}])


@pytest.mark.thorough
@pytest.mark.needs("kernels")
@pytest.mark.usefixtures("own_cache")
def test_a_model_compiles_by_tvms_own_kernels_to_close_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are compiled in this process, since a child would find the guest."""
    weights, target, said = Weights(), host_target(), log_lines("INFO")
    body = weights.conv(image(extent=8), 16)
    mod = module_of(body)
    model = as_model("layer", mod, weights.params)
    device = Device("cpu0", "host", (0,), target)
    with_kernels = RelayModel.compile(model, (target,), lambda _: None)
    from tvm_pipeline_tvm.relay import build, fold

    for module in (build, fold):
        monkeypatch.setattr(module, "relay_kernels", RelayKernels)
    monkeypatch.setattr(build, "compile_in_child", _compile_here)
    stock = RelayModel.compile(model, (target,), lambda _: None)
    assert any("gets TVM's own kernels" in line for line in said)
    assert not stock.tuned()
    first, second = (one.libraries[target] for one in (stock, with_kernels))
    assert first.folder != second.folder
    frame = random_frame(stock.graph.inputs)
    results = []
    for compiled in (stock, with_kernels):
        names = compiled.graph.operator_names
        results.append(model_outputs(compiled, run_stages(compiled, [(names, device)], frame)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _compile_here(model, target, folder, host, choices, *, elsewhere):  # type: ignore[no-untyped-def]
    from tvm_pipeline_tvm.relay.build import compile_module, element_types
    from tvm_pipeline_tvm.relay.importer import import_model

    mod, params = import_model(model)
    compile_module(model.name, mod, params, target, folder, host, choices, elsewhere=elsewhere)
    return element_types(mod)
