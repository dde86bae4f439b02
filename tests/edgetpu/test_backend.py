"""The Edge TPU backend as a program uses it: pipelines over stand-ins and devices, bundles, devices that go away.

The library and the compiler are fakes (`fakes/`). The fake library leaves every operator to the CPU, so that what a
pipeline gives is compared with the whole file on TFLite's own kernels, bit for bit.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.networks import Op, Options, Type, Writer, random_feeds, random_network, random_stages, run, schema
from tests.support.examples import examples
from tests.support.fake_backend import make_plan
from tvm_pipeline import Bundle, Pipeline, open_bundle, profile_model, write_bundle
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.registry import settle_platform
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, PlanError, PlatformError, StageError
from tvm_pipeline.testing import check_backend, cut_cases
from tvm_pipeline_edgetpu import backend
from tvm_pipeline_edgetpu.interpreter import CPU, InterpreterStage

NETWORK = random_network(4)

pytestmark = pytest.mark.usefixtures("nothing_installed")


def tpus(*addresses: str, **options: Any) -> Platform:
    devices = tuple(Device(f"tpu{i}", "edgetpu", target=target, **options) for i, target in enumerate(addresses))
    return Platform("a desk", devices)


TWO = tpus("usb:0", "usb:1")


def compiled(platform: Platform, content: bytes = NETWORK) -> tuple[CompiledModel, Platform]:
    lead, settled = settle_platform(platform)
    return lead.compile(Model("net", "tflite", content), settled.devices), settled


def plan_of(graph: OperatorGraph, stages: list[Stage]) -> Plan:
    return make_plan(graph, *((stage.devices, stage.operators) for stage in stages))


def frames_of(graph: OperatorGraph, count: int) -> list[dict[str, np.ndarray]]:
    return [random_feeds(graph, seed) for seed in range(count)]


def assert_as_the_whole(results: Any, content: bytes, frames: list[dict[str, np.ndarray]]) -> None:
    """Check every frame, in order, against the whole file on the kernels that a pipeline uses."""
    taken = list(results)
    assert [result.frame for result in taken] == list(range(len(frames)))
    for result, frame in zip(taken, frames, strict=True):
        whole = run(content, frame, xnnpack=True)
        assert result.outputs.keys() == whole.keys()
        for name, value in whole.items():
            assert result.outputs[name].dtype == value.dtype
            np.testing.assert_array_equal(result.outputs[name], value, err_msg=name)


# The contract


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(2))
def test_stand_ins_keep_the_contract(seed):
    check_backend(backend, Model("net", "tflite", random_network(seed, operators=12)), tpus("usb:0", "cpu").devices)


@pytest.mark.thorough
def test_devices_keep_the_contract(plug, install_compiler, monkeypatch):
    """A process compiles each stage, which takes long; so one cut is tried here, and more of them with stand-ins."""
    monkeypatch.setattr(cut_cases, "MOST_CUTS", 1)
    plug("usb:0,usb:1")
    install_compiler()
    check_backend(backend, Model("net", "tflite", random_network(4, operators=6)), TWO.devices)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "uint8"}, "has the type uint8 and the shape .* in the file, and TFLite computes it as int8"),
        ({"name": "another"}, "TFLite finds tensor/0:0, tensor/1:0 in a stage, and not its tensor another"),
    ],
)
def test_a_compiled_file_of_other_types_or_names_is_refused(change, told):
    graph = compiled(TWO)[0].graph
    outputs = [graph.tensors[name] for name in graph.outputs]
    with pytest.raises(ModelError, match=told):
        InterpreterStage(NETWORK, [replace(graph.inputs[0], **change), graph.inputs[1]], outputs, CPU, ())


# Pipelines over stand-ins


@examples(25)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 3))
def test_pipelines_give_what_the_whole_model_gives(seed, count):
    content = random_network(seed)
    model, platform = compiled(tpus("usb:0", "usb:1", "pci:0"), content)
    frames = frames_of(model.graph, 5)
    with Pipeline(model, plan_of(model.graph, random_stages(model.graph, count, seed)), platform) as pipeline:
        assert_as_the_whole(pipeline.map(frames), content, frames)


def test_replicas_and_a_device_that_comes_again():
    model, platform = compiled(tpus("usb:0", "usb:1", "usb:2"))
    first, second, third = (stage.operators for stage in random_stages(model.graph, 3, 0))
    frames = frames_of(model.graph, 40)
    for stages in (
        [Stage(("tpu0",), first), Stage(("tpu1", "tpu2"), (*second, *third))],
        [Stage(("tpu0",), first), Stage(("tpu1",), second), Stage(("tpu0",), third)],
    ):
        with Pipeline(model, plan_of(model.graph, stages), platform) as pipeline:
            assert_as_the_whole(pipeline.map(frames), NETWORK, frames)


def test_two_models_on_the_same_devices():
    contents = [random_network(1), random_network(2)]
    models = [compiled(TWO, content) for content in contents]
    frames = [frames_of(model.graph, 30) for model, _ in models]
    one, other = (
        Pipeline(model, plan_of(model.graph, random_stages(model.graph, 2, 0)), platform) for model, platform in models
    )
    with one, other:
        taken = list(zip(one.map(frames[0]), other.map(frames[1]), strict=True))
    for results, content, fed in zip(zip(*taken, strict=True), contents, frames, strict=True):
        assert_as_the_whole(results, content, fed)


def test_no_figure_of_a_stand_in_passes_for_one_of_the_device():
    model, platform = compiled(TWO)
    with Pipeline(model, plan_of(model.graph, random_stages(model.graph, 2, 0)), platform) as pipeline:
        list(pipeline.map(frames_of(model.graph, 20)))
        assert [stage.device for stage in pipeline.statistics().stages] == ["tpu0 (stand-in)", "tpu1 (stand-in)"]
    profile = profile_model(backend, model, platform, repeats=8)
    assert profile.devices.keys() == {"tpu0", "tpu1"}
    assert all(seconds and seconds > 0 for device in profile.devices.values() for seconds in device.seconds.values())
    for name in ("tpu0", "tpu1"):
        assert f"device {name} was not here, measured were TFLite's CPU kernels" in profile.warnings


def test_a_stage_of_operators_that_the_model_does_not_have():
    model, platform = compiled(TWO)
    with pytest.raises(PlanError, match="the model net has no operator conv_2d_99"):
        model.stage(["conv_2d_99"], platform.devices[0])


# Devices that are here


def test_every_stage_is_compiled_once_and_runs_on_its_device(plug, install_compiler):
    plug("usb:0,usb:1,pci:0")
    calls = install_compiler()
    model, platform = compiled(tpus("usb:0", "usb:1", "pci:0"))
    stages = random_stages(model.graph, 2, 3)
    stages[1] = Stage(("tpu1", "tpu2"), stages[1].operators)  # replicas share what was compiled
    plan, frames = plan_of(model.graph, stages), frames_of(model.graph, 10)
    for _ in range(2):
        with Pipeline(model, plan, platform) as pipeline:
            assert_as_the_whole(pipeline.map(frames), NETWORK, frames)
            assert [stage.device for stage in pipeline.statistics().stages] == ["tpu0", "tpu1", "tpu2"]
        assert calls() == 2
    again, _ = compiled(platform)
    Pipeline(again, plan, platform)
    assert calls() == 2  # another process would find it in the cache, too


def test_devices_that_are_here_are_left_to_their_model(plug):
    """Nothing is compiled to profile them."""
    plug("usb:0,usb:1")
    model, platform = compiled(TWO)
    profile = profile_model(backend, model, platform)
    assert profile.devices == {}
    assert profile.warnings == ()


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("crash", ModelError, r"edgetpu_compiler was ended by signal SIGSEGV for .*\bnet\b"),
        ("silent", ModelError, r"ended with exit code 0 and wrote no compiled file for .*\bnet\b"),
        ("fail", ModelError, r"ended with exit code 1 for .*\bnet\b.*; cut the model elsewhere"),
        (None, PlatformError, r"device tpu0: edgetpu_compiler is not on the PATH; install"),
    ],
)
def test_a_compiler_that_fails_or_is_missing(plug, install_compiler, monkeypatch, mode, error, words):
    plug("usb:0,usb:1")
    if mode:
        install_compiler()
        monkeypatch.setenv("FAKE_EDGETPU_COMPILER", mode)
    model, platform = compiled(TWO)
    with pytest.raises(error, match=words):
        Pipeline(model, plan_of(model.graph, random_stages(model.graph, 2, 0)), platform)


# Bundles


def write(path: Path, platform: Platform) -> tuple[OperatorGraph, list[str]]:
    """Write a bundle of two stages; return its graph, and the compiled files in it."""
    model, settled = compiled(platform)
    plan = plan_of(model.graph, random_stages(model.graph, 2, 0))
    write_bundle(path, Bundle(model.graph, settled, profile_model(backend, model, settled, 4), plan, model))
    with tarfile.open(path) as tar:
        return model.graph, [name for name in tar.getnames() if name.endswith("_edgetpu.tflite")]


def assert_runs(bundle: Bundle) -> None:
    frames = frames_of(bundle.graph, 5)
    with Pipeline(bundle.compiled, bundle.plan, bundle.platform) as pipeline:
        assert_as_the_whole(pipeline.map(frames), NETWORK, frames)


@pytest.mark.thorough
def test_a_bundle_made_where_the_devices_are_needs_no_compiler(plug, install_compiler, tmp_path, monkeypatch):
    plug("usb:0,usb:1")
    calls = install_compiler()
    _, parts = write(tmp_path / "net.tar", TWO)
    assert (len(parts), calls()) == (2, 2)
    (tmp_path / "bin" / "edgetpu_compiler").unlink()
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path / "another"))
    with open_bundle(tmp_path / "net.tar") as bundle:
        assert bundle.platform.stand_ins == {}
        assert_runs(bundle)


@pytest.mark.thorough
def test_a_bundle_made_on_stand_ins_runs_where_the_devices_are(plug, install_compiler, tmp_path):
    """As on a desk with the compiler, for a board without."""
    plug("usb:0")
    install_compiler()
    _, parts = write(tmp_path / "net.tar", TWO)
    assert len(parts) == 2
    with open_bundle(tmp_path / "net.tar") as bundle:
        assert bundle.profile.devices.keys() == {"tpu1"}
        assert_runs(bundle)
    (tmp_path / "bin" / "edgetpu_compiler").unlink()
    plug("usb:0,usb:1")
    with open_bundle(tmp_path / "net.tar") as bundle:
        assert bundle.platform.stand_ins == {}
        assert bundle.profile.devices == {}
        assert bundle.profile.warnings[-1] == (
            "tpu1: measured on a stand-in when the bundle was made; its model speaks for it"
        )
        assert_runs(bundle)


def test_a_bundle_made_with_neither_device_nor_compiler_asks_for_the_compiler(plug, tmp_path):
    _, parts = write(tmp_path / "net.tar", TWO)
    assert parts == []
    with open_bundle(tmp_path / "net.tar") as bundle:
        assert_runs(bundle)
    plug("usb:0,usb:1")
    told = "device tpu0: edgetpu_compiler is not on the PATH"
    with open_bundle(tmp_path / "net.tar") as bundle, pytest.raises(PlatformError, match=told):
        Pipeline(bundle.compiled, bundle.plan, bundle.platform)


@pytest.mark.thorough
def test_a_bundle_made_where_the_devices_are_does_not_fall_back(plug, install_compiler, tmp_path):
    plug("usb:0,usb:1")
    install_compiler()
    write(tmp_path / "net.tar", TWO)
    plug("usb:0")
    told = r"net\.tar was made where device tpu1 was present, .*usb:1.*; plug it in, or compile the model"
    with pytest.raises(BundleError, match=told), open_bundle(tmp_path / "net.tar"):
        pass


def test_a_platform_that_asks_for_the_cpu_kernels_needs_no_compiler_in_its_bundle(install_compiler, tmp_path):
    calls = install_compiler()
    _, parts = write(tmp_path / "net.tar", tpus("cpu", "cpu"))
    assert (parts, calls()) == ([], 0)
    with open_bundle(tmp_path / "net.tar") as bundle:
        assert_runs(bundle)


@pytest.mark.parametrize("damaged", ["index.json", "model.tflite"])
def test_a_damaged_compiled_model_is_refused(tmp_path, damaged):
    model, settled = compiled(TWO)
    model.save(tmp_path, random_stages(model.graph, 2, 0), settled)
    (tmp_path / damaged).unlink()
    with pytest.raises(BundleError, match=r"damaged compiled model: .*; compile it again"):
        backend.load(tmp_path, [])


# Devices that go away


@pytest.mark.thorough
def test_a_device_unplugged_before_the_run(plug, install_compiler):
    plug("usb:0,usb:1")
    install_compiler()
    model, platform = compiled(TWO)
    plug("usb:0")
    with pytest.raises(PlatformError, match=r"device tpu1: Edge TPU usb:1: .*cannot open it .*; plug it in"):
        Pipeline(model, plan_of(model.graph, random_stages(model.graph, 2, 0)), platform)


def picking_network() -> bytes:
    """Return y[i] = (x + x)[index[i]]: an index that is out of range ends the run of its frame."""
    writer = Writer()
    x, index = writer.tensor((1, 8)), writer.tensor((4,), Type.INT32, scale=0)
    doubled, y = writer.tensor((1, 8)), writer.tensor((1, 4))
    writer.operator(Op.ADD, [x, x], [doubled], Options.AddOptions, schema.AddOptionsT())
    writer.operator(Op.GATHER, [doubled, index], [y], Options.GatherOptions, schema.GatherOptionsT(axis=1))
    return writer.content([x, index], [y])


def indexed(graph: OperatorGraph, positions: list[int]) -> Iterator[dict[str, np.ndarray]]:
    x, index = (tensor.name for tensor in graph.inputs)
    for position in positions:
        yield {x: np.arange(8, dtype=np.int8)[None] + np.int8(position), index: np.full(4, position, np.int32)}


@pytest.mark.thorough
@pytest.mark.parametrize("here", [True, False])
def test_a_device_that_fails_during_a_run_is_named_after_the_frames_before(plug, install_compiler, here):
    plug("usb:0,usb:1" if here else "")
    install_compiler()
    content = picking_network()
    model, platform = compiled(TWO, content)
    plan = make_plan(model.graph, (["tpu0"], ["add_0"]), (["tpu1"], ["gather_1"]))
    frames, taken = list(indexed(model.graph, [0, 3, 7, 1, 2, 99, 4, 5])), []
    with Pipeline(model, plan, platform) as pipeline:
        with pytest.raises(StageError) as caught:
            taken.extend(pipeline.map(frames))
        assert_as_the_whole(taken, content, frames[:5])
    failed = caught.value
    assert (failed.stage, failed.device, failed.frame) == (1, "tpu1" if here else "tpu1 (stand-in)", 5)
    assert "gather index out of bounds" in str(failed)
    # Plugged in again, the same plan runs.
    with Pipeline(model, plan, platform) as pipeline:
        assert_as_the_whole(pipeline.map(frames[:5]), content, frames[:5])
