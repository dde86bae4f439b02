"""NVIDIA's GPUs, by a library in place of the driver's: counters, power alone, neither, and no driver."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes.util import find_library
from pathlib import Path

import pytest

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import Survey
from tvm_pipeline_boards.nvml import GpuCounter, GpuPower, nvml_sensors


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("libnvidia-ml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def set_gpu(driver: ctypes.CDLL, index: int, millijoules: int | None, milliwatts: int | None) -> None:
    driver.fake_gpu(
        index, millijoules is not None, ctypes.c_ulonglong(millijoules or 0), milliwatts is not None, milliwatts or 0
    )


def test_gpus_tell_joules_or_watts(driver: ctypes.CDLL) -> None:
    driver.fake_machine(1, 3)
    set_gpu(driver, 0, 9_000_000_000_000, 300_000)  # more than 32 bits
    set_gpu(driver, 1, None, 70_500)  # before Volta
    set_gpu(driver, 2, None, None)  # as on a Jetson
    found = nvml_sensors(Path("/"), driver._name)
    counter, power = found.sensors
    assert isinstance(counter, GpuCounter)
    assert isinstance(power, GpuPower)
    assert (counter.name, counter.covers, counter.scope) == ("nvml:0", "GPU 0 (Fake 0)", "unit")
    assert counter.counter_j() == 9e9
    assert counter.read()[-1].energy_j == 0
    set_gpu(driver, 0, 9_000_000_002_500, 300_000)
    assert counter.read()[-1].energy_j == pytest.approx(2.5)
    assert (power.name, power.watts()) == ("nvml:1", 70.5)
    assert found.obstacles == {"nvml:2": "nvmlDeviceGetPowerUsage: Not Supported"}


def test_a_driver_that_was_loaded_again_is_noticed(driver: ctypes.CDLL) -> None:
    driver.fake_machine(1, 1)
    set_gpu(driver, 0, 5000, None)
    (counter,) = nvml_sensors(Path("/"), driver._name).sensors
    counter.read()
    set_gpu(driver, 0, 10, None)
    with pytest.raises(PowerError, match=r"nvml:0: its counter went back from 5\.0 J to 0\.01 J"):
        counter.read()


def test_no_driver(driver: ctypes.CDLL) -> None:
    driver.fake_machine(0, 1)
    assert nvml_sensors(Path("/"), driver._name).obstacles == {"nvml": "nvmlInit_v2: Driver Not Loaded"}
    assert nvml_sensors(Path("/"), "libno-such-driver.so.1") == Survey([], {})
    other = find_library("c")
    assert other is not None
    assert "nvmlInit_v2: the driver's libnvidia-ml.so.1 is too old" in nvml_sensors(Path("/"), other).obstacles["nvml"]
