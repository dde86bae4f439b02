"""A profile keeps the board and its power mode, and is doubted on another one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.support.board_trees import TREES, release, write
from tests.support.guests import guests
from tvm_pipeline import Profile, profile_model
from tvm_pipeline.testing import example_backend, example_model, example_problem
from tvm_pipeline.testing.installed import installed
from tvm_pipeline.workflow.doubts import elsewhere_warnings
from tvm_pipeline_boards.mode_switch import BoardModes

ORIN, TX2 = "Orin Nano Super, JetPack 6", "TX2, JetPack 4"


def profiled(root: Path) -> Profile:
    with guests(power_modes=partial(BoardModes, root)):
        return profile_model(example_backend(), example_model(), example_problem().platform, repeats=4)


def elsewhere(profile: Profile, root: Path) -> list[str]:
    with installed(example_backend()), guests(power_modes=partial(BoardModes, root)):
        return elsewhere_warnings(Path("net.json"), profile, example_problem().platform)


def test_a_profile_of_another_power_mode_or_module_is_doubted(tmp_path: Path) -> None:
    root = TREES[ORIN].write(tmp_path / "orin")
    profile = profiled(root)
    assert profile.environment["power mode"] == "2 (MAXN_SUPER)"
    write(root, "etc/nv_tegra_release", release(36, "4.7", "generic"))
    assert elsewhere(profile, root) == []  # another release of the same JetPack is no other board
    write(root, "var/lib/nvpmodel/status", "pmode:0000")
    [line] = elsewhere(profile, root)
    assert line.startswith(
        "the profile of net.json was measured on power mode 2 (MAXN_SUPER), and here is power mode 0 (15W): predictions"
    )
    # One that was profiled for a mode of the platform is of that mode, whichever is set while it is read.
    assert elsewhere(replace(profile, power_mode="MAXN_SUPER"), root) == []
    [line] = elsewhere(profile, TREES[TX2].write(tmp_path / "tx2"))
    assert "measured on NVIDIA Jetson Orin Nano 8GB (p3767-0005, Super), power mode 2 (MAXN_SUPER), and here is" in line
    assert "and here is NVIDIA Jetson TX2 (p3310-1000), power mode 3 (MAXP_CORE_ARM)" in line
    [line] = elsewhere(profile, tmp_path / "no-jetson")
    assert "(p3767-0005, Super), and here is another board:" in line


def test_a_profile_of_no_jetson_is_not_doubted_for_that(tmp_path: Path) -> None:
    profile = profiled(tmp_path / "no-jetson")
    assert "board" not in profile.environment
    assert elsewhere(profile, tmp_path / "no-jetson") == []
    assert elsewhere(replace(profile, environment={}), TREES[TX2].write(tmp_path / "tx2")) == []
