"""`tvm-pipeline slice` as a user meets it: a graph to plan for, then a file for each stage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import run_command
from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.fakes import write_compiler
from tests.edgetpu.networks import random_feeds, random_network, run
from tvm_pipeline import read_graph

PLATFORM = Path(__file__).parents[2] / "profiles" / "platforms" / "coral-usb-2.toml"


@pytest.fixture
def cli(capfd, monkeypatch):
    def call(*arguments: object) -> tuple[int, str, str]:
        outcome = run_command(capfd, monkeypatch, *arguments)
        return outcome.code, outcome.out, outcome.err

    return call


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "net.tflite"
    path.write_bytes(random_network(4))
    return path


@pytest.fixture
def plan(cli, model, tmp_path) -> Path:
    """Make a plan by the commands that the help names."""
    assert cli("slice", model, "--graph", tmp_path / "graph.json")[0] == 0
    code, _, err = cli(
        "plan", tmp_path / "graph.json", "--platform", PLATFORM, "--stages", 2, "-o", tmp_path / "plan.txt"
    )
    assert code == 0, err
    return tmp_path / "plan.txt"


@pytest.mark.thorough
def test_the_files_of_a_plan_give_what_the_model_gives(cli, model, plan, tmp_path):
    code, out, err = cli("slice", model, "--plan", plan, "-o", tmp_path / "deep" / "stages", "--json")
    assert code == 0, err
    listed = json.loads((tmp_path / "deep" / "stages" / "stages.json").read_text())
    assert listed == json.loads(out)
    graph = read_graph(tmp_path / "graph.json")
    assert [tensor["name"] for tensor in listed["inputs"]] == [tensor.name for tensor in graph.inputs]
    feeds = random_feeds(graph)
    known = dict(feeds)
    for stage in listed["stages"]:
        fed = {tensor["name"]: known[tensor["name"]] for tensor in stage["inputs"]}
        made = run((tmp_path / "deep" / "stages" / stage["file"]).read_bytes(), fed)
        assert list(made) == [tensor["name"] for tensor in stage["outputs"]]
        known |= made
    whole = run(model.read_bytes(), feeds)
    assert list(whole) == [tensor["name"] for tensor in listed["outputs"]]
    for name, value in whole.items():
        np.testing.assert_array_equal(known[name], value)


@pytest.mark.thorough
def test_people_are_told_what_was_written(cli, model, plan, tmp_path):
    _, out, _ = cli("slice", model, "--plan", plan, "-o", tmp_path)
    assert "in 2 files" in out
    assert sorted(path.name for path in tmp_path.glob("*.tflite")) == ["net.tflite", "stage0.tflite", "stage1.tflite"]


def test_bad_input_is_refused(cli, model, plan, tmp_path):
    assert cli("slice", model)[0] == 2
    code, _, err = cli("slice", model, "--plan", plan, "-o", model)
    assert (code, "name a folder" in err) == (2, True)
    other = tmp_path / "other.tflite"
    other.write_bytes(random_network(5))
    code, _, err = cli("slice", other, "--plan", plan, "-o", tmp_path / "none")
    assert code == 1
    assert f"{plan}: stage 0 names operator" in err
    assert not (tmp_path / "none").exists()


def test_the_help_has_an_example(cli):
    assert "Example: tvm-pipeline" in cli("slice", "--help")[1]


def test_stages_are_compiled_and_their_tensors_have_scales(cli, model, plan, tmp_path, monkeypatch):
    write_compiler(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path / "cache"))
    code, out, err = cli("slice", model, "--plan", plan, "-o", tmp_path / "stages", "--compile", "--json")
    assert code == 0, err
    for stage in json.loads(out)["stages"]:
        report = stage["compiled"]
        assert (tmp_path / "stages" / report["file"]).read_bytes()
        assert report["mapped"] + report["on_cpu"] == len(stage["operators"])
        assert all(tensor["scale"] == pytest.approx(0.05) for tensor in (*stage["inputs"], *stage["outputs"]))


@pytest.mark.thorough
def test_what_a_longer_plan_left_behind_goes(cli, model, plan, tmp_path):
    stages = tmp_path / "stages"
    stages.mkdir()
    for name in ("stage7.tflite", "stage7_edgetpu.tflite", "stage_of_mine.tflite"):
        (stages / name).write_bytes(b"old")
    assert cli("slice", model, "--plan", plan, "-o", stages)[0] == 0
    assert sorted(file.name for file in stages.iterdir()) == [
        "stage0.tflite",
        "stage1.tflite",
        "stage_of_mine.tflite",
        "stages.json",
    ]
