"""Power modes in a platform file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.errors import PlatformError

BOARD = """
name = "nano"
[[device]]
name = "cpu"
cores = [0, 1, 2, 3]
[[power_mode]]
name = "5W"
nvpmodel = 1
offline_cores = [2, 3]
idle_w = 1.1
active_w = { cpu = 1.4, gpu = 2.2 }
[[power_mode]]
name = "slow"
clock_limits = { cpu0 = 1113600, "17000000.gpu" = 420750000 }
"""
MODES = (
    PowerMode("5W", 1, {}, (2, 3), 1.1, {"cpu": 1.4, "gpu": 2.2}),
    PowerMode("slow", None, {"cpu0": 1113600, "17000000.gpu": 420750000}),
)


def test_a_file_says_the_modes_and_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "nano.toml").write_text(BOARD)
    platform = read_platform(tmp_path / "nano.toml")
    assert platform == Platform("nano", (Device("cpu", cores=(0, 1, 2, 3)),), power_modes=MODES)
    (tmp_path / "again.toml").write_text(platform_toml(platform))
    assert read_platform(tmp_path / "again.toml") == platform


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('name = "a b"\nnvpmodel = 1', "a power mode is called 'a b'"),
        ('name = "../a"\nnvpmodel = 1', "a power mode is called '../a'"),
        ('name = "a"', "power mode a sets nothing"),
        ('name = "a"\nnvpmodel = -1', "power mode a: nvpmodel is -1"),
        ('name = "a"\nnvpmodel = 1\nidle_w = -1', "power mode a: idle_w is -1"),
        ('name = "a"\nnvpmodel = 1\nidle_w = nan', "power mode a: idle_w is nan"),
        ('name = "a"\nnvpmodel = 1\nactive_w = { cpu = 0 }', "power mode a: active_w of device cpu is 0"),
        ('name = "a"\nnvpmodel = 1\noffline_cores = [1, 1]', "power mode a: offline_cores [1, 1]"),
        ('name = "a"\nclock_limits = { "../x" = 1 }', "'../x' is no clock"),
        ('name = "a"\nclock_limits = { cpu0 = 0 }', "the limit of cpu0 is 0"),
        ('name = "a"\nnvpmodl = 1', "power_mode a: there is no key nvpmodl; did you mean nvpmodel?"),
        ('name = "5W"\nnvpmodel = 2', "two power modes are called 5W"),
    ],
)
def test_a_mistake_is_said_with_its_file(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "nano.toml").write_text(f"{BOARD}[[power_mode]]\n{line}\n")
    with pytest.raises(PlatformError, match=r"nano\.toml") as error:
        read_platform(tmp_path / "nano.toml")
    assert said in str(error.value)
