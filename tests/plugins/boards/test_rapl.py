"""Counters of Intel's and AMD's processors: units, sums of sockets, a new beginning, and who may read them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.plugins.boards import power_trees as trees
from tests.plugins.boards.surveys import surveyed
from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import Sensor, chosen_sensor
from tvm_pipeline_boards.rapl import rapl_sensors


def drawn_j(sensor: Sensor, steps_uj: dict[Path, int]) -> float:
    """Return the joules between two reads, between which counters go on."""
    before = sensor.read()[-1].energy_j
    for file, step in steps_uj.items():
        file.write_text(f"{int(file.read_text()) + step}\n")
    return sensor.read()[-1].energy_j - before


def counter(root: Path, zone: str) -> Path:
    return root / "sys/class/powercap" / zone / "energy_uj"


def test_a_laptop_of_intel(tmp_path: Path) -> None:
    """The platform is the board; a package behind a second door is no second one, and its parts are parts."""
    trees.intel_laptop(tmp_path)
    found = rapl_sensors(tmp_path)
    assert found.obstacles == {}
    assert {sensor.name: sensor.scope for sensor in found.sensors} == {
        "rapl:package-0": "unit",
        "rapl:package-0/core": "part",
        "rapl:package-0/uncore": "part",
        "rapl:psys": "board",
    }
    best = chosen_sensor(surveyed(tmp_path))
    assert best is not None
    assert best.name == "rapl:psys"
    assert drawn_j(best, {counter(tmp_path, "intel-rapl:1"): 2_500_000}) == pytest.approx(2.5)
    core = chosen_sensor(surveyed(tmp_path), "rapl:package-0/core")
    assert core is not None
    assert core.covers == "CPU cores of package 0"
    assert drawn_j(core, {counter(tmp_path, "intel-rapl:0:0"): 125_000}) == pytest.approx(0.125)


def test_a_platform_without_a_wire_is_not_taken(tmp_path: Path) -> None:
    trees.intel_laptop(tmp_path)
    counter(tmp_path, "intel-rapl:1").write_text("0")
    assert "did not wire its counter" in surveyed(tmp_path).obstacles["rapl:psys"]
    best = chosen_sensor(surveyed(tmp_path))
    assert best is not None
    assert best.name == "rapl:package-0"


def test_two_sockets_and_their_memory_are_summed(tmp_path: Path) -> None:
    trees.intel_server(tmp_path)
    best = chosen_sensor(surveyed(tmp_path))
    assert best is not None
    names = ["package-0", "package-0/dram", "package-1", "package-1/dram"]
    assert best.name == " + ".join(f"rapl:{name}" for name in names)
    assert best.covers == "CPU package 0 and memory of CPU package 0 and CPU package 1 and memory of CPU package 1"
    steps = {"intel-rapl:0": 30_000_000, "intel-rapl:0:0": 4_000_000, "intel-rapl:1": 20_000_000, "intel-rapl:1:0": 1}
    assert drawn_j(best, {counter(tmp_path, zone): step for zone, step in steps.items()}) == pytest.approx(54.000001)


def test_a_counter_begins_anew(tmp_path: Path) -> None:
    """AMD's counter begins anew every 11 minutes at 100 W."""
    trees.amd_desktop(tmp_path)
    file = counter(tmp_path, "intel-rapl:0")
    file.write_text(f"{trees.AMD_RANGE_UJ - 1_000_000}")
    best = chosen_sensor(surveyed(tmp_path))
    assert best is not None
    assert (best.name, best.covers) == ("rapl:package-0", "CPU package 0")
    assert drawn_j(best, {file: 3_000_000 - trees.AMD_RANGE_UJ}) == pytest.approx(3)
    assert drawn_j(best, {file: 500_000}) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("energy_uj", "", "'' is no figure"),
        ("energy_uj", "-1", "-1 is negative"),
        ("energy_uj", "99999999999999", "more than .*max_energy_range_uj"),
        ("max_energy_range_uj", None, "max_energy_range_uj: No such file"),
    ],
)
def test_nonsense_is_refused_with_its_file(file: str, content: str | None, said: str, tmp_path: Path) -> None:
    trees.amd_desktop(tmp_path)
    path = counter(tmp_path, "intel-rapl:0").with_name(file)
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(PowerError, match=rf"rapl:package-0 cannot be read: .*intel-rapl:0/energy_uj: {said}|{said}"):
        chosen_sensor(surveyed(tmp_path), "rapl:package-0")


def test_the_zone_without_a_name_does_not_hide_the_others(tmp_path: Path) -> None:
    trees.intel_server(tmp_path)
    counter(tmp_path, "intel-rapl:1:0").with_name("name").unlink()
    found = rapl_sensors(tmp_path)
    assert list(found.obstacles) == ["rapl:intel-rapl:1:0"]
    assert len(found.sensors) == 3


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Provide a folder that every user may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_plain_user() -> Iterator[None]:
    """Give up root for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_user_is_told_how_to_read_a_counter_of_root(open_folder: Path) -> None:
    """Since Linux 5.10 the counters are readable for root alone."""
    trees.amd_desktop(open_folder)
    counter(open_folder, "intel-rapl:0").chmod(0o400 if os.geteuid() == 0 else 0)
    with as_plain_user():
        found = surveyed(open_folder)
    file = counter(open_folder, "intel-rapl:0")
    assert found.obstacles == {
        "rapl:package-0": f"{file}: only root may read it; allow it until the next boot with `sudo chmod a+r {file}`, "
        "or run as root"
    }
    assert [sensor.name for sensor in found.sensors] == ["rapl:package-0/core"]
