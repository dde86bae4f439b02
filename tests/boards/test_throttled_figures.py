"""What the board and its heat change elsewhere: profiles, their use on another board, and what is watched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.boards.trees import TREES, release, write
from tvm_pipeline import Profile, profile_model
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.testing import example_backend, example_bundle, example_model, example_problem
from tvm_pipeline.testing.installed import installed
from tvm_pipeline.workflow.doubts import elsewhere_warnings

ORIN, TX2 = "Orin Nano Super, JetPack 6", "TX2, JetPack 4"


def profiled(root: Path) -> Profile:
    return profile_model(example_backend(), example_model(), example_problem().platform, repeats=4, root=root)


def elsewhere(profile: Profile, root: Path) -> list[str]:
    with installed(example_backend()):
        return elsewhere_warnings(Path("net.json"), profile, example_problem().platform, root)


def test_a_profile_that_was_measured_while_throttled_says_so(tmp_path: Path) -> None:
    root = TREES[ORIN].write(tmp_path / "root")
    assert not [line for line in profiled(root).warnings if "throttled" in line]
    write(root, "sys/class/thermal/cooling_device1/cur_state", "1\n")
    [warning] = [line for line in profiled(root).warnings if "throttled" in line]
    assert warning.startswith(
        "the machine was throttled while net was measured (gpu-throttle-alert is at step 1; tj-thermal has 52.0 °C, "
    )
    assert warning.endswith("profile again")


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


def test_throttling_is_an_event() -> None:
    bundle, problem = example_bundle(), example_problem()
    with LivePipeline(bundle.compiled, problem, bundle.plan) as live:
        live.note("throttled", "it is hot")
        assert (live.events[-1].kind, live.events[-1].reason, live.events[-1].frame) == ("throttled", "it is hot", -1)
