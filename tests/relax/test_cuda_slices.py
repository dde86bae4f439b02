"""Slices of Relax on a CUDA device, which is made of software: what is copied, what stays, and failures."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import tvm

from tests.relax.branching_net import PICTURE, branching_net, picture
from tests.relax.test_slices import bind, check_equal, whole
from tests.support import software_cuda as device
from tests.support.software_cuda import SoftwareCuda
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import PAGE
from tvm_pipeline.backends.registry import GROUP
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import BundleError, RunError
from tvm_pipeline_tvm.devices.mirrors import shares_memory
from tvm_pipeline_tvm.devices.releasing import wait_until_released
from tvm_pipeline_tvm.gpu.detection import survey
from tvm_pipeline_tvm.gpu.gpu import GpuBackend
from tvm_pipeline_tvm.relax.build import load_library
from tvm_pipeline_tvm.relax.compiled import RelaxModel

GPU = Device("gpu", "gpu", (), "cuda -arch=sm_87", stand_in="software CUDA")
CPU = Device("cpu", "host", (0,), "llvm -mcpu=x86-64-v2")


@pytest.fixture(scope="module")
def model() -> Model:
    return branching_net()


@pytest.fixture(scope="module")
def frame() -> dict[str, Array]:
    return picture()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(folder))
        yield folder


@pytest.fixture
def compiled(model: Model, cache: Path, software_cuda: SoftwareCuda) -> Iterator[RelaxModel]:
    """Provide the model for the CPU and the GPU, compiled once."""
    made = RelaxModel.compile(model, [CPU.target, GPU.target], bind)
    yield made
    made.close()


def test_only_what_crosses_a_cut_is_copied(compiled: RelaxModel, software_cuda: SoftwareCuda) -> None:
    stage = compiled.stage(compiled.graph.operator_names[1:-1], GPU)
    inputs, outputs = [port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]
    stage.run(inputs, outputs)
    before = [software_cuda.copies(direction).n_bytes for direction in ("to device", "to host", "on device")]
    stage.run(inputs, outputs)
    after = [software_cuda.copies(direction).n_bytes for direction in ("to device", "to host", "on device")]
    crossing = [sum(array.nbytes for array in arrays) for arrays in (inputs, outputs)]
    assert np.subtract(after, before).tolist() == [*crossing, 0]


def test_weights_are_on_the_device_once_for_all_slices(compiled: RelaxModel, software_cuda: SoftwareCuda) -> None:
    gc.collect()
    compiled.stage(compiled.graph.operator_names, GPU).close()  # what is made once in a process
    compiled.close()
    gc.collect()
    assert wait_until_released(tvm.runtime.device("cuda", 0))
    before = software_cuda.allocated()
    stages = [compiled.stage(compiled.graph.operator_names, GPU) for _ in range(3)]
    for stage in stages:
        stage.run([port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs])
    weights = sum(array.nbytes for array in compiled.libraries[GPU.target].constants)
    others = sum(stage.activation_bytes for stage in stages)
    others += sum(port.buffer().nbytes for stage in stages for port in (*stage.inputs, *stage.outputs))
    assert weights < software_cuda.allocated() - before <= weights + others + 512 * 50
    for stage in stages:
        stage.close()
    compiled.close()
    del stages, stage
    gc.collect()
    assert wait_until_released(tvm.runtime.device("cuda", 0))
    assert software_cuda.allocated() <= before


def test_a_tensor_stays_on_the_device(
    compiled: RelaxModel, frame: dict[str, Array], software_cuda: SoftwareCuda
) -> None:
    """Between two stages on the GPU it is not copied, and the values are the same."""
    right, operators = whole(compiled, GPU, frame), compiled.graph.operator_names
    stages = [compiled.stage(operators[:3], GPU), compiled.stage(operators[3:], GPU)]
    arrays: dict[str, Array] = {}
    for stage in stages:
        for port in (*stage.inputs, *stage.outputs):
            arrays.setdefault(port.name, port.buffer())
    arrays[PICTURE][...] = frame[PICTURE]
    between = [port.name for port in stages[1].inputs]
    for name in between:
        assert stages[0].keep(name, [arrays[name]], copied=False)
        assert stages[1].keep(name, [arrays[name]], copied=False)
    before = software_cuda.copied()
    for stage in stages:
        stage.run(*([arrays[port.name] for port in ports] for ports in (stage.inputs, stage.outputs)))
    sent = sum(arrays[name].nbytes for name in compiled.graph.outputs if name not in between)
    copied = np.subtract(software_cuda.copied(), before).tolist()
    weights = sum(array.nbytes for array in compiled.libraries[GPU.target].constants)
    assert between
    assert copied[0] <= frame[PICTURE].nbytes + weights
    assert copied[1] == sent
    np.testing.assert_array_equal(arrays[compiled.graph.outputs[1]], right[1])


@pytest.mark.parametrize("is_integrated", [False, True])
def test_arrays_take_turns(
    is_integrated: bool, compiled: RelaxModel, software_cuda: SoftwareCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline has an array for each frame inside. A device in the memory of the host uses large ones in place."""
    monkeypatch.setenv("SOFTWARE_CUDA_INTEGRATED", str(int(is_integrated)))
    shares_memory.cache_clear()
    stage = compiled.stage(compiled.graph.operator_names, GPU)
    sets = [([port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]) for _ in range(3)]
    for index, (inputs, _) in enumerate(sets):
        inputs[0][...] = index + 1
    before = software_cuda.copied()
    for _ in range(2):
        for arrays in sets:
            stage.run(*arrays)
    images = [given[0] for _, given in sets]
    for index, image in enumerate(images):  # without a bias the network is linear up to its softmax
        np.testing.assert_allclose(image, images[0] * (index + 1), rtol=1e-4, atol=1e-4)
    to_host = np.subtract(software_cuda.copied(), before)[1]
    assert to_host == 6 * sum(given.nbytes for given in sets[0][1] if given.nbytes < PAGE or not is_integrated)
    shares_memory.cache_clear()


@pytest.mark.parametrize("has_clock", [True, False])
def test_operators_and_transfers_are_timed(
    has_clock: bool, compiled: RelaxModel, software_cuda: SoftwareCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the device's clock, and by the host's where TVM has CUDA's runtime inside."""
    if not has_clock:
        monkeypatch.setattr("tvm_pipeline_tvm.devices.cuda_events.loaded_runtime", lambda: None)
    recorded = software_cuda.recorded()
    seconds = compiled.time_operators(GPU, 2)
    assert seconds.shape == (2, len(compiled.graph))
    assert (seconds > 0).all()
    assert (software_cuda.recorded() > recorded) == has_clock
    received, sent = compiled.time_transfers(GPU, [64, 1 << 16], 2) or ([], [])
    assert received.shape == sent.shape == (2, 2)
    assert compiled.time_transfers(CPU, [64], 1) is None


def test_a_kernel_that_fails_is_an_error_of_the_run(compiled: RelaxModel, software_cuda: SoftwareCuda) -> None:
    stage = compiled.stage(compiled.graph.operator_names, GPU)
    arrays = [[port.buffer() for port in ports] for ports in (stage.inputs, stage.outputs)]
    software_cuda.fail_launch(2)
    with pytest.raises(RunError, match=r"a kernel or a copy failed: .*CUDA_ERROR_LAUNCH_FAILED"):
        stage.run(*arrays)


def test_a_device_that_is_lost_while_it_is_timed_frees_nothing(
    compiled: RelaxModel, software_cuda: SoftwareCuda
) -> None:
    software_cuda.fail_launch(2)
    with pytest.raises(RuntimeError):
        compiled.time_operators(GPU, 1)
    compiled.close()
    gc.collect()
    assert wait_until_released(tvm.runtime.device("cuda", 0))  # the process would have ended


PROGRAM = """
import sys
from pathlib import Path
from tests.relax.test_cuda_slices import GPU, bind
from tvm_pipeline.errors import RunError
from tvm_pipeline_tvm.relax.compiled import RelaxModel
model = RelaxModel.load(Path(sys.argv[1]), bind)
stages = [model.stage(model.graph.operator_names, GPU) for _ in range(2)]
try:
    stages[0].run(*([port.buffer() for port in ports] for ports in (stages[0].inputs, stages[0].outputs)))
except RunError as error:
    print(error)
"""


def test_a_process_goes_on_without_a_device_that_is_lost(
    compiled: RelaxModel, software_cuda_folder: Path, tmp_path: Path
) -> None:
    """TVM 0.27 would end it when memory of the device is freed: that of the failed stage, or of others at the end."""
    compiled.save(tmp_path)
    root = Path(__file__).parents[2]
    variables = {**os.environ, **device.environment(software_cuda_folder), "SOFTWARE_CUDA_FAULT": "fail_launch:2"}
    variables["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "backends"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=variables, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "CUDA_ERROR_LAUNCH_FAILED" in done.stdout


def test_a_device_without_memory_is_an_error(compiled: RelaxModel, software_cuda: SoftwareCuda) -> None:
    software_cuda.fail_allocation()
    with pytest.raises(RunError, match=r"device gpu .*cannot hold a stage of branches with \d+ bytes"):
        compiled.stage(compiled.graph.operator_names, GPU)


def test_code_that_was_cut_short_is_refused(compiled: RelaxModel, tmp_path: Path) -> None:
    compiled.libraries[GPU.target].save(tmp_path)
    code = (tmp_path / "kernels.cuda").read_bytes()
    (tmp_path / "kernels.cuda").write_bytes(code[:-100])
    with pytest.raises(BundleError, match=r"damaged compiled model .*kernels\.cuda"):
        load_library(tmp_path)


class TestBackend:
    """The GPU backend with Relax."""

    @pytest.fixture(autouse=True)
    def _found(
        self, software_cuda: SoftwareCuda, software_cuda_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        for name, value in device.environment(software_cuda_folder).items():
            monkeypatch.setenv(name, value)
        survey.cache_clear()
        yield
        survey.cache_clear()

    def test_it_compiles_and_loads(self, model: Model, frame: Mapping[str, Array], cache: Path, tmp_path: Path) -> None:
        if not entry_points(group=GROUP):
            pytest.skip("the package is not installed, and so no backend for the host is found")
        backend = GpuBackend()
        gpu = backend.settle(Device("gpu", "gpu", (), "cuda"))
        assert gpu.target == GPU.target
        compiled = backend.compile(model, [gpu])
        compiled.save(tmp_path)
        check_equal(whole(backend.load(tmp_path, [gpu]), gpu, frame), whole(compiled, gpu, frame), "loaded")
        compiled.close()
