"""Weights in 16 bits: values are those of a model whose weights numpy rounded, and half of the memory is saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from tests.relax.fused import MCPU, target_of
from tests.support.command import run_command
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model, WeightType
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline.frontends.batching import batched
from tvm_pipeline_kernels.relax.kernel_set import kernels
from tvm_pipeline_kernels.relax.schedules.stored_weights import stored
from tvm_pipeline_tvm import kernel_sets
from tvm_pipeline_tvm.agreement import check_agreement
from tvm_pipeline_tvm.kernel_sets import RelaxKernels
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.build import functions_of
from tvm_pipeline_tvm.relax.compiled import RelaxModel
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.pad_channels import pad_channels
from tvm_pipeline_tvm.relax.simplify import simplified
from tvm_pipeline_tvm.target_text import tvm_target

ROUNDED: dict[WeightType, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ERROR = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # of a number, at most
BIAS_BYTES = 4 * 32
Round = Callable[[np.ndarray], np.ndarray]


def network(rounded: Round = lambda weights: weights, scale: float = 1.0, batch: int = 1) -> Model:
    """Return a model that has each kind of layer with weights; the first one has a bias, too."""
    draw, nodes, constants = np.random.default_rng(3), list[Any](), list[Any]()

    def layer(kind: str, shape: tuple[int, ...], **attributes: Any) -> None:
        terms = np.prod(shape[1:]) if kind == "Conv" else shape[0]
        weights = (draw.standard_normal(shape) * scale / np.sqrt(terms)).astype("float32")
        given = [f"t{len(nodes)}", f"w{len(nodes)}"]
        constants.append(numpy_helper.from_array(rounded(weights), given[1]))
        if not nodes:
            given.append("bias")
            constants.append(numpy_helper.from_array(draw.standard_normal(32).astype("float32"), "bias"))
        nodes.append(helper.make_node(kind, given, [f"t{len(nodes) + 1}"], **attributes))

    layer("Conv", (32, 3, 3, 3), pads=[1, 1, 1, 1])  # reads a plain image
    layer("Conv", (32, 32, 3, 3), pads=[1, 1, 1, 1])  # Winograd's algorithm would do this one
    layer("Conv", (32, 1, 3, 3), pads=[1, 1, 1, 1], group=32)  # depthwise
    layer("Conv", (32, 4, 3, 3), pads=[1, 1, 1, 1], group=8)  # a block has several groups
    layer("Conv", (32, 16, 1, 1), group=2)  # groups of blocks
    layer("Conv", (30, 16, 3, 3), group=2)  # vectors along the pixels
    layer("ConvTranspose", (30, 16, 3, 3), strides=[2, 2])
    layer("MatMul", (13, 21))
    described = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("t0", TensorProto.FLOAT, (batch, 3, 8, 8))],
        [helper.make_tensor_value_info(f"t{len(nodes)}", TensorProto.FLOAT, (batch, 16, 13, 21))],
        constants,
    )
    content = helper.make_model(described, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(content)
    return Model("net", "onnx", content.SerializeToString(), (Tensor("t0", (batch, 3, 8, 8)),))


def as_stored(storage: WeightType) -> Model:
    return replace(network(), weights=storage)


def compiled(model: Model, *lanes: int) -> RelaxModel:
    for each in lanes:
        target_of(each)
    return RelaxModel.compile(model, [f"llvm -mcpu={MCPU[each]}" for each in lanes], lambda _: None)


def cores(lanes: int) -> Device:
    return Device(f"cores{lanes}", "host", (0,), f"llvm -mcpu={MCPU[lanes]}")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("lanes", "storage"), [(16, "bfloat16"), (8, "float16"), (4, "bfloat16")])
def test_values_are_those_of_rounded_weights_bit_for_bit(lanes: int, storage: WeightType) -> None:
    """The kernels differ in how a weight is read alone, so sums are the same."""
    half = compiled(as_stored(storage), lanes)
    other = network(lambda weights: weights.astype(ROUNDED[storage]).astype("float32"))
    whole = compiled(replace(other, tolerance=0.0), lanes)
    frame, device = random_frame(half.graph.inputs), cores(lanes)
    names = half.graph.operator_names
    [found], [expected] = (model_outputs(each, run_stages(each, [(names, device)], frame)) for each in (half, whole))
    np.testing.assert_array_equal(found, expected)
    [library] = half.libraries.values()
    fast = [rule for rule in library.rules.values() if rule != "plain"]
    assert sorted(fast) == [*["conv2d"] * 2, "conv2d_transpose", "dense", "depthwise", *["group_conv2d"] * 3]

    sizes = [{operator.name: operator.param_bytes for operator in each.graph.operators} for each in (half, whole)]
    first, *others = sizes[0].values()
    assert [2 * first - BIAS_BYTES, *(2 * size for size in others)] == [*sizes[1].values()]
    [told] = half.stored_weights()
    assert (told.storage, told.bytes, told.float32_bytes) == (storage, *(sum(size.values()) for size in sizes))
    assert told.error is not None
    assert ERROR[storage] / 20 < told.error < ERROR[storage] * 2
    assert whole.stored_weights() == []

    for seed in range(3):
        cut = [(stage, device) for stage in random_stages(half.graph, Random(seed), 3)]
        [sliced] = model_outputs(half, run_stages(half, cut, frame))
        np.testing.assert_array_equal(sliced, found)


def test_libraries_for_several_targets_agree() -> None:
    model = compiled(as_stored("bfloat16"), 16, 8)
    check_agreement(model, [cores(16), cores(8)])
    assert model.refused == {}
    [wide, narrow] = model.stored_weights()
    assert [one.target for one in (wide, narrow)] == list(model.libraries)
    assert sum(operator.param_bytes for operator in model.graph.operators) == wide.bytes


@pytest.mark.parametrize(
    ("target", "storage", "converts"),
    [
        ("llvm -mcpu=x86-64-v4", "float16", r"vcvtph2ps\s.*%zmm"),
        ("llvm -mcpu=x86-64-v3", "float16", r"vcvtph2ps\s.*%ymm"),
        ("llvm -mcpu=x86-64-v4", "bfloat16", r"vpmovzxwd\s.*%zmm"),
        ("llvm -mtriple=aarch64-linux-gnu", "float16", r"fcvtl\s"),
    ],
)
def test_kernels_convert_vectors_and_call_no_function_for_it(target: str, storage: WeightType, converts: str) -> None:
    """In each convolution there are more multiply-adds than conversions: sums stay in registers meanwhile."""
    compiler, model = tvm_target(target), as_stored(storage)
    simple = pad_channels(simplified(import_model(model)))
    fused = kernel_passes.fused(simple, compiler, apart=True, storage=storage)
    functions = functions_of(kernel_passes.kernels(fused, compiler))
    code = tvm.compile(functions, target=compiler, tir_pipeline=kernels.tir_pipeline).mod.inspect_source("asm")
    bodies = re.findall(r"^(\w+)_compute_:(.*?)(?=^\w+:|\Z)", code, re.MULTILINE | re.DOTALL)
    layers = [(name, body) for name, body in bodies if "conv2d" in name or "matmul" in name]
    assert len(layers) == 8
    for name, body in layers:
        assert len(re.findall(converts, body)) < len(re.findall(r"\b(?:vfmadd\d+ps|fmla)\b", body)), name
        assert not re.search(r"hfsf2|h2f", body), name
    assert sum(bool(re.search(converts, body)) for _, body in layers) >= 7  # but for the scalars of pixels


@pytest.mark.parametrize("storage", ROUNDED)
def test_numbers_are_rounded_to_the_nearest_and_to_the_even_of_two(storage: WeightType) -> None:
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 1 << 32, 20_000, dtype="uint32").view("float32")
    ties = (np.arange(0x3F80, 0x4080, dtype="uint32") << 16 | 0x8000).view("float32")
    smallest = np.float32([0.0, -0.0, 1e-45, -1e-40, 6e-8, 2.0**-25, np.inf, -np.inf, np.nan])
    numbers = np.concatenate([bits, ties, ties / 8, smallest])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = numbers.astype(ROUNDED[storage])
    numbers, expected = (each[np.isfinite(expected) | ~np.isfinite(numbers)] for each in (numbers, expected))
    made = stored(numbers, storage).view(ROUNDED[storage])
    np.testing.assert_array_equal(made.astype("float32"), expected.astype("float32"))
    np.testing.assert_array_equal(np.signbit(made[made == 0]), np.signbit(expected[expected == 0]))


def test_a_weight_beyond_the_type_is_an_error_that_says_what_to_do() -> None:
    large = replace(network(scale=1e6), weights="float16")
    with pytest.raises(ModelError, match=r"^net: a weight of .* is larger than every float16; .* bfloat16 or float32$"):
        compiled(large, 8)
    assert compiled(replace(large, weights="bfloat16"), 8).stored_weights()
    with pytest.raises(ModelError, match="larger than every bfloat16; store `weights` in float32"):
        stored(np.float32([3.4e38]), "bfloat16")


def test_what_cannot_read_such_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlatformError, match=r"`weights` float16 .* `llvm -mcpu=x86-64-v2`: .* store them in bfloat16"):
        RelaxModel.compile(as_stored("float16"), ["llvm -mcpu=x86-64-v2"], lambda _: None)
    assert not kernels.refuses_weights("float16", "llvm -mtriple=aarch64-linux-gnu")
    with pytest.raises(PlatformError, match=r"`weights` bfloat16 .*GPUs read float32 alone"):
        RelaxModel.compile(as_stored("bfloat16"), ["llvm", "cuda -arch=sm_87"], lambda _: None)
    monkeypatch.setattr("tvm_pipeline_tvm.relax.compiled.relax_kernels", RelaxKernels)
    with pytest.raises(PlatformError, match="TVM's own schedules read float32 alone"):
        RelaxModel.compile(as_stored("bfloat16"), ["llvm"], lambda _: None)
    assert kernel_sets.relax_kernels() is kernels


def test_a_batch_has_the_weights_of_the_model() -> None:
    model = as_stored("bfloat16")
    assert batched(replace(model, metadata={}), model.inputs, 2).weights == "bfloat16"
    assert model.digest != network().digest != as_stored("float16").digest


def test_the_command_says_what_is_saved_and_what_it_costs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, bundle = tmp_path / "net.onnx", tmp_path / "net.tar"
    file.write_bytes(network().content)

    run = partial(run_command, capfd, monkeypatch)
    made = run("compile", file, "-o", bundle, "--weights", "bfloat16", "--verify", 0, "--device", "cpu0", "--json")
    assert made.code == 0, made.err
    [told] = json.loads(made.out)["weights"]
    assert told["storage"] == "bfloat16"
    assert told["bytes"] < 0.52 * told["float32_bytes"]
    assert 1e-4 < told["error"] < 1e-2
    shown = run("show", bundle, "-o", tmp_path / "out")
    assert f"{told['float32_bytes']:,} -> {told['bytes']:,} bytes" in " ".join(shown.out.split())
    refused = run("compile", file, "-o", tmp_path / "other.tar", "--weights", "int4")
    assert refused.code != 0
    assert "--weights int4: weights are stored as float32, or" in refused.err
