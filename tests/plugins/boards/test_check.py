"""`tvm-pipeline check` passes on each kind of sensor of power, and names one that is broken."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest

from tests.cli.conftest import cli
from tests.plugins.boards import power_trees as trees
from tests.plugins.boards.test_hwmon import BOARDS
from tests.plugins.boards.test_jtop import Client
from tests.plugins.boards.test_nvml import driver, set_gpu
from tests.support.guests import guests
from tvm_pipeline.cli import check
from tvm_pipeline.power import Survey, choice
from tvm_pipeline_boards.machine_sensors import machine_sensors
from tvm_pipeline_boards.nvml import nvml_sensors

__all__ = ["cli", "driver"]


class Machine(NamedTuple):
    """Where a test writes the files of sensors, and NVIDIA's driver."""

    root: Path
    driver: ctypes.CDLL


Act = Callable[[Machine], object]


def tree(write: Callable[[Path], object]) -> Act:
    return lambda machine: write(machine.root)


def gpu(millijoules: int | None, milliwatts: int | None = None, is_loaded: bool = True) -> Act:
    def act(machine: Machine) -> None:
        machine.driver.fake_machine(is_loaded, 1)
        if machine.driver.nvmlInit_v2() == 0:
            set_gpu(machine.driver, 0, millijoules, milliwatts)

    return act


def service(**attributes: object) -> Act:
    """Run the service of jtop from now on, with these attributes of its client."""

    def act(machine: Machine) -> None:
        trees.write_tree(machine.root, {"run/jtop.sock": ""})
        for name, value in attributes.items():
            setattr(Client, name, value)

    return act


def total(milliwatts: int) -> Act:
    return service(power={"tot": {"power": milliwatts}})


def tells(file: str, content: str | int | None) -> Act:
    """Have a file hold something else; with None it answers with an error, also to root."""

    def act(machine: Machine) -> None:
        (machine.root / file).unlink()
        if content is None:
            (machine.root / file).mkdir()
        else:
            (machine.root / file).write_text(f"{content}\n")

    return act


def counts(*acts: Act) -> Act:
    """Have the counters of processors go on, and then do more."""

    def act(machine: Machine) -> None:
        for file in machine.root.glob("sys/class/powercap/*/energy_uj"):
            file.write_text(f"{int(file.read_text()) + 400_000}\n")
        for more in acts:
            more(machine)

    return act


def nothing(machine: Machine) -> None:
    pass


@pytest.fixture
def checked(cli, driver, tmp_path, monkeypatch) -> Callable[[Sequence[Act], Act], dict[str, tuple[str, str]]]:
    """Returns the states and texts of the claims about power, where the second act happens between two readings."""
    monkeypatch.setattr(check, "_answers", lambda *_: iter(()))  # nothing is asked of a device
    package = ModuleType("jtop")
    package.jtop = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jtop", package)
    for name in ("power", "is_alive", "opened"):
        monkeypatch.setattr(Client, name, getattr(Client, name))  # what an act sets is undone after the test
    machine = Machine(tmp_path / "root", driver)
    driver.fake_machine(1, 0)

    def found() -> Survey:
        there, gpus = machine_sensors(machine.root), nvml_sensors(Path("/"), driver._name)
        return Survey(there.sensors + gpus.sensors, there.obstacles | gpus.obstacles, there.looked_for)

    def run(before: Sequence[Act], later: Act) -> dict[str, tuple[str, str]]:
        for act in before:
            act(machine)
        monkeypatch.setattr(choice, "time", SimpleNamespace(sleep=lambda _: (later(machine), time.sleep(0.05))))
        with guests(sensors=found):
            assert cli("check", "--minutes", 0.001, "-o", tmp_path / "check.json").code in (0, 1)
        claims = json.loads((tmp_path / "check.json").read_text())["claims"]
        return {claim["subject"]: (claim["state"], claim["told"]) for claim in claims if claim["claim"] == "power"}

    return run


@pytest.mark.parametrize(
    ("before", "later", "best"),
    [
        *((tree(board), nothing, rail) for board, rail in BOARDS.items()),
        *((tree(board), counts(), "rapl:package-0") for board in (trees.intel_server, trees.amd_desktop)),
        (tree(trees.intel_laptop), counts(), "rapl:psys"),
        (service(), nothing, "jtop"),
        (gpu(9_000_000, 300_000), gpu(9_002_500, 300_000), "nvml:0"),
        (gpu(None, 70_500), nothing, "nvml:0"),
    ],
)
def test_it_passes_on_each_sensor(checked, before, later, best):
    claims = checked([before], later)
    assert {state for state, _ in claims.values()} == {"passed"}
    assert " W, " in claims[best][1]


VDD_IN, HWMON = "ina3221:VDD_IN", "sys/class/hwmon/hwmon1"
POM_5V_IN, IIO = "ina3221:POM_5V_IN", "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
PACKAGE, ZONE = "rapl:package-0", "sys/class/powercap/intel-rapl:0"
PSYS, PLATFORM = "rapl:psys", "sys/class/powercap/intel-rapl:1"
STILL, MUCH = "cannot draw 0 W: its sensor stands still, or is not wired", " W are more than a socket gives"


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(
    ("sensor", "before", "later", "told"),
    [
        # nonsense
        (VDD_IN, [tree(trees.orin_nano), tells(f"{HWMON}/curr1_input", "warn 3")], nothing, "'warn 3' is no figure"),
        (VDD_IN, [tree(trees.orin_nano)], tells(f"{HWMON}/in1_input", 10**10), MUCH),
        (POM_5V_IN, [tree(trees.nano)], tells(f"{IIO}/in_power0_input", -5), "-5 is negative"),
        (PACKAGE, [tree(trees.amd_desktop), tells(f"{ZONE}/energy_uj", 10**14)], nothing, "where it begins anew"),
        (PACKAGE, [tree(trees.amd_desktop)], tells(f"{ZONE}/energy_uj", 5), MUCH),
        ("jtop", [total(-1)], nothing, "jtop: a power of -1 mW"),
        ("jtop", [service(power={})], nothing, "KeyError: 'tot'"),
        ("jtop", [total(10**10)], nothing, MUCH),
        ("nvml:0", [gpu(5000)], gpu(10), "its counter went back from 5.0 J to 0.01 J"),
        ("nvml:0", [gpu(None, 4_000_000_000)], nothing, MUCH),
        # cannot be read
        (VDD_IN, [tree(trees.orin_nano), tells(f"{HWMON}/in1_input", None)], nothing, "in1_input: Is a directory"),
        (VDD_IN, [tree(trees.orin_nano)], tells(f"{HWMON}/in1_input", None), "in1_input: Is a directory"),
        (VDD_IN, [tree(trees.orin_nano), tells(f"{HWMON}/in1_enable", 0)], nothing, "the channel is switched off"),
        (POM_5V_IN, [tree(trees.nano)], tells(f"{IIO}/in_power0_input", None), "in_power0_input: Is a directory"),
        (PACKAGE, [tree(trees.amd_desktop)], tells(f"{ZONE}/energy_uj", None), "energy_uj: Is a directory"),
        ("jtop", [service()], service(is_alive=False), "jtop: its service has ended"),
        ("nvml:0", [gpu(None)], nothing, "nvmlDeviceGetPowerUsage: Not Supported"),
        ("nvml:0", [gpu(5000)], gpu(None), "nvmlDeviceGetTotalEnergyConsumption: Not Supported"),
        ("nvml", [gpu(5000, is_loaded=False)], nothing, "nvmlInit_v2: Driver Not Loaded"),
        # stands still
        (VDD_IN, [tree(trees.orin_nano), tells(f"{HWMON}/curr1_input", 0)], nothing, STILL),
        (POM_5V_IN, [tree(trees.nano), tells(f"{IIO}/in_power0_input", 0)], nothing, STILL),
        (PACKAGE, [tree(trees.amd_desktop)], nothing, STILL),
        (PSYS, [tree(trees.intel_laptop)], counts(tells(f"{PLATFORM}/energy_uj", 7_000_000)), STILL),
        (PSYS, [tree(trees.intel_laptop), tells(f"{PLATFORM}/energy_uj", 0)], counts(), "it stands at 0; the makers"),
        ("jtop", [total(0)], nothing, STILL),
        ("nvml:0", [gpu(5000)], nothing, STILL),
        ("nvml:0", [gpu(None, 0)], nothing, STILL),
    ],
)
def test_a_sensor_that_is_broken_is_named(checked, sensor, before, later, told):
    claims = checked(before, later)
    assert claims[sensor][0] == "failed"
    assert told in claims[sensor][1]
    assert {of for of, (state, _) in claims.items() if state == "failed"} == {sensor}  # and no other one
