"""The backend of LiteRT's CompiledModel: CPU cores, a GPU in software, and the path of an NPU on the CPU.

No GPU and no NPU is here. Chromium's SwiftShader is a GPU for LiteRT, by Vulkan and WebGPU, and computes on the CPU.
Intel's libraries for NPUs are real; asked for OpenVINO's CPU, they compile, save, load and run as for an NPU.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import SWIFTSHADER, needs

needs("ai_edge_litert")
needs("flatbuffers")

from tests.edgetpu.networks import MOBILENET, Op, Options, Type, Writer, random_feeds, random_network, run, schema
from tests.edgetpu.test_engine import running_sum, spectrum, written
from tests.support.examples import seeds
from tests.support.fake_backend import make_plan
from tests.support.graphs import random_order
from tests.support.stages import run_stages
from tests.support.threads import cores_of_work, frames, ticks
from tvm_pipeline import Pipeline, load
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.backends.registry import known_engines, platform_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, PlanError, PlatformError, RunError
from tvm_pipeline.testing import check_backend
from tvm_pipeline.workflow.engines import with_engines
from tvm_pipeline_litert import LitertBackend, litert, litert_model

CORES = sorted(os.sched_getaffinity(0))
CPU = Device("cpu0", "litert", (CORES[0],), "CPU")
JIT = "NPU graph_backend=cpu"
AHEAD = "NPU vendor=intel_openvino soc_model=LNL intel_openvino_graph_backends=cpu"


@pytest.fixture
def backend() -> Iterator[LitertBackend]:
    with closing(LitertBackend()) as made:
        yield made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, backend: LitertBackend) -> Device:
    """Return the GPU in software."""
    needs("SwiftShader")
    monkeypatch.setenv("VK_ICD_FILENAMES", str(SWIFTSHADER))
    return backend.settle(Device("gpu", "litert", (), "GPU"))


def npu(target: str) -> Device:
    needs("OpenVINO of LiteRT")
    return Device("npu", "litert", (), target)


def floats() -> bytes:
    """Return a file of a convolution, sums and a product in float32, with two outputs."""
    writer, draw = Writer(), np.random.default_rng(0)

    def tensor(*shape: int, data: bool = False) -> int:
        values = draw.standard_normal(shape).astype(np.float32) if data else None
        return writer.tensor(shape, Type.FLOAT32, scale=0, data=values)

    x, weights, bias, first = (
        tensor(1, 8, 8, 4),
        tensor(8, 3, 3, 4, data=True),
        tensor(8, data=True),
        tensor(1, 8, 8, 8),
    )
    same = schema.Conv2DOptionsT(strideH=1, strideW=1, fusedActivationFunction=schema.ActivationFunctionType.RELU)
    writer.operator(Op.CONV_2D, [x, weights, bias], [first], Options.Conv2DOptions, same, version=1)
    known = [first]
    for _ in range(3):
        made = tensor(1, 8, 8, 8)
        writer.operator(Op.ADD, [known[-1], first], [made], Options.AddOptions, schema.AddOptionsT(), version=1)
        known.append(made)
    product = tensor(1, 8, 8, 8)
    writer.operator(Op.MUL, [known[-1], known[1]], [product], Options.MulOptions, schema.MulOptionsT(), version=1)
    return writer.content([x], [product, known[2]])


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return load(written(tmp_path, floats()))


def in_stages(
    compiled: CompiledModel, groups: Sequence[Sequence[str]], frame: Mapping[str, Array], device: Device
) -> dict[str, Array]:
    """Return the outputs of the model."""
    written = run_stages(compiled, [(group, device) for group in groups], frame)
    return {name: written[name][1] for name in compiled.graph.outputs}


# ------------------------------------------------------------------------------------------------------ CPU cores


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("content", [random_network(3, 6), floats()], ids=["int8", "float32"])
def test_it_keeps_the_contract_on_cpu_cores(backend: LitertBackend, content: bytes, tmp_path: Path) -> None:
    check_backend(backend, load(written(tmp_path, content)), [CPU])


def test_every_cut_has_the_bits_of_the_file_on_the_interpreter(backend: LitertBackend) -> None:
    model = load(MOBILENET)
    with closing(backend.compile(model, [CPU])) as compiled:
        frame = random_feeds(compiled.graph)
        expected = run(model.content, frame, xnnpack=True)
        for seed in seeds(5):
            draw = random.Random(seed)
            order = random_order(draw, compiled.graph)
            first, second = sorted(draw.sample(range(1, len(order)), 2))
            found = in_stages(compiled, [order[:first], order[first:second], order[second:]], frame, CPU)
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array, err_msg=f"seed {seed}, {name}")


def test_its_threads_stay_on_the_cores_of_the_device(backend: LitertBackend) -> None:
    """A second thread for the kernels starts where the first one is bound."""
    device = Device("cpu", "litert", (CORES[-1], CORES[-1]), "CPU")
    before = ticks().keys()
    with (
        closing(backend.compile(load(MOBILENET), [device])) as compiled,
        closing(compiled.stage(compiled.graph.operator_names, device)) as stage,
    ):
        seen: list[dict[int, tuple[int, set[int]]]] = []
        worker = threading.Thread(target=frames, args=(stage, seen))
        worker.start()
        worker.join()
        assert all(cores == {CORES[-1]} for cores in cores_of_work(*seen).values())
        kernels = ticks().keys() - before
        assert kernels
        assert all(os.sched_getaffinity(thread) == {CORES[-1]} for thread in kernels)


def test_a_model_that_cannot_be_cut_is_one_stage_with_its_state(backend: LitertBackend, tmp_path: Path) -> None:
    with closing(backend.compile(load(written(tmp_path, running_sum())), [CPU])) as compiled:
        plan = make_plan(compiled.graph, (["cpu0"], compiled.graph.operator_names))
        with Pipeline(compiled, plan, Platform("p", (CPU,))) as pipeline:
            results = pipeline.map([np.full((1, 3), value, np.float32) for value in (1, 10, 100)])
            assert [result.outputs["tensor/2:0"][0, 0] for result in results] == [1, 11, 111]


def test_a_stage_says_nothing_on_standard_output_and_error(capfd: pytest.CaptureFixture[str], model: Model) -> None:
    with closing(LitertBackend()) as fresh, closing(fresh.compile(model, [CPU])) as compiled:
        in_stages(compiled, [compiled.graph.operator_names], random_feeds(compiled.graph), CPU)
    assert capfd.readouterr() == ("", "")


def test_a_stage_that_was_closed_runs_nothing(backend: LitertBackend, model: Model) -> None:
    with closing(backend.compile(model, [CPU])) as compiled:
        stage = compiled.stage(compiled.graph.operator_names, CPU)
        stage.close()
        with pytest.raises(RunError, match="the stage was closed"):
            stage.run([port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs])


@pytest.mark.parametrize("name", ["litert.msgpack", "cut/index.json"])
def test_a_damaged_model_is_refused(backend: LitertBackend, model: Model, name: str, tmp_path: Path) -> None:
    with closing(backend.compile(model, [CPU])) as compiled:
        compiled.save(tmp_path, [], Platform("p", (CPU,)))
    (tmp_path / name).write_bytes(b"?")
    with pytest.raises(BundleError, match=r"damaged compiled model: .*; compile it again"):
        backend.load(tmp_path, [CPU])


# ----------------------------------------------------------------------------------------- a GPU, by SwiftShader


@pytest.mark.thorough
@pytest.mark.parametrize("content", [random_network(3, 6), floats()], ids=["int8", "float32"])
def test_it_keeps_the_contract_on_a_gpu(backend: LitertBackend, gpu: Device, content: bytes, tmp_path: Path) -> None:
    check_backend(backend, load(written(tmp_path, content)), [gpu, CPU])


def test_a_gpu_leaves_operators_to_the_cpu(
    backend: LitertBackend, gpu: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a GPU does not take runs on another device, and the result is as without the GPU."""
    assert "SwiftShader" in backend.describe(gpu)
    assert gpu.stand_in == f"the CPU ({backend.describe(gpu)})"
    model = load(written(tmp_path, spectrum()))
    with closing(backend.compile(model, [gpu, CPU])) as compiled:
        assert compiled.graph.operator_names == ["add_1", "rfft2d_2", "complex_abs_3"]
        assert compiled.computes(gpu) == ["add_1"]
        assert compiled.computes(CPU) == compiled.graph.operator_names
        [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert "net: LiteRT on GPU runs 1 of 3 operators, and leaves others to other devices: rfft2d_2, since" in line
        with pytest.raises(PlanError, match="device gpu cannot compute operator rfft2d_2 of net: "):
            compiled.stage(compiled.graph.operator_names, gpu)
        plan = make_plan(
            compiled.graph, (["gpu"], compiled.graph.operator_names[:1]), (["cpu0"], compiled.graph.operator_names[1:])
        )
        frame = np.random.default_rng(0).standard_normal((1, 8, 8)).astype(np.float32)
        with Pipeline(compiled, plan, Platform("p", (gpu, CPU))) as pipeline:
            [result] = pipeline.map([frame])
        expected = run(model.content, {"tensor/0:0": frame})
        np.testing.assert_allclose(result.outputs["tensor/2:0"], expected["tensor/2:0"], rtol=1e-4)
        compiled.save(tmp_path, [], Platform("p", (gpu, CPU)))
    with closing(backend.load(tmp_path, [gpu, CPU])) as loaded:
        assert loaded.computes(gpu) == ["add_1"]


@pytest.mark.needs("tvm")
def test_tvm_and_a_gpu_share_a_file(backend: LitertBackend, gpu: Device, model: Model) -> None:
    from tvm_pipeline_tvm.host.detection import host_target

    platform = Platform("p", (gpu, Device("cpu1", "host", (CORES[0],), host_target())))
    with closing(platform_backend(platform).compile(model, platform.devices)) as compiled:
        own = compiled.graph.operator_names
        frame = random_feeds(compiled.graph)
        with Pipeline(
            compiled, make_plan(compiled.graph, (["gpu"], own[:2]), (["cpu1"], own[2:])), platform
        ) as pipeline:
            [result] = pipeline.map([frame])
        for name, array in run(model.content, frame).items():
            np.testing.assert_allclose(result.outputs[name], array, rtol=1e-4, atol=1e-4)


@pytest.mark.needs("C compiler")
def test_a_driver_that_ends_its_process_costs_one_line(
    backend: LitertBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("SwiftShader")
    (tmp_path / "driver.c").write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) void begin(void) { abort(); }\n"
    )
    subprocess.run(["cc", "-shared", "-o", tmp_path / "driver.so", tmp_path / "driver.c"], check=True)
    (tmp_path / "driver.json").write_text(SWIFTSHADER.read_text().replace("./libvk_swiftshader.so", "./driver.so"))
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "driver.json"))
    with pytest.raises(
        PlatformError, match=r"device gpu: the process that tried it first was killed by SIGABRT"
    ) as told:
        backend.settle(Device("gpu", "litert", (), "GPU"))
    assert "\n" not in str(told.value)


# --------------------------------------------------------------------- an NPU, by Intel's libraries on the CPU


@pytest.mark.parametrize("target", [JIT, AHEAD], ids=["just in time", "ahead of time"])
def test_it_keeps_the_contract_on_an_npu(backend: LitertBackend, model: Model, target: str) -> None:
    device = backend.settle(npu(target))
    assert device.stand_in == "the CPU (CPU)"
    check_backend(backend, model, [device])


def test_what_was_compiled_ahead_of_time_is_kept(
    backend: LitertBackend, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle has the slices of its plan as the vendor's compiler made them, also for a machine that has the NPU."""
    device = backend.settle_elsewhere(npu(AHEAD))
    with closing(backend.compile_elsewhere(model, [device])) as compiled:
        stages = [
            Stage(("npu",), tuple(compiled.graph.operator_names[:2])),
            Stage(("npu",), tuple(compiled.graph.operator_names[2:])),
        ]
        compiled.save(tmp_path, stages, Platform("p", (device,)))
        frame = random_feeds(compiled.graph)
    monkeypatch.setattr(litert_model, "_compiled_ahead", lambda *_: pytest.fail("it compiles again"))
    with closing(backend.load(tmp_path, [device])) as loaded:
        found = in_stages(loaded, [stage.operators for stage in stages], frame, device)
    for name, array in run(model.content, frame).items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-2 * np.abs(array).max())  # it rounds to 16 bits


def test_a_compiler_that_leaves_operators_to_the_cpu_is_not_given_them(backend: LitertBackend, tmp_path: Path) -> None:
    device = npu(AHEAD)
    with closing(backend.compile_elsewhere(load(written(tmp_path, spectrum())), [device])) as compiled:
        assert compiled.computes(device) == ["add_1"]


# --------------------------------------------------------------------------------------------- devices and errors


def test_it_is_an_engine_of_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs and NPUs that compute are offered beside the cores, and what stands in for them is not."""
    engine = known_engines()["litert"]
    assert isinstance(engine, LitertBackend)
    desk = Platform("desk", (Device("cpu0", "host", (CORES[0],), "llvm"),))
    for gpu_, expected in (
        ("NVIDIA A2, adapterType=discrete GPU", ["litert-cpu0", "litert-gpu"]),
        (SHADER, ["litert-cpu0"]),
    ):
        monkeypatch.setattr(engine._trial, "_known", {"GPU": (gpu_, ""), "NPU": (None, "it has no driver")})
        found = with_engines(desk, "litert", "tflite")
        assert [device.name for device in found.devices] == expected
    assert found.devices[0] == Device("litert-cpu0", "litert", (CORES[0],), "CPU")


SHADER = "SwiftShader Device (Subzero), vendor=google, backend=Vulkan, adapterType=CPU / Software"


@pytest.fixture
def alone(backend: LitertBackend, monkeypatch: pytest.MonkeyPatch) -> LitertBackend:
    """Return a backend that has asked, on a machine without a GPU and an NPU, what is here."""
    monkeypatch.setattr(backend._trial, "_known", dict.fromkeys(("GPU", "NPU"), (None, "it is not here")))
    return backend


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("TPU", "'TPU' is no target of LiteRT; LiteRT here has CPU"),
        ("GPU enforce=true", "there is no property 'enforce'; did you mean enforce_f32"),
        ("GPU enforce_f32=perhaps", "enforce_f32=perhaps: Expected `bool`, got `str`"),
        ("CPU vendor=qualcomm", "there is no property 'vendor'"),
        (
            "NPU vendor=acme",
            "vendors/acme/dispatch has no libLiteRtDispatch.*; give its folder as `dispatch_library_path`",
        ),
        ("NPU vendor=intel_openvino graph_backend=tpu", "graph_backend=tpu: it is one of CPU, GPU, NPU"),
        (
            "NPU vendor=intel_openvino soc_model=8086",
            "'8086' is not a valid SocModel; `pip install ai-edge-litert-sdk-intel` brings",
        ),
    ],
)
def test_a_target_that_cannot_be_used_is_told(alone: LitertBackend, target: str, message: str) -> None:
    with pytest.raises(PlatformError, match=f"^device d: .*{message}") as told:
        alone.settle(Device("d", "litert", CPU.cores if target.startswith("CPU") else (), target))
    assert "\n" not in str(told.value)


def test_a_compiler_that_is_not_installed_is_named(alone: LitertBackend) -> None:
    target = (
        f"NPU vendor=qualcomm soc_model=SM8750 dispatch_library_path={litert_model._VENDORS}/intel_openvino/dispatch"
    )
    with pytest.raises(
        PlatformError, match=r"`pip install ai-edge-litert-sdk-qualcomm` brings the compiler; LiteRT here has CPU$"
    ):
        alone.settle(Device("npu", "litert", (), target))


def test_a_gpu_that_is_not_here_is_told_with_what_is(backend: LitertBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nowhere.json")
    with pytest.raises(PlatformError, match=r"device gpu: LiteRT refuses GPU: .*; LiteRT here has CPU"):
        backend.settle(Device("gpu", "litert", (), "GPU"))


def test_a_device_of_another_machine(backend: LitertBackend) -> None:
    assert backend.settle_elsewhere(CPU) == CPU
    assert backend.settle_elsewhere(replace(CPU, target="NPU vendor=qualcomm soc_model=SM8750")).name == "cpu0"
    with pytest.raises(PlatformError, match="the backend litert compiles on the machine that has the device alone"):
        backend.settle_elsewhere(replace(CPU, target="GPU"))


def test_other_formats_and_broken_files_are_refused(backend: LitertBackend) -> None:
    with pytest.raises(ModelError, match=r"net is onnx, litert takes .tflite: export the model to TFLite"):
        backend.compile(Model("net", "onnx", b""), [CPU])
    with pytest.raises(ModelError, match="not a TFLite file"):
        backend.compile(Model("net", "tflite", b"nothing"), [CPU])


def test_an_old_package_is_told(backend: LitertBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litert, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match=r"LiteRT is too old .* run `pip install -U 'ai-edge-litert>=2\.2,<3'`"):
        backend.settle(CPU)


def test_a_missing_package_is_told() -> None:
    code = (
        "import sys; sys.modules['ai_edge_litert'] = None\n"
        "from tvm_pipeline_litert import backend\n"
        "from tvm_pipeline.core.platform import Device\n"
        f"backend.settle(Device('d', 'litert', ({CORES[0]},)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PlatformError: the backend edgetpu cannot be used: TFLite is not installed" in done.stderr
    assert "pip install 'tvm-pipeline[edgetpu]'" in done.stderr
