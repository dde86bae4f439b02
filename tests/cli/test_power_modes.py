"""Profiles and plans over the power modes that a platform states, on a machine whose modes a package sets."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec

from tests.support.guests import TwoModes, guests
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.core.profile import read_profile
from tvm_pipeline.profiling import settling
from tvm_pipeline.testing import example_graph, example_problem

MODES = PowerMode("MAXN", 0), PowerMode("5W", 1)


def test_each_mode_is_set_and_put_back(cli, model, tmp_path, monkeypatch):
    """The package keeps what it set; without a package no mode is known, and none can be set."""
    monkeypatch.setattr(settling, "LONGEST_S", 0.3)
    machine, file = TwoModes(), tmp_path / "box.toml"
    cores = tuple(sorted(os.sched_getaffinity(0))[:1])
    file.write_text(platform_toml(Platform("box", (Device("cpu", cores=cores),), power_modes=tuple(machine.modes()))))
    here = "profile", model, "--power-modes", "--repeats", 2, "-o", tmp_path / "net.json"
    with guests(power_modes=lambda: machine):
        refused = cli(*here, "--platform", file)
        assert refused.code == 2
        assert "this profile is for power mode slow" in refused.err
        assert machine.were_set == []
        outcome = cli(*here, "--platform", file, "--allow-power-modes")
    assert outcome.code == 0, outcome.err
    assert machine.were_set == ["slow", "fast"]
    profiles = [read_profile(tmp_path / f"net-{name}.json") for name in ("fast", "slow")]
    assert [profile.power_mode for profile in profiles] == ["fast", "slow"]
    assert ["the clocks follow the load" in profile.warnings for profile in profiles] == [False, True]
    assert [profile.environment["power mode"] for profile in profiles] == ["fast", "slow"]
    with guests():
        assert "has none; give a --platform with [[power_mode]] tables" in cli(*here).err
        outcome = cli(*here, "--platform", file, "--allow-power-modes")
    assert outcome.code == 1
    assert "power mode slow cannot be set: no installed package sets modes of this machine" in outcome.err


def test_plans_over_modes_need_no_model(cli, tmp_path):
    """An operator graph, and the profiles of two modes: the text of the plan names its mode, and parses."""
    problem = example_problem()
    (tmp_path / "graph.json").write_bytes(msgspec.json.encode(example_graph()))
    (tmp_path / "box.toml").write_text(platform_toml(replace(problem.platform, power_modes=MODES)))
    files = []
    for mode in MODES:
        files.append(tmp_path / f"{mode.name}.json")
        files[-1].write_bytes(msgspec.json.encode(replace(problem.profile, power_mode=mode.name)))
    arguments = ["plan", tmp_path / "graph.json", "--platform", tmp_path / "box.toml"]
    both = [part for path in files for part in ("--profile", path)]
    outcome = cli(*arguments, *both, "-o", tmp_path / "plan.txt")
    assert outcome.code == 0, outcome.err
    chosen = Plan.parse((tmp_path / "plan.txt").read_text())
    assert chosen.power_mode == "MAXN"  # of equal ones that which is named first
    assert "+0.0% against two-stage (d0 | d1) in 5W" in " ".join(outcome.out.split())
    for wrong, said in (
        ([*both, "--pareto"], "--pareto lists the plans of one power mode"),
        ([*both, "--scheduler", "measured"], "measures stages, in one power mode alone"),
        ([*both, "--verify", "3"], "compared by their predictions"),
        ([*both[:2], *both[:2]], "two are of power mode MAXN"),
    ):
        outcome = cli(*arguments, *wrong)
        assert (outcome.code, said in outcome.err) == (2, True), outcome.err
    (tmp_path / "box.toml").write_text(platform_toml(problem.platform))
    outcome = cli(*arguments, *both)
    assert "platform box has no power mode MAXN (it has none); give it as a [[power_mode]]" in outcome.err
    assert read_platform(tmp_path / "box.toml").power_modes == ()
