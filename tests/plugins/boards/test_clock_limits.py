"""Clock limits, on a tree as the kernel's documents have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_pipeline.errors import PowerError
from tvm_pipeline_boards.clock_limits import limit_file, read_limit, write_limit


def test_limits_are_read_and_written(root: Path) -> None:
    write_limit("cpu4", 1113600, root)
    write_limit("gpu", 420750000, root)
    write_limit("15340000.vic", 115200000, root)
    assert [read_limit(clock, root) for clock in ("cpu0", "cpu4", "gpu", "15340000.vic")] == [
        *(1510400, 1113600, 420750000, 115200000)
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("17000000.gp10b", "17000000.gv11b", "17000000.ga10b", "17000000.gpu", "57000000.gpu", "fb000000.gpu"),
        "gpu-gpc-0",
    ],
)
def test_the_gpu_of_each_generation(tmp_path: Path, name: str) -> None:
    """TX2, Xavier, Orin with L4T 35 and 36, Nano, a board with a Mali, Thor."""
    for device in (name, "dmc", "13e00000.host1x"):
        (tmp_path / "sys/class/devfreq" / device).mkdir(parents=True)
        (tmp_path / "sys/class/devfreq" / device / "max_freq").touch()
    assert limit_file("gpu", tmp_path).parent.name == name


def test_what_is_missing_is_named(root: Path) -> None:
    with pytest.raises(PowerError, match=r"clock cpu2 has no limit here: .*cpu2/cpufreq/scaling_max_freq is missing"):
        read_limit("cpu2", root)
    with pytest.raises(PowerError, match=r"clock npu: there is none of that name\. .*: 15340000\.vic, 17000000\.gpu"):
        write_limit("npu", 1, root)
    (root / "sys/class/devfreq/18000000.gpu").mkdir()
    (root / "sys/class/devfreq/18000000.gpu/max_freq").touch()
    with pytest.raises(PowerError, match="several could be it"):
        read_limit("gpu", root)


@pytest.mark.parametrize("clock", ["../vic", "cpu0/../../x", "", ".", "..", "a b", "cpu\n0"])
def test_a_clock_is_no_path(root: Path, clock: str) -> None:
    (root / "sys/class/vic").mkdir()
    (root / "sys/class/vic/max_freq").write_text("1\n")
    with pytest.raises(PowerError):
        write_limit(clock, 5, root)
    assert (root / "sys/class/vic/max_freq").read_text() == "1\n"


def test_a_limit_that_the_kernel_does_not_take(root: Path) -> None:
    """A full device stands in for a refusal, and one that keeps nothing for a limit that is ignored."""
    path = root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq"
    for stand_in, said in (("/dev/full", r"was not limited to 5: .*729600 1113600"), ("/dev/null", "cannot be read")):
        path.unlink()
        path.symlink_to(stand_in)
        with pytest.raises(PowerError, match=f"clock cpu0.*{said}"):
            write_limit("cpu0", 5, root)
