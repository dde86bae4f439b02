"""The libraries of a model are checked against each other when it is compiled: what differs is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")

from tests.support.networks import Weights, as_model, image, module_of
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.agreement import check_agreement
from tvm_pipeline_tvm.compiled_model import SliceStage
from tvm_pipeline_tvm.host import backend
from tvm_pipeline_tvm.relay.compiled import RelayModel

import tvm  # isort: skip
from tvm import relay  # isort: skip

Compiled = Callable[..., RelayModel]
Pair = tuple[Device, Device]
CHECKING = "checking that both targets compute the same"


def spoilt(model: RelayModel, devices: Pair, **params: Any) -> RelayModel:
    """Return the model with other parameters in the second library."""
    first, second = (model.libraries[device.target] for device in devices)
    changed = replace(second, params={**second.params, **params}, folder=None)
    return RelayModel(model.graph.name, [first, changed], lambda _: None)


def weights_of(model: RelayModel, device: Device, operator: str) -> str:
    """Return the name of the largest parameter that an operator reads."""
    params = model.libraries[device.target].params
    return max(model.cut([operator], device).params.values(), key=lambda name: params[name].numpy().nbytes)


def test_targets_that_compute_the_same_agree(two_devices: Pair) -> None:
    lines = log_lines("INFO", of="tvm_pipeline_tvm.agreement")
    fresh = spoilt(layers(two_devices), two_devices)  # in no cache, so that it is checked in any case
    check_agreement(fresh, two_devices)
    check_agreement(fresh, two_devices[::-1])
    assert lines == [CHECKING] * 2


def test_one_target_is_not_checked(two_devices: Pair) -> None:
    lines = log_lines("INFO", of="tvm_pipeline_tvm.agreement")
    model = layers(two_devices)
    check_agreement(model, [two_devices[0], replace(two_devices[0], name="again")])
    check_agreement(model, two_devices[:1])
    assert lines == []


@pytest.mark.thorough
@pytest.mark.usefixtures("own_cache")
def test_the_host_backend_checks_once(two_devices: Pair) -> None:
    lines, cores = log_lines("INFO", of="tvm_pipeline_tvm.agreement"), os.sched_getaffinity(0)
    model = one_layer(1.0)
    backend.compile(model, two_devices)
    assert lines.count(CHECKING) == 1
    assert os.sched_getaffinity(0) == cores, "the caller's thread was bound"
    backend.compile(model, two_devices)
    assert lines.count(CHECKING) == 1
    backend.compile(one_layer(0.5), two_devices)
    assert lines.count(CHECKING) == 2


def one_layer(factor: float) -> Model:
    """Return a convolution whose weights are multiplied by the factor."""
    weights = Weights()
    mod = module_of(weights.conv(image(extent=8), 8))
    params = {name: tvm.nd.array(array.numpy() * np.float32(factor)) for name, array in weights.params.items()}
    return as_model("one layer", mod, params)


def layers(devices: Pair, count: int = 2) -> RelayModel:
    """Return convolutions whose weights have one shape, compiled for both devices."""
    weights, x = Weights(), image(channels=8, extent=8)
    for _ in range(count):
        x = weights.conv(x, 8)
    return compiled_for(as_model("layers", module_of(x), weights.params), devices)


def compiled_for(model: Model, devices: Pair) -> RelayModel:
    return RelayModel.compile(model, [device.target for device in devices], lambda _: None)


def test_swapped_convolutions_are_refused_by_name(two_devices: Pair) -> None:
    """They have weights of one shape: what an alignment that swaps them would run."""
    model = layers(two_devices)
    params = model.libraries[two_devices[1].target].params
    readers = {weights_of(model, two_devices[1], o.name): o.name for o in model.graph.operators if "conv2d" in o.kind}
    alike = [(a, b) for a in readers for b in readers if a < b and params[a].shape == params[b].shape]
    one, other = alike[0]
    wrong = spoilt(model, two_devices, **{one: params[other], other: params[one]})
    names = model.graph.operator_names
    first = min(readers[one], readers[other], key=names.index)
    with pytest.raises(ModelError) as error:
        check_agreement(wrong, two_devices)
    message = str(error.value)
    assert (
        f"operator {first} computes something else for 'llvm -mcpu=x86-64-v2' than for 'llvm -mcpu=x86-64-v3'"
        in message
    )
    assert "off by" in message
    assert message.endswith("give its devices one target, and report this")
    with pytest.raises(ModelError, match="than for 'llvm -mcpu=x86-64-v2'"):
        check_agreement(RelayModel("net", list(wrong.libraries.values())[::-1], lambda _: None), two_devices)


@pytest.mark.thorough
def test_an_error_of_a_thousandth_is_found(two_devices: Pair) -> None:
    model = compiled_for(one_layer(1.0), two_devices)
    name = weights_of(model, two_devices[1], model.graph.operators[0].name)
    weights = model.libraries[two_devices[1].target].params[name].numpy()
    with pytest.raises(ModelError, match=f"operator {model.graph.operators[0].name} ".replace("+", r"\+")):
        check_agreement(spoilt(model, two_devices, **{name: tvm.nd.array(weights * np.float32(1.001))}), two_devices)


@pytest.mark.thorough
def test_other_integers_are_found(compiled: Compiled, two_devices: Pair) -> None:
    model = compiled("int8", *(device.target for device in two_devices))
    check_agreement(spoilt(model, two_devices), two_devices)
    operator = next(o for o in model.graph.operators if "conv2d" in o.kind)
    name = weights_of(model, two_devices[1], operator.name)
    weights = model.libraries[two_devices[1].target].params[name].numpy().copy()
    weights.reshape(-1)[::7] *= -1
    with pytest.raises(ModelError, match=f"operator {operator.name} ".replace("+", r"\+")):
        check_agreement(spoilt(model, two_devices, **{name: tvm.nd.array(weights)}), two_devices)


@pytest.mark.thorough
def test_no_number_is_equal_to_itself_alone(two_devices: Pair) -> None:
    weights = Weights()
    body = weights.dense(relay.nn.batch_flatten(image(extent=8)), 10)
    model = compiled_for(as_model("dense", module_of(body), weights.params), two_devices)
    last = model.graph.operators[-1].name  # one weight that is no number makes one output so
    changed = []
    for device in two_devices:
        library = model.libraries[device.target]
        name = weights_of(model, device, last)
        weights = library.params[name].numpy().copy()
        weights.reshape(-1)[0] = np.nan
        changed.append(replace(library, params={**library.params, name: tvm.nd.array(weights)}, folder=None))
    check_agreement(RelayModel("net", changed, lambda _: None), two_devices)
    sound = model.libraries[two_devices[1].target]
    with pytest.raises(ModelError, match=f"operator {last} .* infinite or no number in other places"):
        check_agreement(RelayModel("net", [changed[0], sound], lambda _: None), two_devices)


class Beside(SliceStage):
    """A stage whose first output is off."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        super().run(inputs, outputs)
        outputs[0][...] *= 1.1


class FaultyCuts(RelayModel):
    """A model whose stages of several operators are wrong for the second target, and those of one operator right."""

    def stage(self, operators: Sequence[str], device: Device) -> SliceStage:
        runner = super().stage(operators, device)
        if len(operators) > 1 and device.target == list(self.libraries)[1]:
            runner.__class__ = Beside
        return runner


@pytest.mark.thorough
def test_a_cut_that_computes_something_else_is_refused(two_devices: Pair) -> None:
    libraries = [replace(library, folder=None) for library in layers(two_devices, 5).libraries.values()]
    with pytest.raises(ModelError, match=r"layers: cut into \S*conv2d\S+.* for 'llvm .*; .* than unsplit: output"):
        check_agreement(FaultyCuts("layers", libraries, lambda _: None), two_devices)
