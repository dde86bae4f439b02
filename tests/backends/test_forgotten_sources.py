"""A model that lets go of its file once its stages are made: the stages run on, and nothing keeps the file."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnxruntime")
needs("onnx")
needs("ai_edge_litert")

from tests.edgetpu.networks import random_network
from tests.support.onnx_models import write_picture_net
from tvm_pipeline import load
from tvm_pipeline.backends.contract import Array, Backend, CompiledModel, StageRunner
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.backends.sliced import SlicedModel
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.testing import example_model
from tvm_pipeline_edgetpu import backend as tflite
from tvm_pipeline_onnxruntime import backend as onnxruntime

CORE = min(os.sched_getaffinity(0))
Made = tuple[CompiledModel, Device, Callable[[], object]]


def of_onnxruntime(folder: Path) -> Made:
    device = Device("cpu0", "onnxruntime", (CORE,))
    compiled = saved_and_loaded(onnxruntime, load(write_picture_net(folder / "net.onnx")), device, folder)
    return compiled, device, weakref.ref(compiled.file)  # type: ignore[attr-defined]


def of_several_backends(folder: Path) -> Made:
    compiled, device, file = of_onnxruntime(folder)
    return SlicedModel({"onnxruntime": onnxruntime}, "onnxruntime", compiled), device, file


def of_tflite(folder: Path) -> Made:
    device = Device("cpu0", "edgetpu", (CORE,), target="tflite")
    compiled = saved_and_loaded(tflite, Model("net", "tflite", random_network(3)), device, folder)
    return compiled, device, weakref.ref(compiled._slicer)  # type: ignore[attr-defined]


def saved_and_loaded(backend: Backend, model: Model, device: Device, folder: Path) -> CompiledModel:
    backend.compile(model, [device]).save(folder, (), None)  # type: ignore[arg-type]
    return backend.load(folder, [])


def results(runner: StageRunner) -> list[Array]:
    outputs = [port.buffer() for port in runner.outputs]
    runner.run([noise(port) for port in runner.inputs], outputs)
    return outputs


@pytest.mark.parametrize("make", [of_onnxruntime, of_several_backends, of_tflite])
def test_stages_outlive_the_file(make: Callable[[Path], Made], tmp_path: Path) -> None:
    compiled, device, file = make(tmp_path)
    runner = compiled.stage(compiled.graph.operator_names, device)
    before = results(runner)
    gc.disable()  # what goes must go at once: the process of a stage has nothing else to collect
    try:
        assert file() is not None
        compiled.forget_source()
        assert file() is None
    finally:
        gc.enable()
    for one, other in zip(before, results(runner), strict=True):
        np.testing.assert_array_equal(one, other)
    runner.close()
    compiled.close()


def test_a_model_without_a_file_of_its_own_stays_as_it_is() -> None:
    model = example_model()
    model.forget_source()
    model.stage(["double"], Device("d0", "fake")).close()
