"""Modes of nvpmodel: the files of four generations as public copies document them, and a program that stands in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.boards.fake_nvpmodel import NANO, ORIN, TX2, XAVIER, FakeNvpmodel
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.errors import PowerError
from tvm_pipeline_boards.nvpmodel import current_nvpmodel, nvpmodel_modes, set_nvpmodel


def tree(folder: Path, text: str) -> Path:
    (folder / "etc").mkdir(exist_ok=True)
    (folder / "etc/nvpmodel.conf").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        (
            TX2,
            {
                (0, "MAXN"): ((), {}),
                (1, "MAXQ"): ((1, 2), {"CPU_A57": 1200000, "GPU": 850000000, "EMC": 1331200000}),
                (2, "MAXP_CORE_ALL"): (
                    (),
                    {"CPU_A57": 1400000, "CPU_DENVER": 1400000, "GPU": 1120000000, "EMC": 1600000000},
                ),
            },
        ),
        (NANO, {(0, "MAXN"): ((), {}), (1, "5W"): ((2, 3), {"CPU_A57": 918000, "GPU": 640000000, "EMC": 1600000000})}),
        (
            XAVIER,
            {
                (0, "MAXN"): ((), {}),
                (8, "MODE_MLPERF_V1_MAXQ"): (
                    (2, 3, 4, 5, 6, 7),
                    {"CPU_DENVER_0": 1190400, "GPU": 520000000, "EMC": 1065600000, "DLA_CORE": 550000000},
                ),
            },
        ),
        (
            ORIN,
            {
                (0, "15W"): (
                    (),
                    {"CPU_A78_0": 1510400, "CPU_A78_4": 1510400, "GPU": 612000000, "EMC": 2133000000},
                ),
                (2, "MAXN_SUPER"): ((), {}),
                (3, "7W"): ((4, 5), {"CPU_A78_0": 960000, "GPU": 408000000, "EMC": 2133000000}),
            },
        ),
    ],
    ids=["TX2", "Nano", "Xavier", "Orin"],
)
def test_the_files_of_four_generations(tmp_path: Path, text: str, modes: dict) -> None:
    found = nvpmodel_modes(tree(tmp_path, text))
    assert {(mode.number, mode.name): (mode.offline_cores, dict(mode.clocks)) for mode in found} == modes


def test_a_mode_becomes_one_of_the_platform_and_a_line(tmp_path: Path) -> None:
    low = nvpmodel_modes(tree(tmp_path, NANO))[1]
    assert low.power_mode == PowerMode("5W", 1, offline_cores=(2, 3))
    assert str(low) == (
        "power mode 5W (nvpmodel 1): cores 2, 3 off, CPU_A57 up to 918 MHz, GPU up to 640 MHz, EMC up to 1600 MHz"
    )


def test_the_core_is_that_of_the_path(tmp_path: Path) -> None:
    """CORE_1 is only a name; what is written is the file of a core."""
    text = "< PARAM TYPE=FILE NAME=CPU_ONLINE >\nCORE_1 /sys/devices/system/cpu/cpu7/online\n"
    text += "< POWER_MODEL ID=0 NAME=A >\nCPU_ONLINE CORE_1 0\nCPU_ONLINE CORE_2 0\n"
    assert nvpmodel_modes(tree(tmp_path, text))[0].offline_cores == (2, 7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("< POWER_MODEL ID=x NAME=A >", "a POWER_MODEL has ID 'x' and NAME 'A'"),
        ("< POWER_MODEL ID=1 >", "NAME ''"),
        ("\n< POWER_MODEL ID=1 NAME=A >\nGPU MAX_FREQ fast", "line 3: 'fast' is no number"),
        ("< POWER_MODEL ID=1 NAME=A >\nCPU_ONLINE CORE_X 0", "line 2: 'X' is no number"),
        ("< POWER_MODEL ID=1 NAME=A >\n< POWER_MODEL ID=1 NAME=B >", "two power modes have one number or name"),
        ("< POWER_MODEL ID=1 NAME=A/B >\n< POWER_MODEL ID=2 NAME=A?B >", "two power modes have one number or name"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PowerError, match=r"nvpmodel\.conf") as error:
        nvpmodel_modes(tree(tmp_path, text))
    assert said in str(error.value)


def test_what_is_no_mode_is_no_mode(tmp_path: Path) -> None:
    """Another machine has no file; edited files have sections that we do not know, and lines outside of modes."""
    assert nvpmodel_modes(tmp_path) == ()
    text = "GPU MAX_FREQ 5\n< POWER_MODEL ID=4 NAME=A >\nGPU MAX_FREQ 7\n< /POWER_MODEL >\nGPU MAX_FREQ 9\n"
    (mode,) = nvpmodel_modes(tree(tmp_path, text))
    assert mode.clocks == {"GPU": 7}


def test_the_mode_that_is_set(tmp_path: Path, nvpmodel: FakeNvpmodel) -> None:
    (nvpmodel.folder / "mode").write_text("12\n")
    assert current_nvpmodel(tmp_path) == 12


@pytest.mark.parametrize(("status", "number"), [("pmode:0008\n", 8), ("pmode:0002 fmode:quiet", 2), ("none", None)])
def test_the_mode_of_the_status_file(tmp_path: Path, status: str, number: int | None) -> None:
    assert current_nvpmodel(tmp_path) is None
    (tmp_path / "var/lib/nvpmodel").mkdir(parents=True)
    (tmp_path / "var/lib/nvpmodel/status").write_text(status)
    assert current_nvpmodel(tmp_path) == number


def test_a_mode_that_takes_a_reboot_is_refused(tmp_path: Path, nvpmodel: FakeNvpmodel) -> None:
    set_nvpmodel(2, tmp_path)
    (nvpmodel.folder / "reboot-3").touch()
    with pytest.raises(PowerError, match="takes effect only after a reboot, which was refused; mode 2 stays"):
        set_nvpmodel(3, tmp_path)
    assert (nvpmodel.folder / "answer").read_text() == "no\n"
    assert nvpmodel.mode == 2


def test_a_mode_that_is_not_set_is_an_error(tmp_path: Path, nvpmodel: FakeNvpmodel) -> None:
    (nvpmodel.folder / "broken").touch()
    with pytest.raises(PowerError, match="nvpmodel 1 was not set, mode 0 is: NVPM ERROR: Error opening"):
        set_nvpmodel(1, tmp_path)


def test_without_the_program(tmp_path: Path) -> None:
    with pytest.raises(PowerError, match="there is no program nvpmodel"):
        set_nvpmodel(1, tmp_path)
