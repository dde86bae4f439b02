"""`tvm-pipeline simulate`: predicted beside simulated, and what is wrong with bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.parts import needs

# 10 and 20 ms on a, 30 and 25 ms on b; nothing between them.
GRAPH = {
    "name": "net",
    "nodes": [{"name": "first", "output_bytes": 1}, {"name": "second", "output_bytes": 1}],
    "edges": [[0, 1]],
}
PLATFORM = 'name = "box"\n[[device]]\nname = "a"\n[[device]]\nname = "b"\n'
PLAN = "plan net by hand\nobjective throughput\nstatus feasible\npredicted\nstage a\n  first\nstage b\n  second\n"


@pytest.fixture
def what(tmp_path) -> list[object]:
    """The arguments that name a graph, a platform, a profile and a plan."""
    from tvm_pipeline import read_graph

    (tmp_path / "net.json").write_text(json.dumps(GRAPH))
    (tmp_path / "box.toml").write_text(PLATFORM)
    (tmp_path / "plan.txt").write_text(PLAN)
    graph = read_graph(tmp_path / "net.json")
    names = graph.operator_names
    seconds = {"a": [0.010, 0.020], "b": [0.030, 0.025]}
    devices = {device: {"seconds": dict(zip(names, row, strict=True))} for device, row in seconds.items()}
    profile = {"graph": graph.name, "fingerprint": graph.fingerprint, "devices": devices}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    files = {"--platform": "box.toml", "--profile": "profile.json", "--plan": "plan.txt"}
    return [tmp_path / "net.json", *(x for option, name in files.items() for x in (option, tmp_path / name))]


def test_a_saturated_run_is_as_predicted(cli, what):
    outcome = cli("simulate", *what, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["predicted"]["throughput_fps"] == pytest.approx(40.0)
    simulated = outcome.json["simulated"]
    assert simulated["throughput_fps"] == pytest.approx(40.0)
    assert (simulated["frames"], simulated["dropped"]) == (1000, 0)
    assert [(stage["device"], stage["compute_s"]) for stage in simulated["stages"]] == [
        ("a", pytest.approx(0.010)),
        ("b", pytest.approx(0.025)),
    ]


def test_a_source_with_a_rate(cli, what):
    simulated = cli("simulate", *what, "--rate", 20, "--frames", 50, "--json").json["simulated"]
    assert simulated["throughput_fps"] == pytest.approx(20.0)
    assert simulated["latency_s"] == pytest.approx(0.035)
    live = cli("simulate", *what, "--rate", 80, "--live", "--json").json["simulated"]
    assert live["throughput_fps"] == pytest.approx(40.0)
    assert live["dropped"] == pytest.approx(500, abs=10)
    assert live["frames"] + live["dropped"] == 1000


def test_the_same_seed_gives_the_same_run(cli, what):
    def run(seed: int) -> dict:
        return cli("simulate", *what, "--poisson", 30, "--jitter", 0.1, "--seed", seed, "--frames", 100, "--json").json

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_tables_say_that_nothing_was_run(cli, what):
    outcome = cli("simulate", *what, "--poisson", 100, "--live", "--frames", 100)
    assert outcome.code == 0, outcome.err
    text = " ".join(outcome.out.split())
    assert "Predicted and simulated" in text
    assert "simulated: nothing was run on a device" in text
    assert "of 100 frames were dropped" in text
    assert "measured" not in text


def test_the_gantt_chart_is_that_of_the_run(cli, what, tmp_path):
    needs("matplotlib")
    outcome = cli("simulate", *what, "--rate", 10, "--gantt", tmp_path / "gantt.svg")
    assert outcome.code == 0, outcome.err
    assert "simulated" in (tmp_path / "gantt.svg").read_text()
    assert cli("simulate", *what, "--gantt", tmp_path / "gantt.txt").code == 2


@pytest.mark.needs("two cores")
def test_a_bundle_has_its_own_plan(cli, bundle, tmp_path):
    outcome = cli("simulate", bundle, "--frames", 100, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["simulated"]["frames"] == 100
    assert cli("plan", bundle, "--stages", 2, "--verify", 0, "-o", tmp_path / "two.txt").code == 0
    outcome = cli("simulate", bundle, "--plan", tmp_path / "two.txt", "--frames", 100, "--jitter", 0, "--json")
    assert len(outcome.json["stages"]) == 2
    assert outcome.json["simulated"]["throughput_fps"] == pytest.approx(
        outcome.json["predicted"]["throughput_fps"], rel=0.02
    )


def test_a_plan_keeps_a_deadline_or_what_would_keep_it_is_told(cli, what):
    """The whole graph takes 30 ms on a; a pipeline takes 35 ms, and 40 frames a second."""
    graph = what[:5]
    kept = cli("plan", *graph, "--rate", 20, "--deadline", "50ms", "--miss", 0.01, "--json")
    assert kept.code == 0, kept.err
    assert kept.json["objectives"]["throughput"] == pytest.approx(40.0)
    assert kept.json["predicted"]["latency_p99_s"] == pytest.approx(0.035)
    missed = cli("plan", *graph, "--rate", 20, "--deadline", "25ms", "--miss", 0.01)
    assert missed.code == 1
    assert "the best deadline at this rate is 30 ms, of single (a)" in " ".join(missed.err.split())
    for options in (["--deadline", "50ms"], ["--rate", 20, "--deadline", "soon"], ["--rate", 20, "--deadline", 0]):
        assert cli("plan", *graph, *options).code == 2


def test_it_has_an_example_in_its_help(cli):
    assert "Example: tvm-pipeline simulate" in cli("simulate", "--help").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", 10, "--poisson", 10], ["--rate and --poisson", "one of them"]),
        (["--rate", 0], ["cannot arrive at 0 a second"]),
        (["--frames", 10**12], ["simulate at least one, and up to 10000000"]),
        (["--poisson", "nan"], ["cannot arrive at nan a second"]),
        (["--live"], ["--live", "--rate or --poisson"]),
        (["--frames", 0], ["0 frames"]),
        (["--in-flight", 0], ["in_flight is 0"]),
        (["--jitter", -1], ["jitter is -1"]),
    ],
)
def test_options_that_cannot_be(cli, what, options, words):
    outcome = cli("simulate", *what, *options)
    assert outcome.code == 2, (outcome.out, outcome.err)
    assert outcome.out == ""
    assert all(word in outcome.err for word in words), outcome.err


def test_sources_that_cannot_be(cli, what, tmp_path):
    without_plan = cli("simulate", *what[:5])
    assert without_plan.code == 2
    assert "--plan: which plan of" in without_plan.err
    model = cli("simulate", "net.onnx", *what[1:])
    assert model.code == 2
    assert "neither an operator graph (.json) nor a bundle (.tar)" in model.err
    Path(tmp_path / "plan.txt").write_text(PLAN.replace("  second\n", "  third\n"))
    wrong = cli("simulate", *what)
    assert wrong.code == 1
    assert "names operator third, which net does not have" in wrong.err
