"""Winograd's algorithm in Relax: values of any shape, the layers that have it, and the error of the whole model."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from subprocess import PIPE
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.plugins.kernels.relax.layers import (
    EPILOGUES,
    blocked,
    compiled,
    convolution,
    kernel,
    plain,
    program,
    with_epilogue,
)
from tests.plugins.kernels.relax.test_conv2d import loops_of
from tests.relax.fused import MCPU, target_of
from tests.support.examples import examples
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline_kernels import winograd
from tvm_pipeline_kernels.relax.schedules import conv2d_winograd
from tvm_pipeline_kernels.relax.schedules.cores import cores_of
from tvm_pipeline_kernels.tiles import channel_block
from tvm_pipeline_tvm.relax.build import build_library
from tvm_pipeline_tvm.relax.compiled import RelaxModel

LIMIT = {2: 2e-6, 4: 1e-5}  # of the largest output
Networks = Callable[[float], RelaxModel]


@pytest.mark.parametrize("lanes", [16, 8, 4])
@examples(6)
@given(
    batch=st.sampled_from([1, 1, 2]),
    blocks=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    extents=st.tuples(st.integers(3, 30), st.integers(3, 30)),
    padding=st.sampled_from([(1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 2, 1)]),
    epilogue=st.sampled_from(EPILOGUES),
    choice=st.integers(0, 3),
)
def test_values_are_those_of_a_direct_convolution(
    lanes: int, batch: int, blocks: Any, extents: Any, padding: Any, epilogue: str, choice: int
) -> None:
    inputs, outputs = (count * min(lanes, 8) for count in blocks)  # with AVX-512 also halves of vectors
    check_values(compiled, target_of(lanes), batch, (inputs, outputs), extents, padding, epilogue, choice)


def check_values(
    run: Callable[..., np.ndarray],
    target: Any,
    batch: int,
    channels: tuple[int, int],
    extents: tuple[int, int],
    padding: tuple[int, ...],
    epilogue: str,
    choice: int,
) -> winograd.Winograd:
    """Compare a layer with float64, and return the form that was chosen.

    Args:
        run: as `compiled`.
        channels: read and written.
    """
    draw, (inputs, outputs), lanes = np.random.default_rng(0), channels, cores_of(target).lanes
    in_block, block = (channel_block(count, lanes) for count in (inputs, outputs))
    data = draw.standard_normal((batch, inputs, *extents)).astype("float32")
    weights = draw.standard_normal((outputs, inputs, 3, 3)).astype("float32")
    sums = convolution(data.astype("float64"), weights.astype("float64"), padding=padding)
    bias, residual = (draw.standard_normal(shape).astype("float32") for shape in ((1, outputs, 1, 1), sums.shape))
    registers = cores_of(target).registers
    forms = [f for _, f in sorted(winograd.winograd_forms(inputs, outputs, lanes, *sums.shape[2:], registers))]
    form = forms[choice % len(forms)]
    found = run(
        conv2d_winograd,
        lambda x, kernel: conv2d_winograd.compute(x, kernel, padding, form),
        [blocked(data, in_block), winograd.packed(weights, form.winograd, in_block, block), bias, residual],
        epilogue,
        block,
        target,
    )
    expected = with_epilogue(epilogue, sums, bias, residual)
    limit = LIMIT[form.winograd] * np.abs(sums).max()
    assert np.abs(found - expected).max() <= limit * (1 + np.abs(expected).max() * (epilogue == "sigmoid"))
    return form


@pytest.mark.parametrize("mcpu", ["cortex-a72", "neoverse-n1"])
def test_sums_stay_in_vector_registers_of_arm(mcpu: str) -> None:
    target = arm(mcpu)
    [form, *_] = winograd.winograd_rule(32, 32, 4, 28, 28, cores_of(target).registers)
    weights = np.zeros((32, 32, 3, 3), "float32")
    arrays = [np.zeros(shape, "float32") for shape in ((1, 8, 28, 28, 4), (1, 32, 1, 1), (1, 32, 28, 28))]
    arrays.insert(1, winograd.packed(weights, form.winograd, 4, 4))
    layer = partial(conv2d_winograd.compute, padding=(1, 1, 1, 1), form=form)
    library, *_ = kernel(conv2d_winograd, layer, arrays, "residual", 4, target)
    loops = loops_of(library.mod.inspect_source("asm"))
    multiplies, products = max((len(re.findall(r"fmla\tv\d+\.4s", loop)), loop) for loop in loops)
    assert multiplies % (4 * form.chunks * form.columns) == 0
    assert not re.search(r"st\w+\tq", products)


@pytest.mark.needs("ziglang")
@pytest.mark.needs("qemu-aarch64-static")
@pytest.mark.parametrize(
    ("mcpu", "choice", "size"), [("cortex-a53", 0, 4), ("cortex-a72", 2, 2), ("neoverse-n1", 0, 4)]
)
def test_values_on_an_emulated_arm_processor(mcpu: str, choice: int, size: int, tmp_path: Path) -> None:
    run = partial(emulated, tmp_path, mcpu)
    form = check_values(run, arm(mcpu), 1, (24, 16), (13, 11), (1, 1, 1, 1), "residual", choice)
    assert form.winograd == size


def arm(mcpu: str) -> Any:
    return tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu})


def emulated(folder: Path, mcpu: str, *layer: Any) -> np.ndarray:
    """Return what a layer gives on a processor that QEMU emulates; `layer` is as `kernel` takes it."""
    library, read, result = kernel(*layer)
    made, given = program(folder, library, [*read, result])
    done = subprocess.run(["qemu-aarch64-static", "-cpu", mcpu, made], input=given, stdout=PIPE, check=True)
    return plain(np.frombuffer(done.stdout, "float32").reshape(result.shape))


def network(scale: float = 0.0, *, rounds: float = 0.0) -> Model:
    """Return two convolutions of 3 x 3 and an addition, whose inputs cancel where `scale` is large.

    Where `rounds` is large, the output loses as many digits by itself: it is a difference of large numbers.
    """
    draw = np.random.default_rng(1)
    weights = [draw.standard_normal((32, 32, 3, 3)).astype("float32") / 17 for _ in range(2)]
    large = np.full((32, 32, 3, 3), scale, "float32")
    large[:, 1::2] *= -1
    weights[0] += large
    nodes = [
        helper.make_node("Concat", ["data", "data"], ["twice"], axis=2),
        helper.make_node("Reshape", ["twice", "shape"], ["pairs"]),
        helper.make_node("Conv", ["pairs", "w0"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w1"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["sum" if rounds else "out"]),
    ]
    if rounds:
        nodes += [
            helper.make_node("Exp", ["pairs"], ["positive"]),
            helper.make_node("Mul", ["positive", "rounds"], ["large"]),
            helper.make_node("Add", ["sum", "large"], ["larger"]),
            *(helper.make_node("MaxPool", [name], [f"{name}st"], kernel_shape=[3, 3]) for name in ("larger", "large")),
            helper.make_node("Sub", ["largerst", "largest"], ["out"]),
        ]
    constants = [numpy_helper.from_array(each, f"w{index}") for index, each in enumerate(weights)]
    constants.append(numpy_helper.from_array(np.array([1, 32, 40, 40], "int64"), "shape"))
    constants.append(numpy_helper.from_array(np.array(rounds, "float32"), "rounds"))
    described = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, (1, 16, 40, 40))],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, (1, 32, *[38 if rounds else 40] * 2))],
        constants,
    )
    content = helper.make_model(described, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(content)
    from tvm_pipeline.core.graph import Tensor

    return Model("net", "onnx", content.SerializeToString(), (Tensor("data", (1, 16, 40, 40)),))


TARGET = f"llvm -mcpu={MCPU[8]}"
DEVICE = Device("core", "host", (0,), TARGET)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Networks]:
    target_of(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield lambda tolerance: RelaxModel.compile(replace(network(), tolerance=tolerance), [TARGET], lambda _: None)


def test_a_model_with_a_tolerance_has_it_and_its_stages_have_the_bits_of_the_whole(built: Networks) -> None:
    plain, fast = built(0.0), built(1e-5)
    assert plain.tuned() == []
    [told] = fast.tuned()
    assert (told.target, told.winograd) == (TARGET, 2)
    assert told.error is not None
    assert 0 < told.error <= 1e-5
    assert [(o.name, o.macs) for o in fast.graph.operators] == [(o.name, o.macs) for o in plain.graph.operators]
    frame, names = random_frame(plain.graph.inputs), plain.graph.operator_names
    [expected], [found] = (model_outputs(model, run_stages(model, [(names, DEVICE)], frame)) for model in (plain, fast))
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    for seed in range(3):
        cut = [(stage, DEVICE) for stage in random_stages(plain.graph, Random(seed), 3)]
        [sliced] = model_outputs(fast, run_stages(fast, cut, frame))
        np.testing.assert_array_equal(sliced, found)


def test_a_model_that_is_too_far_off_is_compiled_again(built: Networks, caplog: pytest.LogCaptureFixture) -> None:
    """No layer alone tells that its inputs cancel."""
    with caplog.at_level(logging.INFO):
        library = build_library(replace(network(1e3), tolerance=1e-6), TARGET)
    assert library.winograd() == 0
    assert library.error is None
    assert "is compiled again: it is" in caplog.text


def test_what_direct_sums_lose_as_well_is_no_fault_of_the_algorithm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        library = build_library(replace(network(rounds=1e3), tolerance=1e-5), TARGET)
    assert library.winograd() == 2
    assert library.error is not None
    assert library.error > 1e-5
    assert "compiled again" not in caplog.text
    assert "by direct sums" in caplog.text


def test_for_another_machine_the_estimate_of_each_layer_decides(built: Networks) -> None:
    for tolerance, count in ((1e-5, 2), (1e-8, 0)):
        library = build_library(replace(network(), tolerance=tolerance), TARGET, elsewhere=True)
        assert library.winograd() == count
        assert library.error is None


def test_the_passes_for_scripts_keep_direct_sums() -> None:
    from tvm_pipeline_tvm.relax import kernel_passes
    from tvm_pipeline_tvm.relax.importer import import_model

    rules: dict[str, str] = {}
    target = tvm.target.Target({"kind": "llvm", "mcpu": MCPU[8]})
    fuse: Any = kernel_passes.FuseKernels(target)
    kernel_passes.kernels(fuse(import_model(network())), target, rules)
    assert "conv2d" in rules.values()
    assert conv2d_winograd.NAME not in rules.values()
