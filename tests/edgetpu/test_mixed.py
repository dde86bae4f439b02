"""TVM on the CPU beside Edge TPUs: one operator graph, stages of both kinds, int8 tensors that cross between them.

TVM rounds otherwise than TFLite: one operator differs by 1 at most on equal inputs, TVM's add at every fourth element.
A dense layer behind that add sums such differences up, to 4 in the network below.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")
needs("tvm")
needs("tflite")

from tests.edgetpu.networks import Op, Options, Type, Writer, random_feeds, run, schema
from tests.support.fake_backend import make_plan
from tvm_pipeline import Bundle, Pipeline, Problem, open_bundle, planning, profile_model, settle_platform, write_bundle
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.backends.sliced import SlicedBackend, SlicedModel
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform


def write_network() -> bytes:
    """Write an int8 network of six operators with scales as a converter would choose them, a branch and a reshape."""
    writer, draw = Writer(), np.random.default_rng(0)

    def parameters(shape: tuple[int, ...], outputs: int, scale: float) -> list[int]:
        weights = writer.tensor(shape, scale=0.01, data=draw.integers(-60, 61, shape).astype(np.int8))
        bias = draw.integers(-999, 999, outputs).astype(np.int32)
        return [weights, writer.tensor((outputs,), Type.INT32, scale=scale * 0.01, data=bias)]

    x, a = writer.tensor((1, 8, 8, 4), scale=0.05), writer.tensor((1, 8, 8, 8), scale=0.11)
    options = schema.Conv2DOptionsT(strideW=1, strideH=1)
    reads = [x, *parameters((8, 3, 3, 4), 8, 0.05)]
    writer.operator(Op.CONV_2D, reads, [a], Options.Conv2DOptions, options, version=3)

    b = writer.tensor((1, 8, 8, 8), scale=0.2)
    options = schema.DepthwiseConv2DOptionsT(strideW=1, strideH=1, depthMultiplier=1)
    reads = [a, *parameters((1, 3, 3, 8), 8, 0.11)]
    writer.operator(Op.DEPTHWISE_CONV_2D, reads, [b], Options.DepthwiseConv2DOptions, options, version=3)

    c = writer.tensor((1, 8, 8, 8), scale=0.23)
    writer.operator(Op.ADD, [a, b], [c], Options.AddOptions, schema.AddOptionsT())

    d = writer.tensor((1, 4, 4, 8), scale=0.23)
    options = schema.Pool2DOptionsT(strideW=2, strideH=2, filterWidth=2, filterHeight=2)
    writer.operator(Op.MAX_POOL_2D, [c], [d], Options.Pool2DOptions, options)

    e, shape = writer.tensor((1, 128), scale=0.23), np.array([1, 128], np.int32)
    reads = [d, writer.tensor((2,), Type.INT32, scale=0, data=shape)]
    options = schema.ReshapeOptionsT(shape.tolist())
    writer.operator(Op.RESHAPE, reads, [e], Options.ReshapeOptions, options, version=1)

    f = writer.tensor((1, 10), scale=0.4)
    options = schema.FullyConnectedOptionsT()
    reads = [e, *parameters((10, 128), 10, 0.23)]
    writer.operator(Op.FULLY_CONNECTED, reads, [f], Options.FullyConnectedOptions, options, version=4)
    return writer.content([x], [f])


NETWORK = write_network()
CORES = sorted(os.sched_getaffinity(0))
DESK = Platform(
    "a desk with a stick",
    (
        Device("cpu0", "host", (CORES[0],)),
        Device("tpu0", "edgetpu", target="usb:0"),
        Device("cpu1", "host", (CORES[-1],)),
    ),
)


pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two CPU devices need two cores")


@pytest.fixture(autouse=True, scope="module")
def cache(empty_cache, tmp_path_factory) -> Path:
    """Keep what TVM compiles for the whole module; provide no device and no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        folder = empty_cache(tmp_path_factory.mktemp("cache"))
        patch.setenv("TVM_PIPELINE_CACHE", str(folder))
        patch.delenv("FAKE_EDGETPUS", raising=False)
        yield folder


@pytest.fixture(scope="module")
def platform(cache) -> Platform:
    return settle_platform(DESK)[1]


@pytest.fixture(scope="module")
def model(platform) -> SlicedModel:
    lead, _ = settle_platform(DESK)
    return lead.compile(Model("net", "tflite", NETWORK), platform.devices)


@pytest.fixture(scope="module")
def frames(model) -> list[dict[str, Array]]:
    return [random_feeds(model.graph, seed) for seed in range(20)]


def cut(model: CompiledModel, *stages: tuple[str, int, int]) -> Plan:
    """Return stages of operators start..end-1, each on one device."""
    names = model.graph.operator_names
    return make_plan(model.graph, *(([device], names[start:end]) for device, start, end in stages))


def outputs_of(model: CompiledModel, plan: Plan, platform: Platform, frames: list[dict[str, Array]]) -> list[Array]:
    [output] = model.graph.outputs
    with Pipeline(model, plan, platform) as pipeline:
        results = list(pipeline.map(frames))
    assert [result.frame for result in results] == list(range(len(frames)))
    return [result.outputs[output] for result in results]


def difference(found: Array, expected: Array) -> int:
    assert found.dtype == expected.dtype == np.int8
    return int(np.abs(found.astype(int) - expected).max())


def test_the_edge_tpu_backend_cuts_for_both_in_whichever_order_they_stand(model, platform):
    for devices in (DESK.devices, DESK.devices[::-1]):
        lead, settled = settle_platform(Platform("desk", devices))
        assert isinstance(lead, SlicedBackend)
        assert set(lead.backends.values()) == {find_backend("edgetpu"), find_backend("host")}
        assert lead.compile(Model("net", "tflite", NETWORK), settled.devices).graph == model.graph
        assert list(settled.stand_ins) == ["tpu0"]
    assert all(device.target for device in platform.devices)  # the host's was settled by its own backend


@pytest.mark.thorough
def test_an_operator_of_tvm_differs_by_one_at_most(model, platform, frames):
    for operator in model.graph.operators:
        if operator.kind == "reshape":
            continue
        runner = model.stage([operator.name], platform.device("cpu0"))
        [port] = runner.outputs
        output = port.buffer()
        for frame in frames:
            expected = run(NETWORK, frame, every=True)
            inputs = [taken.buffer() for taken in runner.inputs]
            for array, taken in zip(inputs, runner.inputs, strict=True):
                array[...] = expected[taken.name]
            runner.run(inputs, [output])
            assert difference(output, expected[port.name]) <= 1, operator.name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("stages", "most"),
    [
        ([("cpu0", 0, 2), ("tpu0", 2, 4), ("cpu1", 4, 6)], 1),  # two tensors cross the first cut
        ([("tpu0", 0, 3), ("cpu0", 3, 6)], 1),
        ([("cpu0", 0, 5), ("tpu0", 5, 6)], 4),  # the last operator before the cut only shows another shape
        ([("cpu0", 0, 1), ("tpu0", 1, 4), ("cpu0", 4, 6)], 1),  # a device that comes again
    ],
    ids=["cpu-tpu-cpu", "tpu-cpu", "cpu-tpu", "cpu-tpu-the-same-cpu"],
)
def test_stages_of_both_kinds_make_one_pipeline(model, platform, frames, stages, most):
    found = outputs_of(model, cut(model, *stages), platform, frames)
    for array, frame in zip(found, frames, strict=True):
        [whole] = run(NETWORK, frame).values()
        assert difference(array, whole) <= most


def test_tensors_cross_under_the_names_and_types_of_the_file(model, platform):
    """Whichever backend runs a stage, it takes and gives the same."""
    names = model.graph.operator_names
    for operators in (names[:2], names[4:]):
        ports = []
        for name in ("cpu0", "tpu0"):
            runner = model.stage(operators, platform.device(name))
            taken, given = (
                {(p.name, p.shape, p.dtype, p.layout) for p in side} for side in (runner.inputs, runner.outputs)
            )
            ports.append((taken, given))
        assert ports[0] == ports[1]
        assert {dtype for side in ports[0] for _, _, dtype, _ in side} == {"int8"}


@pytest.mark.thorough
def test_stages_of_tvm_alone_give_what_tvm_gives_for_the_whole_file(model, platform, frames):
    """Slices are compiled one by one, and no rounding depends on what else a compilation holds."""
    host = [device for device in platform.devices if device.backend == "host"]
    whole = find_backend("host").compile(Model("net", "tflite", NETWORK, model.graph.inputs), host)
    expected = outputs_of(whole, cut(whole, ("cpu0", 0, len(whole.graph))), platform, frames)
    found = outputs_of(model, cut(model, ("cpu0", 0, 3), ("cpu1", 3, 6)), platform, frames)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("device", ["cpu0", "tpu0"])
def test_a_stage_that_only_shows_another_shape_is_a_copy(model, platform, device):
    runner = model.stage(["reshape_4"], platform.device(device))
    assert [port.shape for port in runner.outputs] == [(1, 128)]


@pytest.mark.thorough
def test_both_kinds_are_profiled_and_planned_together(model, platform, cache, tmp_path, frames):
    lead, _ = settle_platform(DESK)
    profile = profile_model(lead, model, platform, repeats=8)
    for name in ("cpu0", "tpu0", "cpu1"):
        seconds = list(profile.devices[name].seconds.values())
        assert len(seconds) == len(model.graph)
        assert all(figure is not None and figure > 0 for figure in seconds)
    assert "device tpu0 was not here, measured were TFLite's CPU kernels" in profile.warnings
    decision = planning.plan(Problem(model.graph, platform, profile))
    # Whether the best plan is proven depends on the figures: the bound of replicated stages leaves out the links.
    assert decision.plan.bound >= decision.plan.value
    assert decision.plan.value == max(plan.value for plan in decision.candidates)

    plan = cut(model, ("cpu0", 0, 2), ("tpu0", 2, 4), ("cpu1", 4, 6))
    expected = outputs_of(model, plan, platform, frames)
    write_bundle(tmp_path / "net.tar", Bundle(model.graph, platform, profile, plan, model))
    shutil.rmtree(cache)
    with open_bundle(tmp_path / "net.tar") as bundle:
        assert bundle.platform == platform
        found = outputs_of(bundle.compiled, bundle.plan, bundle.platform, frames)
    np.testing.assert_array_equal(found, expected)
    assert not cache.exists()  # nothing was compiled again


def twins() -> bytes:
    """Return two equal operators and a third that shows their result under another shape; all are outputs."""
    writer = Writer()
    x = writer.tensor((1, 4, 4, 4))
    pooled = [writer.tensor((1, 4, 4, 4)) for _ in range(2)]
    for made in pooled:
        options = schema.Pool2DOptionsT(strideW=1, strideH=1, filterWidth=2, filterHeight=2)
        writer.operator(Op.MAX_POOL_2D, [x], [made], Options.Pool2DOptions, options)
    shape = np.array([1, 64], np.int32)
    flat = writer.tensor((1, 64))
    reads = [pooled[0], writer.tensor((2,), Type.INT32, scale=0, data=shape)]
    writer.operator(Op.RESHAPE, reads, [flat], Options.ReshapeOptions, schema.ReshapeOptionsT([1, 64]), version=1)
    return writer.content([x], [*pooled, flat])


@pytest.mark.thorough
def test_what_tvm_computes_once_is_given_under_both_names(platform):
    lead, _ = settle_platform(DESK)
    content = twins()
    model = lead.compile(Model("twins", "tflite", content), platform.devices)
    frames = [random_feeds(model.graph, seed) for seed in range(5)]
    for stages in ([("cpu0", 0, 2), ("tpu0", 2, 3)], [("cpu0", 0, 3)]):
        with Pipeline(model, cut(model, *stages), platform) as pipeline:
            for result, frame in zip(pipeline.map(frames), frames, strict=True):
                for name, whole in run(content, frame).items():
                    np.testing.assert_array_equal(result.outputs[name], whole)
