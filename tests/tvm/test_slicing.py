"""A model cut anywhere computes, bit for bit, what TVM computes of it unsplit."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("tvm")

from tests.support.examples import examples
from tests.support.networks import Weights, as_model, every_tensor, image, module_of, relay_module
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline.errors import PlanError
from tvm_pipeline_tvm.kernel_sets import relay_kernels
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.executor import Slice
from tvm_pipeline_tvm.relay.int8 import exact_int8
from tvm_pipeline_tvm.relay.refused_lets import without_refused_lets
from tvm_pipeline_tvm.relay.splits import SplitByIndices

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

Compiled = Callable[..., RelayModel]


def plain_tvm(mod: tvm.IRModule, params: dict[str, Any], target: str, frame: dict[str, Any]) -> list[np.ndarray]:
    # TVM builds for few x86 processors without these three mends, and our kernels are part of what is compared. Other
    # tests compare the mends with numpy, and the kernels with TOPI's.
    kernels = relay_kernels()
    context = tvm.transform.PassContext(opt_level=3, config={"tir.add_lower_pass": [*kernels.lowering_passes()]})
    with exact_int8(), without_refused_lets(), kernels.building({}), context:
        library = relay.build(SplitByIndices()(mod), target, params=params)
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    executor.set_input(**frame)
    executor.run()
    return [executor.get_output(index).numpy() for index in range(executor.get_num_outputs())]


@pytest.mark.thorough
def test_the_whole_as_one_stage_is_what_plain_tvm_computes(compiled: Compiled, cpu: Device, target: str) -> None:
    """Of floats: `test_int8.py` compares bytes with numpy."""
    model = compiled("shapes")
    frame = random_frame(model.graph.inputs)
    outputs = model_outputs(model, run_stages(model, [(model.graph.operator_names, cpu)], frame))
    for output, expected in zip(outputs, plain_tvm(*relay_module("shapes"), target, frame), strict=True):
        np.testing.assert_array_equal(output, expected)
        assert np.std(output.astype("float64")) > 1e-3, "outputs all alike would prove nothing"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["branching", "splitting", "two_in_two_out"])
def test_every_cut_is_bit_exact(name: str, compiled: Compiled, cpu: Device, target: str) -> None:
    model = compiled(name)
    frame = random_frame(model.graph.inputs)
    expected = every_tensor(model, target, frame)
    crossed: set[str] = set()

    @examples(40)
    @given(st.integers(0, 2**32), st.integers(2, 4))
    def check(seed: int, stages: int) -> None:
        cut = random_stages(model.graph, Random(seed), stages)
        tensors = run_stages(model, [(part, cpu) for part in cut], frame)
        for tensor in model.graph.inputs:
            del tensors[tensor.name]
        for tensor, (port, array) in tensors.items():
            np.testing.assert_array_equal(to_logical(array, port.layout).ravel(), expected[tensor].ravel())
        crossed.update(tensors)

    check()
    assert set(model.graph.outputs) <= crossed
    assert len(crossed) > len(model.graph) / 2, "the cuts were hardly different"
    nodes = [node for node, _ in model.cut(model.graph.operator_names, cpu).operator_nodes]
    assert len(nodes) == len(set(nodes)), "a kernel counts to two operators"
    seconds = model.time_operators(cpu, 3)
    assert seconds.shape == (3, len(model.graph))
    assert (seconds > 0).all()


def test_a_stage_may_be_any_operators_between_two_downsets(compiled: Compiled, cpu: Device) -> None:
    model = compiled("branching")
    left, right = model.graph.operator_names[1:3]  # two branches that both read the stem
    part = model.cut([right], cpu)
    assert [port.name for port in part.inputs] == [model.graph.operator_names[0]]
    assert [port.name for port in part.outputs] == [right]
    assert left not in {name for _, name in part.operator_nodes}


def test_tensors_cross_in_the_kernels_own_layout(compiled: Compiled, cpu: Device) -> None:
    model = compiled("branching")
    port = model.cut(model.graph.operator_names[:1], cpu).outputs[0]
    assert port.layout.startswith("NCHW")
    assert len(port.shape) == 5


@pytest.mark.parametrize("k", range(1, 7))
def test_an_output_under_another_shape_than_its_readers_see(k: int, compiled: Compiled, cpu: Device) -> None:
    # `shapes` gives its softmax as (4, 4) and reads it inside as a picture of (1, 1, 4, 4).
    model = compiled("shapes")
    frame = random_frame(model.graph.inputs)
    all_names = model.graph.operator_names
    whole = model_outputs(model, run_stages(model, [(all_names, cpu)], frame))
    parts = model_outputs(model, run_stages(model, [(all_names[:k], cpu), (all_names[k:], cpu)], frame))
    assert whole[0].shape == (4, 4)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_parameters_are_shared_by_all_slices(compiled: Compiled, cpu: Device, target: str) -> None:
    model = compiled("branching")
    library = model.libraries[target]
    held = {name: array.handle.contents.data for name, array in library.params.items()}
    seen = set()
    for operators in (model.graph.operator_names, model.graph.operator_names[:4], model.graph.operator_names[4:]):
        part = model.cut(operators, cpu)
        running = Slice(library, part)
        for name in part.params.values():
            array = running.executor["get_input"](name)
            assert array.handle.contents.data == held[name]
            seen.add(name)
    assert seen == held.keys()


def test_activations_of_slices_are_no_more_than_all_tensors_and_no_less_than_one_operator_needs(
    compiled: Compiled, cpu: Device
) -> None:
    model = compiled("branching")
    sizes = {tensor.name: tensor.bytes for operator in model.graph.operators for tensor in operator.outputs}
    inner = sorted(sizes.values())[-2:]
    whole = model.stage(model.graph.operator_names, cpu).activation_bytes
    assert max(inner) < whole < sum(sizes.values())
    halves = [
        model.stage(part, cpu).activation_bytes
        for part in (model.graph.operator_names[:4], model.graph.operator_names[4:])
    ]
    assert all(half < whole for half in halves)
    # What a single operator reads and writes crosses its boundary and lives in the caller's buffers, where no layout
    # changes in front of it.
    alone = [name for name in model.graph.operator_names if len(model.cut([name], cpu).operator_nodes) == 1]
    assert alone
    assert all(model.stage([name], cpu).activation_bytes == 0 for name in alone)


def test_a_stage_follows_the_buffers_it_is_given(compiled: Compiled, cpu: Device) -> None:
    model = compiled("two_in_two_out")
    runner = model.stage(model.graph.operator_names, cpu)
    frames = [random_frame(model.graph.inputs, seed) for seed in range(5)]
    expected = [model_outputs(model, run_stages(model, [(model.graph.operator_names, cpu)], frame)) for frame in frames]
    slots = [([p.buffer() for p in runner.inputs], [p.buffer() for p in runner.outputs]) for _ in range(3)]
    for turn in range(12):
        inputs, outputs = slots[turn % 3]
        for port, array in zip(runner.inputs, inputs, strict=True):
            array[...] = frames[turn % 5][port.name]
        for array in outputs:
            array.fill(np.nan)
        runner.run(inputs, outputs)
        written = {port.name: array for port, array in zip(runner.outputs, outputs, strict=True)}
        for name, wanted in zip(model.graph.outputs, expected[turn % 5], strict=True):
            np.testing.assert_array_equal(written[name], wanted)


def test_more_buffers_than_are_remembered(compiled: Compiled, cpu: Device) -> None:
    model = compiled("branching")
    runner = model.stage(model.graph.operator_names, cpu)
    frame = random_frame(model.graph.inputs)
    expected = model_outputs(model, run_stages(model, [(model.graph.operator_names, cpu)], frame))[0]
    for _ in range(150):
        data, scores = runner.inputs[0].buffer(), runner.outputs[0].buffer()
        data[...] = frame["data"]
        runner.run([data], [scores])
        np.testing.assert_array_equal(scores, expected)


@pytest.mark.thorough
def test_a_slice_that_nobody_holds_is_gone(compiled: Compiled, cpu: Device) -> None:
    """A pipeline that runs for weeks makes one at every change of plan."""
    model = compiled("branching")
    part = Slice(model.libraries[cpu.target], model.cut(model.graph.operator_names, cpu))
    part.run([port.buffer() for port in part.inputs], [port.buffer() for port in part.outputs])
    seen = weakref.ref(part)
    del part
    gc.collect()
    assert seen() is None


def test_inputs_are_read_and_never_written(compiled: Compiled, cpu: Device) -> None:
    model = compiled("branching")
    for name in model.graph.operator_names:
        runner = model.stage([name], cpu)
        inputs, outputs = ([port.buffer() for port in ports] for ports in (runner.inputs, runner.outputs))
        for index, array in enumerate(inputs):
            array[...] = np.random.default_rng(index).standard_normal(array.shape)
        before = [ctypes.string_at(array.ctypes.data, array.nbytes) for array in inputs]
        runner.run(inputs, outputs)
        assert before == [ctypes.string_at(array.ctypes.data, array.nbytes) for array in inputs]


def test_what_is_no_stage_is_refused(compiled: Compiled, cpu: Device) -> None:
    model = compiled("branching")
    with pytest.raises(PlanError, match=r"a path leaves it and comes back at conv2d\+add\+relu_4"):
        model.stage([model.graph.operator_names[0], model.graph.operator_names[4]], cpu)
    with pytest.raises(PlanError, match="no operator conv2d_77; the plan is of another model"):
        model.stage(["conv2d_77"], cpu)
    with pytest.raises(PlanError, match="holds no operators"):
        model.stage([], cpu)


@pytest.mark.thorough
def test_fields_of_a_split_cross_where_only_one_is_read(two_devices: tuple[Device, Device]) -> None:
    """Behind a split that cuts a block, the change of layout is given every field, and reads one."""
    weights = Weights()
    fields = relay.split(weights.conv(image(), 12), 3, axis=1)  # AVX2 has blocks of six, SSE of four
    body = relay.concatenate([weights.conv(field, 8) for field in fields], axis=1)
    mod = module_of(body)
    targets = [device.target for device in two_devices]
    model = RelayModel.compile(as_model("fields", mod, weights.params), targets, lambda _: None)
    frame = random_frame(model.graph.inputs)
    (whole,) = model_outputs(model, run_stages(model, [(model.graph.operator_names, two_devices[0])], frame))
    for place in range(1, len(model.graph.operator_names)):
        for second in two_devices:
            stages = [
                (model.graph.operator_names[:place], two_devices[0]),
                (model.graph.operator_names[place:], second),
            ]
            (output,) = model_outputs(model, run_stages(model, stages, frame))
            np.testing.assert_allclose(output, whole, rtol=0 if second == two_devices[0] else 1e-4, atol=1e-5)
