"""The GPU backend: which devices it offers, what it makes of those of a platform file, and which it refuses."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")

from tests.gpu.fake_drivers import CUDA_GEFORCE, CUDA_ORIN, GEFORCE, INTEL, MALI, POCL, Drivers
from tests.support.command import run_command
from tests.support.fake_backend import chain_model, make_plan
from tests.support.installed import install
from tvm_pipeline import Bundle, open_bundle, write_bundle
from tvm_pipeline.backends.registry import detect_platform, settle_platform
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import BundleError, ModelError, PlatformError
from tvm_pipeline.testing import FakeBackend
from tvm_pipeline.workflow.steps import Compiled, measured_profile, opened_bundle
from tvm_pipeline_tvm.devices import runtimes
from tvm_pipeline_tvm.gpu import GpuBackend, backend
from tvm_pipeline_tvm.gpu.detection import survey
from tvm_pipeline_tvm.gpu.gpu import bind
from tvm_pipeline_tvm.host import backend as host
from tvm_pipeline_tvm.relay.compiled import RelayModel

MODEL = Model("net", "onnx", b"")
CORES = sorted(os.sched_getaffinity(0))
SOFTWARE_CUDA = "software CUDA|7|2|8589934592|1|0"


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    install(monkeypatch, backend, host, own="gpu")
    yield Drivers(monkeypatch)
    survey.cache_clear()


def gpu(target: str = "", name: str = "gpu", **options: object) -> Device:
    return Device(name, "gpu", target=target, **options)  # type: ignore[arg-type]


# What is detected


def test_one_gpu_is_called_gpu(drivers: Drivers) -> None:
    drivers.have(cuda=CUDA_ORIN)
    [device] = backend.detect()
    assert device == Device("gpu", "gpu", target="cuda -arch=sm_87", memory_bytes=7990480896)
    assert backend.settle(device) == device


def test_several_gpus_have_numbers_and_each_is_there_once(drivers: Drivers) -> None:
    drivers.have(cuda=CUDA_GEFORCE, opencl=f"{GEFORCE}\n{INTEL}")
    found = backend.detect()
    assert [(device.name, device.target) for device in found] == [
        ("gpu0", "cuda -arch=sm_86"),
        ("gpu1", "opencl -device=intel_graphics -thread_warp_size=16 -max_num_threads=256"),
    ]
    assert [backend.settle(device) for device in found] == found


def test_gpus_and_cpus_share_a_model(drivers: Drivers) -> None:
    drivers.have(cuda=CUDA_ORIN)
    platform = detect_platform(MODEL)
    assert {device.backend for device in platform.devices} == {"gpu", "host"}
    chosen, settled = settle_platform(platform)
    assert chosen is backend
    assert settled == platform


@pytest.mark.parametrize(("listed", "address"), [({"cuda": SOFTWARE_CUDA}, "cuda:0"), ({"opencl": POCL}, "opencl:0")])
def test_software_is_left_out_and_said(drivers: Drivers, caplog, listed: dict[str, str], address: str) -> None:
    drivers.have(**listed)
    with caplog.at_level(logging.INFO):
        assert {device.backend for device in detect_platform(MODEL).devices} == {"host"}
    [record] = [record for record in caplog.records if record.name == "tvm_pipeline_tvm.gpu.gpu"]
    assert record.levelno == logging.INFO
    assert f'name it in a platform file with backend = "gpu" and target = "{address}"' in record.getMessage()


def test_without_tvm_there_is_none(drivers: Drivers, monkeypatch) -> None:
    drivers.have(cuda=CUDA_ORIN, opencl=POCL)
    monkeypatch.setattr("tvm_pipeline_tvm.gpu.gpu.find_spec", lambda name: None)
    assert backend.detect() == []
    assert backend.left_out() == []
    with pytest.raises(PlatformError, match=r"device gpu: .* not installed: run `pip install 'tvm-pipeline\[tvm\]'`"):
        backend.settle(gpu("cuda"))


# What a platform file says


@pytest.mark.parametrize(
    ("written", "settled"),
    [
        ("", "cuda -arch=sm_86"),
        ("cuda", "cuda -arch=sm_86"),
        ("cuda:0", "cuda -arch=sm_86"),
        ("cuda -arch=sm_53", "cuda -arch=sm_53"),
        ("cuda -max_num_threads=512", "cuda -max_num_threads=512 -arch=sm_86"),
        ("opencl", "opencl -max_num_threads=256"),
        ("opencl -thread_warp_size=32", "opencl -thread_warp_size=32 -max_num_threads=256"),
    ],
)
def test_what_a_target_leaves_open_is_filled_in(drivers: Drivers, written: str, settled: str) -> None:
    drivers.have(cuda=CUDA_GEFORCE, opencl=GEFORCE)
    device = backend.settle(gpu(written))
    assert device == gpu(settled, memory_bytes=10501292032)
    assert backend.settle(device) == device


def test_what_the_platform_file_says_stays(drivers: Drivers, tmp_path: Path) -> None:
    drivers.have(cuda=CUDA_ORIN)
    device = backend.settle(gpu("cuda", memory_bytes=1 << 30, active_w=9.5, cores=(CORES[0],)))
    assert (device.memory_bytes, device.active_w, device.cores) == (1 << 30, 9.5, (CORES[0],))
    (tmp_path / "board.toml").write_text(platform_toml(Platform("board", (device,))))
    assert read_platform(tmp_path / "board.toml").devices == (device,)


def test_a_platform_prepares_its_own_devices_and_none_of_an_earlier_platform(
    drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that changed from OpenCL to CUDA prepared OpenCL at each compile, and failed where its loader left."""
    prepared: list[tuple[str, str | None]] = []

    def prepare(kind: str) -> None:
        prepared.append((kind, os.environ.get("POCL_MAX_PTHREAD_COUNT")))

    monkeypatch.setattr(runtimes, "ready_to_run", prepare)
    monkeypatch.setattr(RelayModel, "compile", Mock(side_effect=ModelError("compiled")))
    monkeypatch.delenv("POCL_MAX_PTHREAD_COUNT", raising=False)
    drivers.have(cuda=SOFTWARE_CUDA, opencl=POCL)
    opencl = backend.settle(gpu("opencl", cores=(CORES[0],)))
    cuda = backend.settle(gpu("cuda", cores=(CORES[0],)))
    for device in (opencl, cuda):
        with pytest.raises(ModelError, match="compiled"):
            backend.compile(MODEL, [*host.detect(), device])
    assert prepared == [("opencl", "1"), ("cuda", None)]
    assert "POCL_MAX_PTHREAD_COUNT" not in os.environ


@pytest.mark.parametrize(
    ("listed", "target", "words"),
    [
        ({"opencl": POCL}, "opencl", r"PoCL \(software, CPU cores "),
        ({"opencl": POCL}, "opencl -device=mali", r"PoCL \(software, CPU cores "),
        ({"cuda": SOFTWARE_CUDA}, "cuda", r"software CUDA \(software, CPU cores "),
    ],
)
def test_software_stands_in_and_says_so(drivers: Drivers, listed: dict[str, str], target: str, words: str) -> None:
    drivers.have(**listed)
    device = backend.settle(gpu(target))
    assert device.label == "gpu (stand-in)"
    assert device.stand_in.startswith(words.replace("\\", ""))
    assert backend.settle(gpu(target, cores=(CORES[0],))).stand_in.endswith(f"CPU cores {CORES[0]})")


@pytest.mark.parametrize(
    ("listed", "target", "words"),
    [
        ({"cuda": CUDA_ORIN}, "cuda:1", r"cuda:1 was not found\. Found: Orin \(cuda:0, .*Mend `target`"),
        ({"cuda": CUDA_ORIN}, "opencl", r"opencl:0 was not found \(libOpenCL\.so\.1 finds no platform.*Found: Orin"),
        ({"opencl": POCL}, "cuda", r"cuda:0 was not found \(libcuda\.so\.1 finds no device\)\. Found: PoCL"),
        ({"opencl": POCL}, "", r"a GPU was not found \(libcuda.*Found: PoCL \(opencl:0, software"),
        ({}, "cuda", r"no GPU was found \(libcuda\.so\.1 finds no device\)\. Install the driver"),
        ({}, "", r"no GPU was found \(libcuda.*libOpenCL.*\)\. Install"),
        ({"cuda": "crash"}, "cuda", r"libcuda\.so\.1 was asked for .* killed by SIGSEGV"),
        ({"cuda": f"{CUDA_GEFORCE}\n{CUDA_ORIN}"}, "", r"does not say which GPU it is; give `target`\. Here: .*cuda:1"),
        ({"cuda": CUDA_ORIN}, "llvm", r"'llvm' is no target of a GPU, whose kind is one of cuda, opencl"),
        (
            {"cuda": CUDA_ORIN},
            "cuda -nonsense=1",
            r"TVM does not know the target 'cuda -nonsense=1 -arch=sm_87' \(Error when parsing .* Cannot recognize "
            r"'nonsense'\. Candidates are: .*_per_block\.\)\. A target is .* such as 'cuda -arch=sm_87'; "
            r"mend `target` in the platform file$",
        ),
        (
            {"opencl": MALI},
            "opencl max_num_threads",
            r"attribute key: max_num_threads\.\)\. .* such as 'opencl -device=bifrost -max_num_threads=256'; mend",
        ),
        ({"cuda": CUDA_ORIN}, "cuda -arch=sm_110", r"which does not fit Orin .* it is sm_87; use -arch=sm_87"),
        ({"opencl": MALI}, "opencl -max_num_threads=512", r"at most 384 threads in a work-group, and the target 512"),
        ({"opencl": MALI}, "opencl -device=adreno", r"textures, which cannot be cut; leave that option out"),
        ({"opencl": MALI.replace("|1024|cl", "|8192|cl")}, "opencl", r"buffers at multiples of 1024 bytes"),
    ],
)
def test_what_is_refused(drivers: Drivers, listed: dict[str, str], target: str, words: str) -> None:
    drivers.have(**listed)
    with pytest.raises(PlatformError, match=f"device gpu.*{words}"):
        backend.settle(gpu(target))


def test_cores_that_are_not_there(drivers: Drivers) -> None:
    drivers.have(cuda=CUDA_ORIN)
    with pytest.raises(PlatformError, match=r"device gpu names cores \[4095\]"):
        backend.settle(gpu("cuda", cores=(4095,)))


def test_schedules_of_other_hardware_are_said(drivers: Drivers, caplog) -> None:
    drivers.have(opencl=INTEL)
    backend.settle(gpu("opencl"))
    assert caplog.text == ""
    backend.settle(gpu("opencl -device=mali"))
    assert "opencl -device=mali -max_num_threads=256 was made for other hardware than Intel(R) UHD" in caplog.text


@pytest.mark.parametrize(
    ("listed", "targets"),
    [
        ({"cuda": CUDA_ORIN}, ("cuda", "cuda -arch=sm_53")),
        ({"cuda": CUDA_GEFORCE, "opencl": GEFORCE}, ("cuda", "opencl")),
        ({"opencl": f"{MALI}\n{MALI}"}, ("opencl:0", "opencl:1")),
    ],
)
def test_a_gpu_is_one_device(drivers: Drivers, listed: dict[str, str], targets: tuple[str, str]) -> None:
    """It has one queue, and a plan counts on each of its devices alone."""
    drivers.have(**listed)
    devices = [gpu(target, f"gpu{index}") for index, target in enumerate(targets)]
    with pytest.raises(PlatformError, match=r"devices gpu0 \(.*\) and gpu1 \(.*\) are one GPU, .*leave one of them"):
        settle_platform(Platform("board", tuple(devices)))
    for device in devices:  # nothing is remembered of what was refused
        assert settle_platform(Platform("board", (device,)))[1].devices[0].name == device.name


def test_a_gpu_is_one_device_beside_a_backend_that_cuts(drivers: Drivers, monkeypatch) -> None:
    """Then each slice is compiled for one device, so that no backend sees the platform when it compiles."""
    drivers.have(cuda=f"{CUDA_GEFORCE}\n{CUDA_ORIN}")
    install(monkeypatch, backend, FakeBackend([Device("tpu", "fake")], [chain_model(2)], cuts=("onnx",)), own="gpu")
    two = gpu("cuda", "gpu0"), Device("tpu", "fake"), gpu("cuda:1", "gpu1")
    assert settle_platform(Platform("desk", two))[0].name == "fake+gpu"
    with pytest.raises(PlatformError, match=r"devices gpu0 .* and gpu1 .* are one GPU"):
        settle_platform(Platform("desk", (*two[:2], gpu("cuda -arch=sm_80", "gpu1"))))


# Bundles


@pytest.mark.parametrize(
    ("made_on", "here", "words"),
    [
        ({"cuda": CUDA_GEFORCE}, {}, r"no GPU was found"),
        ({"cuda": CUDA_GEFORCE}, {"cuda": "Xavier|7|2|1000000|1|0"}, r"it is sm_72; .*compile the model again"),
        ({"cuda": CUDA_GEFORCE}, {"opencl": INTEL}, r"cuda:0 was not found .*Found: Intel"),
        ({"opencl": MALI}, {"opencl": POCL}, r"here it is not \(PoCL \(software"),
    ],
)
def test_a_bundle_for_another_gpu(drivers: Drivers, monkeypatch, tmp_path, made_on, here, words) -> None:
    """The model is a fake one; what is asked of the backend comes before any code is loaded."""

    class Compiling(GpuBackend):
        compile = FakeBackend([], [chain_model(2)]).compile  # type: ignore[assignment]

    drivers.have(**made_on)
    install(monkeypatch, Compiling())
    chosen, platform = settle_platform(Platform("board", (gpu(),)))
    model = chosen.compile(Model("chain", "onnx", b""), platform.devices)
    plan = make_plan(model.graph, (["gpu"], model.graph.operator_names))
    write_bundle(tmp_path / "net.tar", Bundle(model.graph, platform, unmeasured(model.graph), plan, model))
    drivers.have(**here)
    with pytest.raises(BundleError, match=words), open_bundle(tmp_path / "net.tar"):
        pass


def test_a_bundle_of_another_model_of_gpu_is_used_with_a_warning(drivers: Drivers, monkeypatch, tmp_path) -> None:
    """Both run its code, which is for an architecture; its seconds are of one of them."""

    class Compiling(GpuBackend):
        compile = FakeBackend([], [chain_model(2)]).compile  # type: ignore[assignment]
        load = FakeBackend([], [chain_model(2)]).load  # type: ignore[assignment]

    drivers.have(cuda=CUDA_GEFORCE)
    install(monkeypatch, Compiling())
    chosen, platform = settle_platform(Platform("board", (gpu("cuda"),)))
    model = chosen.compile(Model("chain", "onnx", b""), platform.devices)
    profile = measured_profile(Compiled(chosen, model, platform), repeats=2)
    plan = make_plan(model.graph, (["gpu"], model.graph.operator_names))
    write_bundle(tmp_path / "net.tar", Bundle(model.graph, platform, profile, plan, model))

    def said() -> list[str]:
        lines = log_lines("WARNING")
        with opened_bundle(tmp_path / "net.tar"):
            return lines

    assert said() == []
    drivers.have(cuda="NVIDIA A40|8|6|48000000000|0|1")
    [line] = said()
    there, here = r"NVIDIA GeForce RTX 3080 \(cuda:0, .*\)", r"NVIDIA A40 \(cuda:0, .*\)"
    assert re.search(rf"net\.tar was measured on {there}, and here is {here}: .*Profile again", line)


# Threads


def test_a_thread_that_was_bound_is_free_again(drivers: Drivers) -> None:
    """Threads of stages are used again: one of a core comes to feed a GPU, which any core may do."""
    drivers.have(cuda=CUDA_ORIN)
    cpu = Device("cpu0", "host", (CORES[-1],), "llvm")
    seen = []

    def work() -> None:
        for device in (cpu, gpu("cuda -arch=sm_87"), gpu("cuda -arch=sm_87", cores=(CORES[0],)), cpu):
            bind(device)
            seen.append(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[CORES[-1]], CORES, [CORES[0]], [CORES[-1]]]


# The command line


def test_the_command_shows_what_the_gpus_are(drivers: Drivers, capfd, monkeypatch) -> None:
    drivers.have(cuda=CUDA_GEFORCE, opencl=f"{GEFORCE}\n{INTEL}")
    outcome = run_command(capfd, monkeypatch, "devices", "--json")
    assert outcome.code == 0, outcome.err
    assert [d["memory_bytes"] for d in outcome.json["devices"] if d["backend"] == "gpu"] == [10501292032, 26582675456]
    assert "gpu0: NVIDIA GeForce RTX 3080 (cuda:0, 10.5 GB, driver 12.8)" in outcome.err
    assert "gpu1: Intel(R) UHD Graphics 770 (opencl:0, 26.6 GB shared with the host, driver 25.18" in outcome.err
    assert "cpu0: " not in outcome.err


def test_the_command_says_which_software_was_left_out(drivers: Drivers, capfd, monkeypatch, tmp_path: Path) -> None:
    drivers.have(cuda=CUDA_ORIN, opencl=POCL)
    outcome = run_command(capfd, monkeypatch, "devices")
    assert "PoCL (opencl:0, software, " in outcome.err
    assert (
        "is left out: the CPU computes what it is given. To use it, name it in a platform file with "
        'backend = "gpu" and target = "opencl:0"'
    ) in outcome.err
    (tmp_path / "gpu.toml").write_text(platform_toml(Platform("board", (gpu("cuda"),))))
    assert "left out" not in run_command(capfd, monkeypatch, "devices", "--platform", tmp_path / "gpu.toml").err
