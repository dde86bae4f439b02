"""Intel's and AMD's counters of energy, RAPL, as the kernel shows them in `/sys/class/powercap`.

Each zone is a folder with `name`, `energy_uj` (microjoules, which begin anew at 0) and `max_energy_range_uj`. A zone
`intel-rapl:0` is a CPU package or `psys`, the platform; its zones `intel-rapl:0:1` are parts of it, but for `dram`,
the memory beside it. AMD's zones are called intel-rapl, too, and are packages and cores. `intel-rapl-mmio:0` is a
second door to the same counter, which is not taken. Since Linux 5.10 only root may read the counters.

Sources: Documentation/power/powercap/powercap.rst and drivers/powercap/intel_rapl_common.c of Linux.
"""

from __future__ import annotations

from pathlib import Path

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import EnergyCounter, Scope, Survey
from tvm_pipeline_boards.figure_files import number_of, text_of

PERIOD_S = 0.001  # the processors write their counters about once in a millisecond
J_OF_UJ = 1e-6


class RaplCounter(EnergyCounter):
    """The counter of one zone, a folder with `energy_uj`.

    Raises:
        PowerError: it cannot be read; the message names the file and what would help.
    """

    period_s = PERIOD_S

    def __init__(self, zone: Path, name: str, covers: str, scope: Scope) -> None:
        super().__init__()
        self.name, self.covers, self.scope = name, covers, scope
        self._file = zone / "energy_uj"
        self.range_j = number_of(zone / "max_energy_range_uj") * J_OF_UJ
        if self.counter_j() > self.range_j:
            raise PowerError(f"{self._file}: more than {zone}/max_energy_range_uj, where it begins anew")

    def counter_j(self) -> float:
        """Return the counter, in joules."""
        return number_of(self._file) * J_OF_UJ


def rapl_sensors(root: Path) -> Survey:
    """Return the counters of the zones in `root/sys/class/powercap`."""
    found = Survey([], {})
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        try:
            name = f"rapl:{_called(zone)}"
        except PowerError as error:
            found.obstacles[f"rapl:{zone.name}"] = str(error)
            continue
        if any(sensor.name == name for sensor in found.sensors) or name in found.obstacles:
            name += f"@{zone.name}"
        try:
            counter = RaplCounter(zone, name, *_meaning(zone))
            if counter.scope == "board" and counter.counter_j() == 0:
                raise PowerError(f"{zone}/energy_uj: it stands at 0; the makers of this board did not wire its counter")
        except PowerError as error:
            found.obstacles[name] = str(error)
        else:
            found.sensors.append(counter)
    return found


def _package(zone: Path) -> Path | None:
    """Return the zone that this one stands in, None for a package or the platform."""
    control, *numbers = zone.name.split(":")
    return zone.with_name(":".join([control, *numbers[:-1]])) if len(numbers) > 1 else None


def _called(zone: Path) -> str:
    package = _package(zone)
    return f"{text_of(package / 'name')}/{text_of(zone / 'name')}" if package else text_of(zone / "name")


def _meaning(zone: Path) -> tuple[str, Scope]:
    """Return what a zone covers, in words, and its scope."""
    package, name = _package(zone), text_of(zone / "name")
    if package is None:
        if name == "psys":
            return "the board, as far as its makers wired it to the counter", "board"
        return f"CPU {name.replace('-', ' ')}", "unit"
    of = text_of(package / "name").replace("-", " ")
    if name == "dram":
        return f"memory of CPU {of}", "unit"
    words = {"core": "CPU cores", "uncore": "graphics and what else is no core"}
    return f"{words.get(name, name)} of {of}", "part"
