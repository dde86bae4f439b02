"""Instances: written and read as they are, planned by the command, and refused in one line."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given

from tests.support.graphs import problems
from tvm_pipeline.core.instance import Instance, is_instance, read_instance, write_instance
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import OptionError
from tvm_pipeline.planning import plan
from tvm_pipeline.testing import example_problem

SCHEMA = Path(__file__).parents[2] / "docs" / "instance.schema.json"


def solved(problem: Problem) -> Instance:
    return Instance("example", "made by hand", problem, str(plan(problem).plan), 0.1)


def test_the_file_in_docs_is_the_schema() -> None:
    """Write it anew: python -c "from tests.cli.test_instances import *; SCHEMA.write_text(schema())"."""
    assert SCHEMA.read_text() == schema()


def schema() -> str:
    found = msgspec.json.schema(Instance)
    for described in found["$defs"].values():
        described.pop("description", None)  # of docstrings, which are written differently by releases of msgspec
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory,communication"])
def test_what_is_written_reads_back_with_its_plan(tmp_path, objective):
    problem = replace(example_problem(), objective=objective, stages=2)
    write_instance(tmp_path / "a.json", solved(problem))
    read = read_instance(tmp_path / "a.json")
    assert read == solved(problem)
    assert read.problem == problem
    assert read.plan == plan(problem).plan


@given(problem=problems())
def test_any_problem_reads_back(problem):
    with tempfile.TemporaryDirectory() as folder:
        write_instance(Path(folder) / "a.json", Instance("any", "random", problem))
        assert read_instance(Path(folder) / "a.json").problem == problem


def test_only_json_with_a_problem_is_one(tmp_path):
    write_instance(tmp_path / "a.json", solved(example_problem()))
    assert is_instance(tmp_path / "a.json")
    for name, text in (("b.json", "{}"), ("c.json", "[1]"), ("d.json", "{"), ("e.txt", '{"problem": 1}')):
        (tmp_path / name).write_text(text)
        assert not is_instance(tmp_path / name)
    assert not is_instance(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: file.pop("name"), "missing required field `name`"),
        (lambda file: file["problem"].pop("graph"), "missing required field `graph`"),
        (lambda file: file["problem"].update(objective="speed"), "Invalid enum value 'speed'"),
        (lambda file: file["problem"].update(stages=9), "9 stages: net has only 2 operators"),
        (lambda file: file["problem"]["graph"]["operators"][1].update(inputs=["none"]), "none"),
        (lambda file: file["problem"]["profile"]["devices"]["d0"]["seconds"].update(double=-1), "double"),
        (lambda file: file.update(best="stage d0\n  double\nwhat is this"), "line 3"),
    ],
)
def test_damaged_ones_are_refused_by_name(tmp_path, change, told):
    path = tmp_path / "a.json"
    write_instance(path, solved(example_problem()))
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(OptionError, match=told) as error:
        read_instance(path)
    assert str(error.value).startswith(str(path))


def test_plan_takes_the_problem_and_what_options_say(cli, tmp_path):
    problem = replace(example_problem(), objective="latency", stages=2, min_throughput_fps=5.0)
    write_instance(tmp_path / "a.json", solved(problem))
    for options, wanted in (
        ((), problem),
        (("--objective", "throughput"), replace(problem, objective="throughput", min_throughput_fps=None)),
        (("--stages", 1), replace(problem, stages=1)),
    ):
        told = cli("plan", tmp_path / "a.json", *options, "-o", tmp_path / "plan.txt")
        assert told.code == 0, told.err
        made = Plan.parse((tmp_path / "plan.txt").read_text())
        assert made.objective == wanted.objective
        assert made.value == pytest.approx(plan(wanted).plan.value)
        assert len(made.stages) == wanted.stages
    told = cli("plan", tmp_path / "a.json", "--verify", 1)
    assert told.code == 2
    assert "a.json is an instance, and nothing runs" in told.err
