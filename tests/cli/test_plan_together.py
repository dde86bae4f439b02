"""`tvm-pipeline plan a.json b.json`: several models that run at one rate, planned and simulated as one graph."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tvm_pipeline import Device, Platform, read_graph
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.testing import example_graph
from tvm_pipeline.workflow.merged import as_one
from tvm_pipeline.workflow.steps import PlanningInput

PLATFORM = 'name = "box"\n[[device]]\nname = "a"\ncache_bytes = 100\n[[device]]\nname = "b"\ncache_bytes = 100\n'
SECONDS = {"left": {"a": [0.010, 0.020], "b": [0.030, 0.025]}, "right": {"a": [0.002, 0.001], "b": [0.002, 0.001]}}


def write_model(folder, name: str, file: str = "") -> None:
    nodes = [{"name": each, "output_bytes": 1, "param_bytes": 8} for each in ("first", "second")]
    (folder / f"{file or name}.json").write_text(json.dumps({"name": name, "nodes": nodes, "edges": [[0, 1]]}))
    graph = read_graph(folder / f"{file or name}.json")
    devices = {d: {"seconds": dict(zip(("first", "second"), s, strict=True))} for d, s in SECONDS[name].items()}
    profile = {"graph": name, "fingerprint": graph.fingerprint, "devices": devices}
    (folder / f"{file or name}.profile.json").write_text(json.dumps(profile))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.toml").write_text(PLATFORM)
    write_model(tmp_path, "left")
    write_model(tmp_path, "right")
    return tmp_path


MODELS = ("left.json", "right.json", "--platform", "box.toml")
PROFILES = ("--profile", "left.profile.json", "--profile", "right.profile.json")


def test_a_plan_of_two_models_is_written_simulated_and_names_both(cli, folder):
    outcome = cli("plan", *MODELS, *PROFILES, "--stages", 2, "-o", "plan.txt", "--json")
    assert outcome.code == 0, outcome.err
    # left/first and both of right take 13 ms on a, left/second 25 ms on b; all of left would take 30 ms on a.
    assert outcome.json["predicted"]["throughput_fps"] == pytest.approx(1 / 0.025)
    assert outcome.json["graph"] == "left + right"
    placed = {name for stage in outcome.json["stages"] for name in stage["operators"]}
    assert placed == {"source", "sink", *(f"{m}/{o}" for m in ("left", "right") for o in ("first", "second"))}
    simulated = cli("simulate", *MODELS, *PROFILES, "--plan", "plan.txt", "--json")
    assert simulated.code == 0, simulated.err
    assert simulated.json["simulated"]["throughput_fps"] == pytest.approx(1 / 0.025)


def test_bytes_need_no_profiles(cli, folder):
    outcome = cli("plan", *MODELS, "--stages", 2, "--objective", "memory,dram,communication")
    assert outcome.code == 0, outcome.err
    assert "no bundle runs several" in " ".join(outcome.out.split())
    assert "`deploy`" in outcome.out


def test_one_plan_of_one_of_the_models_is_refused_with_the_way_out(cli, folder):
    cli("plan", *MODELS, *PROFILES, "-o", "plan.txt")
    alone = cli(
        "simulate", "left.json", "--platform", "box.toml", "--profile", "left.profile.json", "--plan", "plan.txt"
    )
    assert alone.code == 1
    assert "the plan is of 2 models, left and right" in alone.err
    assert "`deploy`" in alone.err


def test_a_bundle_with_a_plan_of_several_says_what_runs_it(cli, bundle, tmp_path):
    from tvm_pipeline import open_bundle

    with open_bundle(bundle) as opened:
        name = opened.graph.name
    text = f"plan {name} + other by hand\nobjective latency\nstatus feasible\npredicted\nstage a\n  source\n"
    (tmp_path / "plan.txt").write_text(text)
    shown = cli("show", bundle, "--plan", tmp_path / "plan.txt", "-o", tmp_path / "out")
    assert shown.code == 1
    assert f"the plan is of 2 models, {name} and other" in shown.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((*MODELS, *PROFILES[:2]), 2, "--profile was given 1 times for 2 models"),
        ((*MODELS, *PROFILES[2:], *PROFILES[:2]), 1, "this profile was measured on right"),
        ((*MODELS, "--input-shapes", "x:[1]"), 2, "--input-shapes goes with one model"),
        ((*MODELS, "--input-values", "x=1"), 2, "--input-values goes with one model"),
        ((*MODELS, *PROFILES, "--verify", 3), 2, "no bundle runs several"),
        (("left.json", "left.json", "--platform", "box.toml"), 1, "left.json and left.json are both called left"),
        (("left.json", *MODELS), 1, "are both called left"),
    ],
)
def test_what_cannot_be_merged_is_refused(cli, folder, arguments, code, message):
    outcome = cli("plan", *arguments)
    assert (outcome.code, message in outcome.err) == (code, True), outcome.err


def test_bundles_of_different_platforms_are_refused():
    parts = []
    for name in ("left", "right"):
        graph = replace(example_graph(), name=name)
        parts.append(PlanningInput(graph, Platform(f"box of {name}", (Device("d0"),)), unmeasured(graph)))
    with pytest.raises(PlatformError, match=r"on platform box of left and .* on box of right"):
        as_one(("a.tar", "b.tar"), parts)
    assert len(as_one(("a.tar", "b.tar"), [parts[0], replace(parts[1], platform=parts[0].platform)]).graph) == 6


def test_which_plan_of_which_models_is_asked(cli, folder):
    outcome = cli("simulate", *MODELS, *PROFILES)
    assert outcome.code == 2
    assert "`tvm-pipeline plan left.json right.json -o plan.txt` makes one" in outcome.err
    twice = cli("simulate", "left.json", *PROFILES, "--platform", "box.toml", "--plan", "plan.txt")
    assert (twice.code, "2 times for one model" in twice.err) == (2, True)
