"""Which GPUs are found, under which numbers and targets, and what drivers that do not work cost."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.fake_drivers import CUDA_GEFORCE, CUDA_ORIN, GEFORCE, INTEL, MALI, POCL, Drivers
from tests.support.parts import needs
from tvm_pipeline_tvm.gpu import detection
from tvm_pipeline_tvm.gpu.detection import Gpu, listed_by_tvm, survey
from tvm_pipeline_tvm.gpu.targets import completed, mismatch, target_for


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    yield Drivers(monkeypatch)
    survey.cache_clear()


def addresses() -> dict[str, str]:
    return {gpu.address: gpu.name for gpu in survey().gpus}


# What drivers tell


def test_what_a_cuda_driver_tells(drivers: Drivers) -> None:
    drivers.have(cuda=f"{CUDA_GEFORCE}\n{CUDA_ORIN}")
    geforce, orin = survey().gpus
    assert (geforce.address, geforce.name, geforce.capability) == ("cuda:0", "NVIDIA GeForce RTX 3080", (8, 6))
    assert (geforce.memory_bytes, geforce.is_shared, geforce.pci) == (10501292032, False, "0000:01:00")
    assert geforce.driver == "12.8"
    assert (orin.address, orin.is_shared, orin.is_software) == ("cuda:1", True, False)
    assert str(orin) == "Orin (cuda:1, 8.0 GB shared with the host, driver 12.8)"


def test_what_an_opencl_driver_tells(drivers: Drivers) -> None:
    drivers.have(opencl=MALI)
    [mali] = survey().gpus
    assert (mali.address, mali.vendor, mali.platform_name) == ("opencl:0", "ARM", "ARM Platform")
    assert (mali.memory_bytes, mali.is_shared, mali.pci) == (4112596992, True, "")
    assert (mali.most_threads, mali.alignment_bytes, mali.has_half) == (384, 128, True)
    assert survey().reasons == {"cuda": "libcuda.so.1 finds no device"}


def test_software_is_known_as_such(drivers: Drivers) -> None:
    drivers.have(cuda="software CUDA|7|2|8589934592|1|0", opencl=POCL)
    cuda, pocl = survey().gpus
    assert cuda.is_software
    assert pocl.is_software
    assert pocl.product == "PoCL"
    assert "software" in str(pocl)
    assert "no float16" in str(pocl)


# TVM's numbers


def test_gpus_come_before_cpus_and_hide_them(drivers: Drivers) -> None:
    drivers.have(opencl=f"{POCL}\n{MALI}")
    assert addresses() == {"opencl:0": "Mali-G52"}


def test_the_last_platform_is_the_first(drivers: Drivers) -> None:
    drivers.have(opencl=f"{INTEL}\n{GEFORCE}")
    assert addresses() == {"opencl:0": "NVIDIA GeForce RTX 3080", "opencl:1": "Intel(R) UHD Graphics 770"}


def test_the_devices_of_a_platform_keep_their_order() -> None:
    told = [Gpu("opencl", name, platform=at, version="OpenCL 3.0") for name, at in (("a", 0), ("b", 0), ("c", 1))]
    assert [(gpu.name, gpu.index) for gpu in listed_by_tvm(told)] == [("c", 0), ("a", 1), ("b", 2)]


@pytest.mark.parametrize(("version", "is_listed"), [("1.1", False), ("1.2", True), ("3.0", True)])
def test_devices_before_opencl_1_2_are_not_listed(drivers: Drivers, version: str, is_listed: bool) -> None:
    drivers.have(opencl=MALI.replace("OpenCL 3.0", f"OpenCL {version}"))
    assert bool(survey().gpus) is is_listed
    assert ("1.2" in survey().reasons.get("opencl", "")) is not is_listed


def test_two_platforms_with_the_same_name(drivers: Drivers) -> None:
    """A driver that is registered twice shows its GPU twice: both numbers are TVM's, and the GPU is one."""
    drivers.have(opencl=f"{MALI}\n{MALI}")
    assert addresses() == {"opencl:0": "Mali-G52", "opencl:1": "Mali-G52"}
    assert [gpu.address for gpu in survey().distinct] == ["opencl:0"]


def test_a_gpu_of_cuda_and_opencl_is_one(drivers: Drivers) -> None:
    drivers.have(cuda=CUDA_GEFORCE, opencl=f"{GEFORCE}\n{INTEL}")
    assert [gpu.address for gpu in survey().distinct] == ["cuda:0", "opencl:0"]
    assert addresses()["opencl:0"] == "Intel(R) UHD Graphics 770"


def test_equal_gpus_are_told_apart_by_their_bus(drivers: Drivers) -> None:
    second = CUDA_GEFORCE[:-1] + "2"
    drivers.have(cuda=f"{CUDA_GEFORCE}\n{second}", opencl=GEFORCE)
    assert [(gpu.address, gpu.pci) for gpu in survey().distinct] == [("cuda:0", "0000:01:00"), ("cuda:1", "0000:02:00")]


# Drivers that do not work


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            {"cuda": "crash", "opencl": MALI},
            "libcuda.so.1 was asked for its devices by a process that was killed by SIG",
        ),
        ({"cuda": "mismatch", "opencl": MALI}, "libcuda.so.1: cuInit gives CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (
            {"cuda": CUDA_ORIN, "opencl": "crash"},
            "libOpenCL.so.1 was asked for its devices by a process that was killed",
        ),
        ({"cuda": CUDA_ORIN, "opencl": "platform|\ndevice|gpu"}, ""),  # it tells nothing, not even its version
    ],
)
def test_a_driver_that_fails_costs_its_own_devices(drivers, caplog, fault, words) -> None:
    drivers.have(**fault)
    with caplog.at_level(logging.WARNING):
        assert len(survey().gpus) == 1
        assert len(survey().gpus) == 1
    assert caplog.text.count("its GPUs are left out") == bool(words)  # it is asked once, and warned of once
    assert words in caplog.text


@pytest.mark.thorough
def test_a_driver_that_hangs(drivers: Drivers, caplog, monkeypatch) -> None:
    monkeypatch.setattr(detection, "TIMEOUT_S", 1.0)
    drivers.have(cuda="hang", opencl=MALI)
    assert addresses() == {"opencl:0": "Mali-G52"}
    assert "libcuda.so.1 did not list its devices in 1 s; its GPUs are left out. See whether `nvidia" in caplog.text
    assert caplog.text.count("left out") == 1


def test_a_loader_without_a_platform(drivers: Drivers, caplog) -> None:
    drivers.have(cuda=CUDA_ORIN)
    assert addresses() == {"cuda:0": "Orin"}
    assert "finds no platform: no driver is registered in /etc/OpenCL/vendors" in survey().reasons["opencl"]
    assert caplog.text == ""  # nothing is wrong


@pytest.mark.parametrize("kind", detection.LIBRARIES)
def test_a_machine_without_a_driver(drivers: Drivers, caplog, tmp_path: Path, kind: str) -> None:
    library, _ = detection.LIBRARIES[kind]
    try:
        ctypes.CDLL(library)
    except OSError:
        drivers.have(folder=tmp_path)
        assert kind not in {gpu.kind for gpu in survey().gpus}
        assert f"{library} cannot be loaded" in survey().reasons[kind]
        assert caplog.text == ""
    else:
        pytest.skip(f"{library} is installed here")


def test_a_library_that_is_damaged(drivers: Drivers, caplog, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    drivers.have(folder=tmp_path)
    assert "libcuda.so.1 cannot be loaded" in survey().reasons["cuda"]
    assert "libcuda.so.1 cannot be loaded" in caplog.text


def test_nothing_of_a_driver_is_loaded_here(drivers: Drivers) -> None:
    drivers.have(cuda=CUDA_ORIN, opencl=MALI)
    assert len(survey().gpus) == 2
    with open(f"/proc/{os.getpid()}/maps") as maps:
        assert "fake-drivers-" not in maps.read()


# Targets


def opencl(name: str, vendor: str, threads: int, type_: str = "gpu", platform_name: str = "") -> Gpu:
    return Gpu("opencl", name, vendor=vendor, most_threads=threads, type=type_, platform_name=platform_name)


@pytest.mark.parametrize(
    ("gpu", "target"),
    [
        (Gpu("cuda", "NVIDIA Tegra X1", capability=(5, 3)), "cuda -arch=sm_53"),
        (Gpu("cuda", "NVIDIA Tegra X2", capability=(6, 2)), "cuda -arch=sm_62"),
        (Gpu("cuda", "Xavier", capability=(7, 2)), "cuda -arch=sm_72"),
        (Gpu("cuda", "Orin", capability=(8, 7)), "cuda -arch=sm_87"),
        (Gpu("cuda", "NVIDIA Thor", capability=(10, 1)), "cuda -arch=sm_101"),
        (Gpu("cuda", "NVIDIA Thor", capability=(11, 0)), "cuda -arch=sm_110"),
        (Gpu("cuda", "NVIDIA GeForce GTX 1080", capability=(6, 1)), "cuda -arch=sm_61"),
        (Gpu("cuda", "Tesla T4", capability=(7, 5)), "cuda -arch=sm_75"),
        (Gpu("cuda", "NVIDIA GeForce RTX 4090", index=1, capability=(8, 9)), "cuda:1 -arch=sm_89"),
        (Gpu("cuda", "NVIDIA H200", capability=(9, 0)), "cuda -arch=sm_90"),
        (opencl("Mali-T860", "ARM", 256), "opencl -device=mali -max_num_threads=256"),
        (opencl("Mali-T760", "ARM", 64), "opencl -device=mali -max_num_threads=64"),
        (opencl("Mali-G52", "ARM", 384), "opencl -device=bifrost -max_num_threads=256"),
        (opencl("Mali-LODX r0p0", "ARM", 1024), "opencl -device=bifrost -max_num_threads=256"),
        (opencl("Immortalis-G715", "ARM", 1024), "opencl -device=bifrost -max_num_threads=256"),
        (
            opencl("Intel(R) UHD Graphics 770", "Intel(R) Corporation", 512),
            "opencl -device=intel_graphics -thread_warp_size=16 -max_num_threads=256",
        ),
        (
            opencl("Intel(R) Gen9 HD Graphics NEO", "Intel(R) Corporation", 256),
            "opencl -device=intel_graphics -thread_warp_size=16 -max_num_threads=256",
        ),
        (opencl("QUALCOMM Adreno(TM) 750", "QUALCOMM", 1024), "opencl -max_num_threads=256"),
        (opencl("gfx1030", "Advanced Micro Devices, Inc.", 256), "opencl -max_num_threads=256"),
        (opencl("NVIDIA GeForce RTX 3080", "NVIDIA Corporation", 1024), "opencl -max_num_threads=256"),
        (opencl("V3D 4.2", "Broadcom", 256), "opencl -max_num_threads=256"),
        (
            opencl("cpu-haswell-Intel(R) N150", "GenuineIntel", 4096, "cpu", "Portable Computing Language"),
            "opencl -device=intel_graphics -max_num_threads=256",
        ),
        (
            opencl("13th Gen Intel(R) Core(TM) i7-13620H", "Intel(R) Corporation", 8192, "cpu", "Intel(R) OpenCL"),
            "opencl -device=intel_graphics -max_num_threads=256",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_target_of_a_device(gpu: Gpu, target: str) -> None:
    assert target_for(gpu) == target
    assert completed("", gpu) == completed(gpu.address, gpu) == completed(target, gpu) == target
    assert mismatch(target, gpu) == ""


@pytest.mark.parametrize(
    ("tag", "capability"),
    [
        ("nvidia/jetson-nano", (5, 3)),
        ("nvidia/jetson-tx1", (5, 3)),
        ("nvidia/jetson-tx2", (6, 2)),
        ("nvidia/geforce-gtx-1080", (6, 1)),
        ("nvidia/nvidia-t4", (7, 5)),
        ("nvidia/geforce-rtx-3080", (8, 6)),
        ("nvidia/geforce-rtx-4090", (8, 9)),
    ],
)
def test_architectures_are_those_of_tvms_tags(tag: str, capability: tuple[int, int]) -> None:
    needs("tvm")
    import tvm

    assert target_for(Gpu("cuda", tag, capability=capability)) == f"cuda -arch={tvm.target.Target(tag).attrs['arch']}"


@pytest.mark.parametrize(
    ("arch", "capability", "fits"),
    [
        ("sm_53", (8, 7), True),  # PTX for an older GPU
        ("sm_87", (8, 7), True),
        ("sm_87", (7, 2), False),
        ("sm_101", (11, 0), True),  # Thor, compiled before it was renamed
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
        ("87", (8, 7), False),
    ],
)
def test_which_architecture_fits(arch: str, capability: tuple[int, int], fits: bool) -> None:
    gpu = Gpu("cuda", "a GPU", capability=capability)
    assert bool(mismatch(f"cuda -arch={arch}", gpu)) is not fits
