"""Execution providers as devices: what is not here, what one leaves to others, and what one claims and cannot compute.

None is built into the onnxruntime of this environment, so `fake_provider.py` stands for one. The last tests install two
real ones beside it, each into a folder of its own: one that works, and one that claims what it cannot compute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnxruntime")
needs("onnx")

from onnx import helper

from tests.support import fake_provider
from tests.support.onnx_models import onnx_bytes, write_picture_net
from tvm_pipeline import load
from tvm_pipeline.backends import engine
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.backends.trial import Trial
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlanError, PlatformError
from tvm_pipeline_onnxruntime import OnnxruntimeBackend, backend

CORES = sorted(os.sched_getaffinity(0))
CPU = Device("cpu0", "onnxruntime", (CORES[0],), "cpu")


def provider(options: str) -> Device:
    return Device("npu", "onnxruntime", (), f"{fake_provider.NAME} {options}")


@pytest.fixture
def faking(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnnxruntimeBackend]:
    """Yield a backend whose onnxruntime has the fake provider, in its child as well."""
    fake_provider.install(monkeypatch.setattr)
    fresh = OnnxruntimeBackend()
    monkeypatch.setattr(fresh, "_trial", Trial("tests.support.fake_provider:serve"))
    yield fresh
    fresh.close()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return load(write_picture_net(tmp_path / "net.onnx"))


def test_providers_that_are_not_here() -> None:
    for target, message in (
        (
            "OpenVINOExecutionProvider device_type=NPU",
            r"device npu: onnxruntime has no OpenVINOExecutionProvider here, only cpu; it comes with "
            r"`pip install onnxruntime-openvino` in an environment of its own, since it replaces onnxruntime",
        ),
        ("NvTensorRTRTXExecutionProvider", r"it comes with `pip install onnxruntime-ep-nv-tensorrt-rtx`$"),
        ("OpenVinoExecutionProvider", "did you mean OpenVINOExecutionProvider"),
    ):
        with pytest.raises(PlatformError, match=message):
            backend.settle(Device("npu", "onnxruntime", (), target))


def test_a_provider_is_a_device(faking: OnnxruntimeBackend, model: Model) -> None:
    device = faking.settle(provider("fail=Nothing"))
    assert faking.left_out() == [
        f"onnxruntime has {fake_provider.NAME}: to use it, name it as `target` in a platform file"
    ]
    with closing(faking.compile(model, [CPU, device])) as compiled:
        names = compiled.graph.operator_names
        assert compiled.computes(device) == names
        frame = frame_of_noise(compiled.graph)
        found = []
        for each in (CPU, device):
            with closing(compiled.stage(names, each)) as stage:
                outputs = [port.buffer() for port in stage.outputs]
                stage.run([frame[port.name] for port in stage.inputs], outputs)
                found.append(outputs[0])
        np.testing.assert_array_equal(*found)
        assert (compiled.time_operators(device, 2) > 0).all()
    with pytest.raises(PlatformError, match="takes no property 'fail' = ''; properties are written KEY=VALUE"):
        faking.settle(provider("fail"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("leave=Gemm", "gemm_8, since FakeExecutionProvider does not claim it"),
        ("fail=Gemm", "gemm_8, since FakeExecutionProvider claims it and fails: .*only 1-D convolutions"),
        (
            "nan=Gemm",
            "gemm_8, since FakeExecutionProvider computes something else than the CPU: scores is infinite",
        ),
        ("die=Gemm", "gemm_8, since the process that tried it first was killed by SIGKILL"),
    ],
)
def test_what_a_provider_cannot_compute_stays_elsewhere(
    faking: OnnxruntimeBackend, model: Model, options: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = faking.settle(provider(options))
    with closing(faking.compile(model, [CPU, device])) as compiled:
        names = compiled.graph.operator_names
        assert compiled.computes(device) == names[:-1]
        assert compiled.computes(CPU) == names
        seconds = compiled.time_operators(device, 2)
        assert np.isnan(seconds[:, -1]).all()
        assert (seconds[:, :-1] > 0).all()
        with pytest.raises(PlanError, match="device npu cannot compute operator gemm_8 of net: "):
            compiled.stage(names, device)
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"{fake_provider.NAME} {options} runs 8 of 9 operators" in record.message
    assert re.search(reason, record.message), record.message


@pytest.mark.thorough
def test_a_provider_may_round_as_float16_does(faking: OnnxruntimeBackend, model: Model) -> None:
    device = faking.settle(provider("half=Gemm"))
    with closing(faking.compile(model, [CPU, device])) as compiled:
        assert compiled.computes(device) == compiled.graph.operator_names
    of_cpu = Device("npu", "onnxruntime", (), "OpenVINOExecutionProvider device_type=CPU")
    assert [backend.precision(each) for each in (device, of_cpu, CPU)] == ["float16", "float32", "float32"]


@pytest.mark.thorough
def test_a_provider_that_runs_nothing(faking: OnnxruntimeBackend) -> None:
    content = onnx_bytes([helper.make_node("Relu", ["x"], ["y"])])
    with pytest.raises(ModelError, match=r"net: FakeExecutionProvider runs none of its operators: .*only 1-D conv"):
        faking.compile(Model("net", "onnx", content, (Tensor("x", (2, 3)),)), [provider("fail=Relu")])


def test_a_provider_with_cores_is_held_there_by_a_process(
    faking: OnnxruntimeBackend, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a provider are its own; `test_openvino_backend.py` looks at those of such a process."""
    made: list[Device] = []
    with closing(faking.compile(model, [CPU])) as compiled:
        monkeypatch.setattr(compiled, "isolated_stage", lambda operators, device: made.append(device))
        monkeypatch.setattr(engine, "CORES", frozenset((*CORES, max(CORES) + 1)))
        names = compiled.graph.operator_names
        held = Device("npu", "onnxruntime", tuple(CORES), f"{fake_provider.NAME} fail=Nothing")
        compiled.stage(names, held)
        compiled.stage(names, CPU).close()
    assert made == [held]


# --------------------------------------------------------------------------------------------- real ones, installed


def install(place: Path, packages: str) -> None:
    """Install packages into a folder; skip where no registry has them."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(place)]
    if subprocess.run([*pip, *packages.split()], capture_output=True).returncode:
        pytest.skip(f"{packages} cannot be installed here")


def command(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of ours with the packages of a folder before this environment's."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages"), "NUMBA_DISABLE_JIT": "1"}
    environment["ORT_DISABLE_TELEMETRY"] = "1"
    ours = [sys.executable, "-c", "import tvm_pipeline_command as c; c.main()"]
    return subprocess.run([*ours, *map(str, arguments)], env=environment, capture_output=True, text=True, cwd=folder)


def platform(folder: Path, target: str) -> Path:
    path = folder / "desk.toml"
    path.write_text(
        f'name = "desk"\n[[device]]\nname = "npu"\nbackend = "onnxruntime"\ntarget = "{target}"\n'
        f'[[device]]\nname = "cpu0"\nbackend = "onnxruntime"\ncores = [{CORES[0]}]\n'
    )
    return path


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("packages", "targets"),
    [
        (
            "onnxruntime-openvino==1.24.1",
            {
                "OpenVINOExecutionProvider device_type=CPU": (0, "written: net.tar"),
                "OpenVINOExecutionProvider device_type=NPU": (
                    1,
                    "cannot use OpenVINOExecutionProvider here; .*Device NPU is not available",
                ),
            },
        ),
        (
            "onnxruntime-ggml==0.2.0 onnxruntime==1.30.0",
            {"ggml": (0, "ggml claims it and fails: .*only 1-D convolutions")},
        ),
    ],
    ids=["openvino", "ggml"],
)
def test_real_providers(packages: str, targets: dict[str, tuple[int, str]], tmp_path: Path) -> None:
    install(tmp_path / "packages", packages)
    write_picture_net(tmp_path / "net.onnx")
    for target, (status, says) in targets.items():
        chosen = platform(tmp_path, target)
        done = command(tmp_path, "compile", "net.onnx", "--platform", chosen, "--verify", "0", "-o", "net.tar")
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == status, said
        assert re.search(says, said), said
