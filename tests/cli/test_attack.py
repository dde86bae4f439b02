"""Mutated files through the command: it ends with 0, 1 or 2, in one clean line that names the file, and leaves nothing.

`benchmarks/attack.py` is the long form, in processes that are watched. Here the seeds are fixed.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from pathlib import Path

import pytest

from tests.support.mutations import mutated

NODES = [{"name": f"n{i}", "op": "conv", "param_bytes": i, "output_bytes": 64, "macs": 1000} for i in range(5)]
GRAPH = json.dumps({"name": "net", "nodes": NODES, "edges": [[0, 1], [1, 2], [1, 3], [2, 4], [3, 4]]}).encode()
PLATFORM = b"""name = "box"
[[device]]
name = "a"
cores = [0]
model = { macs_per_s = 1e9, call_s = 1e-5 }
[[device]]
name = "b"
cores = [1]
model = { macs_per_s = 2e9, input_bytes_per_s = 1e9 }
[[link]]
source = "a"
destination = "b"
latency_s = 1e-5
"""
PLAN = b"""plan net by hand
objective throughput
status feasible
predicted throughput_fps 50.0
stage a
  n0
  n1
stage b
  n2
  n3
  n4
"""
SEEDS = range(12)


def held(outcome, file: Path) -> None:
    """Assert what must be true of every outcome."""
    assert outcome.code in (0, 1, 2), outcome.err
    assert "Traceback" not in outcome.err
    if outcome.code:
        assert outcome.out == ""
        assert outcome.err.startswith("error: ")
        assert file.name in outcome.err
        assert not re.search(r"error: \w*(Error|Exception)\b|--traceback shows where", outcome.err), outcome.err
        assert len(outcome.err) < 3000


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "graph.json").write_bytes(GRAPH)
    (tmp_path / "box.toml").write_bytes(PLATFORM)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["bad.json", "bad.toml", "bad.txt"])
def test_whatever_a_file_holds_the_command_ends_cleanly(name: str, cli, work: Path) -> None:
    sound = {"bad.json": GRAPH, "bad.toml": PLATFORM, "bad.txt": PLAN}[name]
    file = work / name
    commands = {
        "bad.json": ("plan", file, "--platform", work / "box.toml", "--time-limit", 1),
        "bad.toml": ("simulate", work / "graph.json", "--plan", work / "plan.txt", "--platform", file, "--frames", 9),
        "bad.txt": ("simulate", work / "graph.json", "--plan", file, "--platform", work / "box.toml", "--frames", 9),
    }
    (work / "plan.txt").write_bytes(PLAN)
    file.write_bytes(sound)
    assert cli(*commands[name]).code == 0, "the sound file is refused"
    before = sorted(path for path in work.rglob("*"))
    refused = 0
    for seed in SEEDS:
        file.write_bytes(mutated(name, sound, random.Random(f"{name} {seed}")))
        outcome = cli(*commands[name])
        if outcome.code and name == "bad.toml" and "plan.txt" in outcome.err:
            continue  # the platform is another one, sound in itself, which the plan does not fit
        held(outcome, file)
        refused += outcome.code != 0
    assert refused > 2, "nothing was damaged"
    assert sorted(path for path in work.rglob("*")) == before, "something was left behind"


@pytest.mark.thorough
def test_whatever_a_bundle_holds_the_command_ends_cleanly(cli, bundle: Path, work: Path) -> None:
    sound, file = bundle.read_bytes(), work / "bad.tar"
    refused = 0
    file.touch()
    before = sorted(path for path in work.rglob("*"))
    for seed in SEEDS:
        file.write_bytes(mutated("net.tar", sound, random.Random(f"net.tar {seed}")))
        outcome = cli("plan", file, "--verify", 0)
        held(outcome, file)
        refused += outcome.code != 0
    assert refused > 2, "nothing was damaged"
    assert sorted(path for path in work.rglob("*")) == before, "something was left behind"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("compile", "no.onnx", "-o", "{work}/nowhere/x.tar"), ["cannot write", "nowhere/x.tar"]),
        (("compile", "no.onnx", "-o", "{work}"), ["is a folder"]),
        (("compile", "no.onnx", "-o", "{work}/x.tar", "--scheduler", "nothing"), ["there is no scheduler nothing"]),
        (("profile", "no.onnx", "-o", "{work}/graph.json/x.json"), ["cannot write", "x.json"]),
        (("show", "no.tar", "-o", "{work}/graph.json"), ["cannot write", "graph.json"]),
        (("deploy", "no.tar@1", "-o", "{work}/graph.json/plans"), ["cannot write", "plans"]),
        (("simulate", "no.json", "--plan", "no.txt", "--gantt", "{work}/x.xyz"), ["x.xyz", ".png or .svg"]),
        (("plan", "{work}/graph.json", "--input-shapes", "x:[1]"), ["--input-shapes goes with a model", "graph.json"]),
        (("plan", "{work}/graph.json", "--pareto", "--objective", "memory,communication"), ["--pareto compares"]),
        (("profile", "{work}/graph.json"), ["graph.json: it is no Relay module", "operator graph"]),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_read_or_compiled(command, words, cli, work: Path) -> None:
    """The models and bundles of these commands are not there, and the error is not that."""
    outcome = cli(*(word.format(work=work) for word in command))
    assert outcome.code in (1, 2)
    for word in words:
        assert word in outcome.err


@pytest.mark.parametrize("option", [("--jitter", 1e9), ("--seed", -1), ("--jitter", "nan")])
def test_figures_out_of_range_are_refused(option, cli, work: Path) -> None:
    (work / "plan.txt").write_bytes(PLAN)
    common = ("simulate", work / "graph.json", "--plan", work / "plan.txt", "--platform", work / "box.toml")
    outcome = cli(*common, *option)
    assert outcome.code == 2
    assert str(option[0]).removeprefix("--") in outcome.err


def test_a_plan_that_does_not_fit_is_named(cli, work: Path) -> None:
    (work / "mine.txt").write_bytes(PLAN.replace(b"n4", b"n9"))
    outcome = cli("simulate", work / "graph.json", "--plan", work / "mine.txt", "--platform", work / "box.toml")
    assert outcome.code == 1
    assert "mine.txt" in outcome.err
    assert "n9" in outcome.err
