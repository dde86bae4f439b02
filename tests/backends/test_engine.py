"""A small engine on the bases of `backends/engine.py`: onnx's own reference, which refuses what its target names."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnx")

import onnx
from onnx.reference import ReferenceEvaluator

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import load
from tvm_pipeline.backends.contract import Array, Order, Port, Seconds
from tvm_pipeline.backends.engine import CORES, Engine, EngineStage, refused_alone, seconds_of_noise
from tvm_pipeline.backends.engine_agreement import check_results
from tvm_pipeline.backends.trial import Trial, answer
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlanError, PlatformError, RunError
from tvm_pipeline.frontends.onnx_model import OnnxModel
from tvm_pipeline.testing import check_backend

CORE = min(CORES)
CPU = Device("cpu0", "reference", (CORE,), "cpu")


class ReferenceStage(EngineStage):
    def compute(self, made: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        try:
            found = made.run(None, dict(zip(made.input_names, inputs, strict=True)))
        except IndexError as error:
            raise RunError(f"the reference cannot compute a frame: {error}") from error
        for array, one in zip(outputs, found, strict=True):
            np.copyto(array, one)


class ReferenceModel(OnnxModel):
    @classmethod
    def compile(cls, model: Model, order: Order, targets: Iterable[str], trial: Trial) -> ReferenceModel:
        found = cls(model, order)
        for target in targets:
            found.leave(target, refused_alone(found.graph, lambda one, to=target: trial.ask(to, found.numbered([one]))))
        return found

    def runner(self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device) -> ReferenceStage:
        return ReferenceStage(ReferenceEvaluator(content), inputs, outputs, device.cores)

    def has_own_threads(self, device: Device) -> bool:
        return device.name == "threads"

    def counted_s(self, device: Device, repeats: int) -> Seconds | None:
        if device.name != "counting":
            return None
        spent = list(seconds_of_noise(self.stage_here([one.name for one in self.graph.operators[:1]], device), repeats))
        assert min(spent) > 0
        return np.zeros((repeats, len(self.graph)))


class ReferenceEngine(Engine):
    name = engine = title = "reference"
    cuts, format, target = ("onnx",), "ONNX", "cpu"
    packages = ("onnx",)
    models, child = f"{__name__}:ReferenceModel", f"{__name__}:serve"

    def known_properties(self, device: Device) -> Collection[str]:
        return self.listed()[device.target.partition(" ")[0]]


def serve(order: bytes, channel: socket.socket) -> None:
    """Be the child: list the targets with their properties, or refuse a file that has an operator of the target."""

    def answered(target: str, content: bytes) -> object:
        if not target:
            return {"cpu": ["without"], "npu": []}
        kinds = {node.op_type for node in onnx.load_from_string(content).graph.node}
        if target.rpartition("=")[2] in kinds:
            raise ModelError(f"{target} has none")
        return None

    answer(channel, answered)


@pytest.fixture
def backend() -> Iterator[ReferenceEngine]:
    with closing(ReferenceEngine()) as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return load(write_picture_net(tmp_path / "net.onnx"))


def test_it_keeps_the_contract(backend: ReferenceEngine, model: Model) -> None:
    check_backend(backend, model, [CPU])


def test_its_devices(backend: ReferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.engine_devices([Device("cpu0", "host", (CORE,), "llvm")]) == [CPU]
    assert backend.settle(Device("cpu0", "reference", (CORE,))) == CPU
    assert backend.settle(Device("npu", "reference", (), "npu")).target == "npu"
    for wrong, message in (
        (Device("far", "reference", (9999,)), r"device far names cores \[9999\]"),
        (Device("none", "reference", (), "cpu"), "device none names cores"),
        (Device("odd", "reference", (CORE,), "cpu a=b"), "device odd: cpu takes no property 'a' = 'b'"),
    ):
        with pytest.raises(PlatformError, match=message):
            backend.settle(wrong)
    monkeypatch.setattr(backend, "packages", ("onnx", "nobody_has_this"))
    with pytest.raises(PlatformError, match=r"nobody_has_this is not installed: run `pip install 'tvm-pipeline\[ref"):
        backend.settle(CPU)


def test_what_it_refuses_stays_elsewhere(
    backend: ReferenceEngine, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device("cpu0", "reference", (CORE,), "cpu without=Gemm")
    with caplog.at_level(logging.WARNING), closing(backend.compile(model, [device, CPU])) as compiled:
        names = compiled.graph.operator_names
        assert [compiled.computes(each) for each in (device, CPU)] == [names[:-1], names]
        with pytest.raises(PlanError, match=f"device cpu0 cannot compute operator {names[-1]} of net: .* has none"):
            compiled.stage(names, device)
        seconds = compiled.time_operators(device, 2)
        assert np.isnan(seconds).all(axis=0).tolist() == [name == names[-1] for name in names]
        assert (seconds[:, :-1] > 0).all()
    [record] = caplog.records
    assert "runs 8 of 9 operators, and leaves others to other devices: gemm_8, since" in record.message
    assert backend.refuses(Model("net", "tflite", b"")) == (
        "net is tflite, reference takes .onnx: export the model to ONNX"
    )


def test_what_it_counts_is_never_zero(backend: ReferenceEngine, model: Model) -> None:
    with closing(backend.compile(model, [CPU])) as compiled:
        assert (compiled.time_operators(Device("counting", "reference", (CORE,), "cpu"), 3) == 1e-7).all()


def test_threads_that_keep_to_no_cores_have_a_process(
    backend: ReferenceEngine, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_pipeline.backends.engine.CORES", CORES | {max(CORES) + 1})
    with closing(backend.compile(model, [CPU])) as compiled:
        monkeypatch.setattr(compiled, "isolated_stage", lambda operators, device: (operators, device))
        names = compiled.graph.operator_names
        held = Device("threads", "reference", tuple(sorted(CORES)), "cpu")
        assert compiled.stage(names, held) == (names, held)
        assert isinstance(compiled.stage(names, Device("threads", "reference", (), "cpu")), ReferenceStage)
        assert isinstance(compiled.stage(names, CPU), ReferenceStage)


def test_a_frame_of_noise_that_fails() -> None:
    class Failing(EngineStage):
        def compute(self, made: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
            raise RunError("it has no Det")

    with pytest.raises(ModelError, match="it has no Det; it was a frame of noise"):
        list(seconds_of_noise(Failing(object(), (), (), ()), 2))


def test_results_of_two_processors() -> None:
    one, names = np.arange(8, dtype=np.float32), ["y"]
    check_results("npu", names, [one], [one * np.float32(1.0001)], "float32")
    check_results("npu", names, [one], [one * np.float32(1.01)], "float16")
    with pytest.raises(ModelError, match=r"npu computes something else than the CPU: y is off by 0\.07"):
        check_results("npu", names, [one], [one * np.float32(1.01)], "float32")


def test_the_process_of_a_stage_is_bound_before_the_engine_counts_its_cores() -> None:
    """With the cores of the machine in `CORES`, such a process would start one more for its stage, and so on."""
    look = "import sys, tvm_pipeline.backends.stage_process as s; print('tvm_pipeline.backends.engine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip() == "False"
