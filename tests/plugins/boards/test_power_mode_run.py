"""Runs, profiles and plans in a power mode, by a program that stands in for `nvpmodel`; workers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.cli.conftest import bundle, cli, model
from tests.plugins.boards.fake_nvpmodel import NANO
from tests.support.guests import guests
from tests.support.log_lines import log_lines
from tests.support.waiting import until
from tvm_pipeline import Bundle, open_bundle, write_bundle
from tvm_pipeline.core.in_mode import in_mode
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.core.profile import read_profile
from tvm_pipeline.testing import example_backend, installed
from tvm_pipeline.workflow.machine_modes import this_machine
from tvm_pipeline_boards.mode_switch import BoardModes
from tvm_pipeline_video.commands.run import WORKING

__all__ = ["bundle", "cli", "model"]
MODES = PowerMode("MAXN", 0), PowerMode("5W", 1)


@pytest.fixture
def low(bundle: Path, tmp_path: Path) -> Path:
    """The bundle as if it had been profiled and planned in the mode 5W."""
    path = tmp_path / "low.tar"
    with open_bundle(bundle) as opened:
        platform = in_mode(replace(opened.platform, power_modes=MODES), "5W")
        plan, profile = replace(opened.plan, power_mode="5W"), replace(opened.profile, power_mode="5W")
        write_bundle(path, Bundle(opened.graph, platform, profile, plan, opened.compiled))
    return path


SOURCE = ("--source", "synthetic:64x48@30:5000", "--decoder", "none")


def test_a_run_takes_permission_to_set_its_mode(cli, low, nvpmodel, tmp_path):
    outcome = cli("run", low, *SOURCE, "--limit", 3)
    assert outcome.code == 2
    assert (
        f"{low} is for power mode 5W, and the machine is not in it: set it before (`sudo nvpmodel -m 1`)" in outcome.err
    )
    assert "--allow-power-modes" in outcome.err
    assert nvpmodel.asked == []
    outcome = cli("run", low, *SOURCE, "--limit", 3, "--allow-power-modes")
    assert outcome.code == 0, outcome.err
    assert "power mode 5W is set for this; `sudo nvpmodel -m 0` when it ends" in outcome.err
    assert nvpmodel.asked == [1, 0]


@pytest.mark.thorough
def test_a_worker_and_a_supervisor_that_are_killed_leave_no_mode(cli, low, nvpmodel, tmp_path):
    """The supervisor puts back what its worker had set; what both of them leave, the next start of a run puts back."""
    arguments = ["run", low, *SOURCE, "--supervise", "--allow-power-modes"]
    command = [sys.executable, "-c", WORKING, str(len(sys.path)), *sys.path, *map(str, arguments)]

    def worker() -> int:
        (child,) = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        return int(child)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as supervisor:
        assert until(lambda: nvpmodel.mode == 1)
        os.kill(worker(), signal.SIGKILL)
        assert until(lambda: nvpmodel.asked == [1, 0, 1])  # put back, and set again by the next worker
        second = worker()
        supervisor.send_signal(signal.SIGKILL)
        os.kill(second, signal.SIGKILL)
        assert supervisor.stderr
        said = supervisor.stderr.read()
    # The supervisor does it at once, and not the next worker when it starts.
    told = "was killed in power mode 5W; what was before is put back", "was killed by SIGKILL; it is started again"
    assert 0 < said.index(told[0]) < said.index(told[1])
    assert until(lambda: not Path(f"/proc/{second}").exists())
    assert nvpmodel.mode == 1
    outcome = cli("run", low, *SOURCE)  # which may not set modes, and puts this one back all the same
    assert (nvpmodel.mode, nvpmodel.asked) == (0, [1, 0, 1, 0])
    assert outcome.code == 2
    assert f"process {second} was killed in power mode 5W; what was before is put back" in outcome.err
    assert list(nvpmodel.state.iterdir()) == [nvpmodel.state / "power-mode.lock"]


def test_a_plan_of_another_mode_is_refused(cli, low, nvpmodel, tmp_path):
    """Where the mode of the bundle is set, no permission is asked for."""
    with open_bundle(low) as opened:
        (tmp_path / "plan.txt").write_text(str(replace(opened.plan, power_mode="MAXN")))
    (nvpmodel.folder / "mode").write_text("1\n")
    outcome = cli("run", low, *SOURCE, "--plan", tmp_path / "plan.txt")
    assert outcome.code == 1
    assert "plan.txt: the plan is for power mode MAXN, the profile is of 5W; give both of one mode" in outcome.err


@pytest.mark.thorough
def test_profiles_of_each_mode_become_a_bundle_of_one(cli, model, nvpmodel, tmp_path):
    """From the file of a platform to a plan over modes; a mode that takes a reboot is left out and said."""
    cores = sorted(os.sched_getaffinity(0))[:1]
    watts = [PowerMode("MAXN", 0, active_w={"cpu": 9.0}), PowerMode("5W", 1, active_w={"cpu": 1.0})]
    platform = Platform("board", (Device("cpu", cores=tuple(cores)),), power_modes=(*watts, PowerMode("7W", 3)))
    board = tmp_path / "board.toml"
    board.write_text(platform_toml(platform))
    (nvpmodel.folder / "reboot-3").touch()
    profiled = "profile", model, "--platform", board, "--power-modes", "--repeats", 2, "-o", tmp_path / "net.json"
    outcome = cli(*profiled)
    assert outcome.code == 2
    assert "this profile is for power mode 5W" in outcome.err
    assert nvpmodel.asked == []
    assert not (tmp_path / "net-MAXN.json").exists()  # whose mode is set, but the user will want all or none
    outcome = cli(*profiled, "--allow-power-modes", "--graph", tmp_path / "graph.json")
    assert outcome.code == 0, outcome.err
    assert (nvpmodel.mode, nvpmodel.asked) == (0, [1, 0, 3])
    assert "power mode 7W is left out: nvpmodel 3 takes effect only after a reboot" in outcome.err
    files = [tmp_path / "net-MAXN.json", tmp_path / "net-5W.json"]
    assert [read_profile(path).power_mode for path in files] == ["MAXN", "5W"]
    assert not (tmp_path / "net-7W.json").exists()

    both = [part for path in files for part in ("--profile", path)]
    outcome = cli("plan", tmp_path / "graph.json", "--platform", board, *both, "--objective", "energy", "--json")
    assert outcome.json["power_mode"] == "5W"  # of a ninth of the power
    assert {candidate["power_mode"] for candidate in outcome.json["candidates"]} == {"MAXN", "5W"}
    outcome = cli("compile", model, "-o", tmp_path / "net.tar", "--platform", board, *both, "--objective", "energy")
    assert outcome.code == 0, outcome.err
    with open_bundle(tmp_path / "net.tar") as opened:
        assert opened.plan.power_mode == opened.profile.power_mode == "5W"
        assert opened.platform.power_modes == (watts[1],)
        assert opened.platform.devices[0].active_w == 1.0
    shown = cli("show", tmp_path / "net.tar", "-o", tmp_path / "out")
    assert "power mode 5W has the best energy" in " ".join(shown.out.split())
    assert "the figures are of power mode 5W, and the machine is not in it" in shown.err
    refused = cli("compile", model, "-o", tmp_path / "x.tar", "--platform", board, *both, "--verify", 1)
    assert refused.code == 2
    assert "plans of several power modes are compared by their predictions" in refused.err


def test_the_modes_of_a_jetson_are_those_of_this_machine(tmp_path):
    """`devices -o` writes them; a file that cannot be read costs a warning."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nvpmodel.conf").write_text(NANO)
    said = log_lines("WARNING")
    with installed(example_backend()), guests(power_modes=partial(BoardModes, tmp_path)):
        machine = this_machine(None)
        (tmp_path / "board.toml").write_text(platform_toml(machine))
        assert machine.power_modes == (PowerMode("MAXN", 0), PowerMode("5W", 1, offline_cores=(2, 3)))
        assert read_platform(tmp_path / "board.toml") == machine
        assert said == []
        (tmp_path / "etc/nvpmodel.conf").write_text(NANO.replace("918000", "fast"))
        assert this_machine(None).power_modes == ()
    assert "power modes are left out: " in said[0]
    assert "'fast' is no number" in said[0]
