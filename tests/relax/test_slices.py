"""A model compiled by Relax: its values, and its slices bit for bit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np
import onnxruntime
import pytest

from tests.relax.fused import MCPU, target_of
from tests.relax.mixed_net import INPUTS, mixed_net
from tests.support.stages import model_outputs, random_stages, run_stages
from tvm_pipeline.backends.contract import Array, CompiledModel, Port
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import BundleError, PlanError
from tvm_pipeline_tvm.relax.build import load_library
from tvm_pipeline_tvm.relax.compiled import RelaxModel

LANES = (16, 8)  # the networks of test_small_networks.py have the narrowest vectors, too


def bind(_device: Device) -> None:
    """Leave the thread as it is: the tests run one stage after the other."""


def device_of(lanes: int) -> Device:
    target_of(lanes)
    return Device(f"of{lanes}", "host", (0,), f"llvm -mcpu={MCPU[lanes]}")


@pytest.fixture(scope="module")
def model() -> Model:
    return mixed_net()


@pytest.fixture(scope="module")
def frame() -> dict[str, Array]:
    return {name: noise(Port(name, shape, "float32")) for name, shape in INPUTS.items()}


@pytest.fixture(scope="module")
def expected(model: Model, frame: Mapping[str, Array]) -> list[Array]:
    session = onnxruntime.InferenceSession(model.content, providers=["CPUExecutionProvider"])
    return session.run(None, dict(frame))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(params=LANES, scope="module")
def compiled(request: pytest.FixtureRequest, model: Model, cache: Path) -> tuple[CompiledModel, Device]:
    device = device_of(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(cache))
        return RelaxModel.compile(model, [device.target], bind), device


def outputs(
    compiled: CompiledModel, stages: Sequence[tuple[Sequence[str], Device]], frame: Mapping[str, Array]
) -> list[Array]:
    return model_outputs(compiled, run_stages(compiled, stages, frame))


def whole(compiled: CompiledModel, device: Device, frame: Mapping[str, Array]) -> list[Array]:
    return outputs(compiled, [(compiled.graph.operator_names, device)], frame)


def check_equal(found: Sequence[Array], right: Sequence[Array], what: object) -> None:
    for one, other in zip(found, right, strict=True):
        np.testing.assert_array_equal(one, other, str(what))


def test_values_are_those_of_onnxruntime(
    compiled: tuple[CompiledModel, Device], frame: dict[str, Array], expected: list[Array]
) -> None:
    model, device = compiled
    assert model.graph.outputs == ("image", "scores")
    for found, right in zip(whole(model, device, frame), expected, strict=True):
        np.testing.assert_allclose(found.reshape(right.shape), right, rtol=1e-4, atol=1e-5)


def test_random_cuts_are_equal_bit_for_bit(compiled: tuple[CompiledModel, Device], frame: dict[str, Array]) -> None:
    model, device = compiled
    right, draw = whole(model, device, frame), Random(1)
    for _ in range(15):
        parts = random_stages(model.graph, draw, draw.randint(2, 4))
        check_equal(outputs(model, [(part, device) for part in parts], frame), right, parts)


def test_operators_run_in_blocks(compiled: tuple[CompiledModel, Device]) -> None:
    """Only the input of the grouped convolution and the outputs change their layout; all else stays in blocks."""
    model, _ = compiled
    (library,) = model.libraries.values()
    moved = [call.function for call, kernel in zip(library.calls, library.kernels, strict=True) if kernel.is_glue]
    assert sum("layout_transform" in name for name in moved) <= 3, moved
    assert model.graph.operators[0].kind == "conv2d+add+relu"


def test_stages_of_two_targets_agree(model: Model, frame: dict[str, Array], own_cache: Path) -> None:
    """Libraries of different vectors share one graph, and a cut between them is near the unsplit model."""
    devices = [device_of(8), device_of(4)]
    compiled = RelaxModel.compile(model, [device.target for device in devices], bind)
    right, draw = whole(compiled, devices[0], frame), Random(2)
    for _ in range(3):
        parts = random_stages(compiled.graph, draw, 3)
        found = outputs(compiled, [(part, devices[index % 2]) for index, part in enumerate(parts)], frame)
        for one, other in zip(found, right, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_saved_model_computes_the_same(
    compiled: tuple[CompiledModel, Device], frame: dict[str, Array], tmp_path: Path
) -> None:
    model, device = compiled
    model.save(tmp_path)
    loaded = RelaxModel.load(tmp_path, bind)
    assert loaded.graph == model.graph
    files = [library.folder / "weights.bin" for each in (loaded, model) for library in each.libraries.values()]
    assert len({file.stat().st_ino for file in files}) == 1  # whatever maps it shares its pages
    check_equal(whole(loaded, device, frame), whole(model, device, frame), "loaded")


def test_every_cut_is_equal_bit_for_bit(compiled: tuple[CompiledModel, Device], frame: dict[str, Array]) -> None:
    """Among them those behind a view, where a tensor has another shape for its reader than for its writer."""
    model, device = compiled
    right, names = whole(model, device, frame), model.graph.operator_names
    for cut in range(1, len(names)):
        check_equal(outputs(model, [(names[:cut], device), (names[cut:], device)], frame), right, f"cut at {cut}")


@pytest.mark.parametrize("file", ["kernels.so", "weights.bin", "kernels.json"])
def test_a_damaged_library_is_refused(compiled: tuple[CompiledModel, Device], tmp_path: Path, file: str) -> None:
    model, _ = compiled
    model.save(tmp_path)
    damaged = tmp_path / "0" / file
    content = damaged.read_bytes()
    damaged.unlink()  # the weights are the cache's file under another name
    damaged.write_bytes(content[:-7])
    with pytest.raises(BundleError, match="compile it again"):
        load_library(tmp_path / "0")


def test_weights_outside_of_their_file_are_refused(compiled: tuple[CompiledModel, Device], tmp_path: Path) -> None:
    model, _ = compiled
    model.save(tmp_path)
    described = tmp_path / "0" / "kernels.json"
    described.write_text(described.read_text().replace('"start":0,', '"start":99999999,', 1))
    with pytest.raises(BundleError, match="compile it again"):
        load_library(tmp_path / "0")


def test_memory_order_needs_no_more(model: Model, cache: Path, frame: dict[str, Array]) -> None:
    device = device_of(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(cache))
        ordered = RelaxModel.compile(model, [device.target], bind, "memory")
        listed = RelaxModel.compile(model, [device.target], bind)
    names = ordered.graph.operator_names
    before, after = ordered.activation_bytes(names, device)
    assert after <= before == listed.activation_bytes(names, device)[1]
    check_equal(whole(ordered, device, frame), whole(listed, device, frame), "ordered")


def test_operators_are_timed_where_they_run(compiled: tuple[CompiledModel, Device]) -> None:
    """Every operator has a time, and together they are no longer than what measuring them took."""
    model, device = compiled
    begin_s = time.perf_counter()
    seconds = model.time_operators(device, 3)
    took_s = time.perf_counter() - begin_s
    assert seconds.shape == (3, len(model.graph.operators))
    assert (seconds > 0).all()
    assert seconds.sum() <= took_s


def test_parts_that_come_back_are_no_stage(compiled: tuple[CompiledModel, Device]) -> None:
    model, device = compiled
    first, last = model.graph.operators[0].name, model.graph.operators[-1].name
    with pytest.raises(PlanError):
        model.stage([first, last], device)
