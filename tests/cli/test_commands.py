"""The command line as a user meets it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from PIL import Image

import tvm_pipeline.cli
from tvm_pipeline import Plan, read_graph, read_platform, read_profile
from tvm_pipeline.cli import app
from tvm_pipeline.runtime import verification

GROUP = typer.main.get_group(app)
SIMULATED = ("latency_p50_s", "latency_p90_s", "latency_p99_s")
COMMANDS = sorted(entry.name for entry in GROUP.entries if find_spec(entry.module.partition(".")[0]))


def test_every_file_of_a_command_is_one():
    """A command of the engine is named by its file; the others are what commands share."""
    files = {path.stem.replace("_", "-") for path in Path(tvm_pipeline.cli.__file__).parent.glob("*.py")}
    own = {entry.name for entry in GROUP.entries if entry.module.startswith("tvm_pipeline.cli.")}
    assert own == files - {"--init--", "--main--", "commands", "options", "output", "screen"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_in_its_help(cli, command):
    outcome = cli(command, "--help")
    assert outcome.code == 0
    assert "Example: tvm-pipeline" in outcome.out


def test_help_lists_every_command(cli):
    out = cli("--help").out
    assert all(command in out for command in COMMANDS)


def test_devices_writes_a_platform_file_that_reads_back(cli, tmp_path):
    outcome = cli("devices", "--json", "-o", tmp_path / "here.toml")
    written = read_platform(tmp_path / "here.toml")
    assert [device["name"] for device in outcome.json["devices"]] == [device.name for device in written.devices]
    assert cli("devices", "--platform", tmp_path / "here.toml").code == 0


def test_profile_writes_what_plan_reads(cli, model, tmp_path):
    profile, graph = tmp_path / "profile.json", tmp_path / "graph.json"
    assert cli("profile", model, "-o", profile, "--graph", graph, "--repeats", 4).code == 0
    read_profile(profile).check_graph(read_graph(graph))
    planned = cli("plan", graph, "--profile", profile, "--json").json
    operators = [name for stage in planned["stages"] for name in stage["operators"]]
    assert operators == read_graph(graph).operator_names


def test_plan_gives_one_json_object(cli, bundle, tmp_path):
    outcome = cli("plan", bundle, "--verify", 0, "--json", "-o", tmp_path / "plan.txt")
    planned = outcome.json
    assert outcome.out.count("\n") == 1
    assert planned["status"] == "optimal"
    assert planned["objectives"]["throughput"] == pytest.approx(planned["bound"])
    assert planned["predicted"].keys() == {
        *("throughput_fps", "latency_s", "energy_j", "jitter_s", "uncertainty", *SIMULATED),
        *("memory_bytes", "dram_bytes", "communication_bytes", "edge_communication_bytes"),
    }
    best = max(candidate["predicted"]["throughput_fps"] for candidate in planned["candidates"])
    assert planned["predicted"]["throughput_fps"] == best
    written = Plan.parse((tmp_path / "plan.txt").read_text())
    assert [list(stage.operators) for stage in written.stages] == [stage["operators"] for stage in planned["stages"]]


@pytest.mark.needs("two cores")
def test_plan_says_why_the_winner_won(cli, bundle):
    outcome = cli("plan", bundle, "--verify", 0, "--objective", "latency")
    assert outcome.code == 0
    assert "has the best latency" in " ".join(outcome.out.split())


@pytest.mark.needs("two cores")
def test_a_given_number_of_stages_is_kept(cli, bundle):
    assert len(cli("plan", bundle, "--verify", 0, "--stages", 2, "--json").json["stages"]) == 2


@pytest.mark.needs("two cores")
def test_compile_then_bench_a_hand_written_plan(cli, model, bundle, tmp_path):
    plan = tmp_path / "plan.txt"
    assert cli("plan", bundle, "--verify", 0, "--stages", 2, "-o", plan).code == 0
    compiled = cli("compile", model, "-o", tmp_path / "net.tar", "--plan", plan, "--json")
    assert compiled.code == 0, compiled.err
    assert len(compiled.json["stages"]) == 2
    outcome = cli("bench", tmp_path / "net.tar", "--plan", plan, "--seconds", 0.05, "--rounds", 1, "--json")
    assert outcome.code == 0, outcome.err
    (given,) = outcome.json["candidates"]
    assert {stage["stage"] for stage in given["measured"]["statistics"]["stages"]} == {0, 1}


@pytest.mark.needs("Relay")  # Relax is no other here
def test_compile_measures_the_candidates_and_the_bundle_says_so(cli, model, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(verification, "MOST_ROUNDS", 3)  # rounds end the race, however slow the machine is
    monkeypatch.setattr(verification, "TURN_S", 0.05)
    monkeypatch.setattr(verification, "SLOT_ROUNDS", 0)  # the turns with fewer frames inside have figures of their own
    bundle, profile = tmp_path / "net.tar", tmp_path / "profile.json"
    assert cli("profile", model, "-o", profile, "--repeats", 4).code == 0
    known = json.loads(profile.read_text())
    for device in known["devices"].values():  # so uncertain that no prediction decides, whatever the machine's moment
        device["uncertainty"] = dict.fromkeys(device["seconds"], 0.9)
    profile.write_text(json.dumps(known))
    compiled = cli("compile", model, "-o", bundle, "--profile", profile, "--verify", 120, "--json")
    assert compiled.code == 0, compiled.err
    choice = compiled.json
    assert choice["decided_by"] == "measurement"
    first, *others = choice["verified"]
    assert others
    assert first["stages"] == choice["stages"]
    for verified in choice["verified"]:
        assert verified["measured"]["throughput_fps"] > 0
        assert verified["measured"]["spread"] >= 0
        [candidate] = [c for c in choice["candidates"] if c["stages"] == verified["stages"]]
        assert verified["predicted"] == {**candidate["predicted"], **dict.fromkeys(SIMULATED)}  # they came later
        assert all(candidate["predicted"][name] > 0 for name in SIMULATED)
    assert f"measured {first['measured']['throughput_fps']:.4g} fps against" in choice["why"]
    shown = cli("show", bundle, "-o", tmp_path, "--format", "svg", "--json").json
    assert {key: shown[key] for key in ("why", "decided_by", "verified")} == {
        key: choice[key] for key in ("why", "decided_by", "verified")
    }
    text = cli("show", bundle, "-o", tmp_path, "--format", "svg").out
    assert "measured" in text.splitlines()[2]
    assert "in turns; by prediction" in " ".join(text.split())


def test_without_time_for_it_nothing_is_measured(cli, bundle):
    planned = cli("plan", bundle, "--verify", 0, "--json").json
    assert (planned["decided_by"], planned["verified"]) == ("prediction", [])


def test_bench_sets_predicted_beside_measured(cli, bundle):
    outcome = cli("bench", bundle, "--seconds", 0.05, "--rounds", 1, "--json")
    assert outcome.code == 0, outcome.err
    for candidate in outcome.json["candidates"]:
        assert candidate["measured"]["throughput_fps"] > 0
        assert candidate["predicted"]["throughput_fps"] > 0


def test_bench_prints_a_table(cli, bundle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    outcome = cli("bench", bundle, "--seconds", 0.05, "--rounds", 1)
    lines = outcome.out.splitlines()
    assert "Side by side" in outcome.out
    assert all(column in outcome.out for column in ("plan", "fps predicted", "measured", "error", "spread"))
    found = cli("plan", bundle, "--verify", 0, "--json").json["candidates"]
    shown = [line for line in lines if any(f"{candidate['scheduler']} (" in line for candidate in found)]
    assert len(shown) == len(found)  # a row for each candidate, with an error and a spread in per cent
    assert all(line.count("%") >= 2 for line in shown)


@pytest.mark.needs("two cores")
def test_bench_runs_plans_of_files_alone(cli, bundle, tmp_path):
    for scheduler in ("single", "two-stage"):
        assert cli("plan", bundle, "--scheduler", scheduler, "-o", tmp_path / f"{scheduler}.txt").code == 0
    plans = [argument for name in ("single", "two-stage") for argument in ("--plan", tmp_path / f"{name}.txt")]
    outcome = cli("bench", bundle, *plans, "--seconds", 0.05, "--rounds", 1, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json["candidates"]
    assert [(each["scheduler"], each["note"]) for each in found] == [
        ("single", "single.txt"),
        ("two-stage", "two-stage.txt"),
    ]
    assert all(each["measured"]["throughput_fps"] > 0 for each in found)


@pytest.mark.quick_cases(1)
@pytest.mark.needs("Relay")  # Relax is no other here
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_show_draws(cli, bundle, tmp_path, suffix):
    outcome = cli("show", bundle, "-o", tmp_path / "pictures", "--format", suffix, "--json")
    assert outcome.code == 0, outcome.err
    pictures = gantt, graph, _ = list(map(Path, outcome.json["pictures"]))
    assert [picture.name for picture in pictures] == [f"{name}.{suffix}" for name in ("gantt", "graph", "frame")]
    if suffix == "png":
        for picture in pictures:
            with Image.open(picture) as image:
                assert image.format == "PNG"
                assert min(image.size) > 100
                # The ground, and at least one stage or frame in a colour of its own.
                colours = sorted((count for count, _ in image.convert("RGB").getcolors(1 << 22)), reverse=True)
                assert colours[1] > 1000
        return
    stages = outcome.json["stages"]
    for stage in stages:
        assert all(f"<!-- {name} -->" in graph.read_text() for name in stage["operators"])
    text = gantt.read_text()
    assert "bottleneck: stage" in text
    assert all(f"stage {index} on" in graph.read_text() for index in range(len(stages)))
    assert all(device in text for stage in stages for device in stage["devices"])
    assert all(f"<!-- {frame}" in text for frame in range(8))
