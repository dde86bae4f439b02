"""Regions of a Relax module on Edge TPUs, against TFLite's own kernels on the whole file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")
needs("tflite")

import tflite
import tvm
from tvm import relax

from tests.edgetpu.conftest import install_compiler, nothing_installed, plug
from tests.edgetpu.networks import MOBILENET, Op, Options, Writer, random_feeds, random_network, run, schema
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline_edgetpu.byoc_relax import partition_for_edgetpu
from tvm_pipeline_edgetpu.model import TfliteModel, parse_model

__all__ = ["install_compiler", "nothing_installed", "plug"]


def read(content: bytes) -> TfliteModel:
    return parse_model(Path("net.tflite"), content)


def operators(mod: tvm.IRModule) -> list[list[str]]:
    """Return the operators of each region, in the order of their numbers."""
    regions = [(v.name_hint, f) for v, f in mod.functions_items() if "edgetpu_operators" in (f.attrs or {})]
    return [list(map(str, function.attrs["edgetpu_operators"])) for _, function in sorted(regions)]


def assert_as_tflite(executable: object, content: bytes, tolerance: int = 0) -> None:
    model, feeds = read(content), random_feeds(read(content).graph)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    made = machine["main"](*(tvm.runtime.tensor(feeds[tensor.name]) for tensor in model.graph.inputs))
    made = [made] if len(model.graph.outputs) == 1 else list(made)
    correct = run(content, feeds, xnnpack=True)
    for name, found in zip(model.graph.outputs, made, strict=True):
        np.testing.assert_allclose(found.numpy().astype(int), correct[name].astype(int), rtol=0, atol=tolerance)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(8))
def test_a_file_that_an_edge_tpu_takes_whole(seed):
    content = random_network(seed)
    mod = partition_for_edgetpu(read(content))
    assert operators(mod) == [read(content).graph.operator_names]
    assert_as_tflite(tvm.compile(mod, "llvm"), content)


@pytest.mark.thorough
def test_mobilenet_which_the_importer_refuses():
    content = MOBILENET.read_bytes()
    with pytest.raises(tvm.error.OpNotImplemented, match="PAD"):
        relax.frontend.tflite.from_tflite(tflite.Model.GetRootAsModel(content, 0))
    assert_as_tflite(tvm.compile(partition_for_edgetpu(read(content)), "llvm"), content)


def leaky(code: int = Op.LEAKY_RELU) -> bytes:
    """Return a ReLU, an operator that no Edge TPU takes, and an addition, whose reads are all outputs as well."""
    writer = Writer()
    data, first, second, last = (writer.tensor((1, 4, 4, 4)) for _ in range(4))
    writer.operator(Op.RELU, [data], [first])
    of = (Options.LeakyReluOptions, schema.LeakyReluOptionsT(alpha=0.5)) if code == Op.LEAKY_RELU else ()
    writer.operator(code, [first], [second], *of)
    writer.operator(Op.ADD, [first, second], [last], Options.AddOptions, schema.AddOptionsT())
    return writer.content([data], [last, second, first])


def test_tvm_computes_what_lies_between():
    """TVM rounds a float, TFLite a product of integers: 1 apart, and 1 more after the addition."""
    content = leaky()
    mod = partition_for_edgetpu(read(content))
    assert operators(mod) == [["relu_0"], ["add_2"]]
    assert_as_tflite(tvm.compile(mod, "llvm"), content, tolerance=2)


@pytest.mark.thorough
def test_an_edge_tpu_goes_through_the_compiler_and_the_delegate(nothing_installed, install_compiler, plug, tmp_path):
    content = leaky()
    with pytest.raises(PlatformError, match="edgetpu_compiler is not on the PATH"):
        partition_for_edgetpu(read(content), "usb:0")
    calls = install_compiler()
    mod = partition_for_edgetpu(read(content), "usb:0")
    assert calls() == 2
    tvm.compile(mod, "llvm").export_library(str(tmp_path / "net.so"))
    executable = tvm.runtime.load_module(str(tmp_path / "net.so"))
    plug("")
    with pytest.raises(RuntimeError, match=r"Edge TPU usb:0: .*no such device"):
        assert_as_tflite(executable, content)
    plug("usb:0")
    assert_as_tflite(executable, content, tolerance=2)


def test_an_operator_that_nobody_takes_is_named():
    with pytest.raises(ModelError, match=r"net: neither an Edge TPU nor Relax takes elu_1: .*ELU"):
        partition_for_edgetpu(read(leaky(Op.ELU)))
