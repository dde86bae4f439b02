"""Models that Relay or Relax compiles with concatenations in parts: what onnxruntime computes, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")
needs("onnx")

from onnx import helper

from tests.support.command import run_command
from tests.support.onnx_models import onnx_bytes
from tests.support.stages import random_frame, run_stages
from tvm_pipeline.frontends import load
from tvm_pipeline.workflow.steps import Compiled, compile_source
from tvm_pipeline_tvm.installed_ir import installed_ir, installed_model

JOIN = "join" if installed_ir() == "relay" else "concatenation 0 (1x56x8x8)"  # Relax does not tell the node of a file
WIDTHS = (16, 24, 16)


def write_branches(path: Path) -> Path:
    """Write three branches on an 8 x 8 picture, joined by the node `join`, and a convolution that reads them."""
    draw, nodes, constants = np.random.default_rng(0), [], {}
    for index, width in enumerate(WIDTHS):
        constants[f"w{index}"] = draw.standard_normal((width, 3, 1, 1)).astype("f4")
        nodes.append(helper.make_node("Conv", ["x", f"w{index}"], [f"c{index}"]))
        nodes.append(helper.make_node("Relu", [f"c{index}"], [f"r{index}"]))
    nodes.append(helper.make_node("Concat", ["r0", "r1", "r2"], ["j"], name="join", axis=1))
    constants |= {"w": draw.standard_normal((4, sum(WIDTHS), 3, 3)).astype("f4"), "b": np.ones(4, "f4")}
    nodes.append(helper.make_node("Conv", ["j", "w", "b"], ["s"], pads=[1, 1, 1, 1]))
    nodes.append(helper.make_node("Relu", ["s"], ["y"]))
    path.write_bytes(onnx_bytes(nodes, constants, shape=(1, 3, 8, 8)))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Compiled]:
    path = write_branches(tmp_path_factory.mktemp("net") / "net.onnx")
    return path, compile_source(path, memory_rewrite=True)


@pytest.mark.thorough
def test_a_compiled_model_is_that_of_the_file_in_less_memory(made) -> None:
    needs("onnxruntime")
    import onnxruntime

    path, compiled = made
    found = compiled.rewriting
    assert found is not None
    assert found.operators == (JOIN,)
    # Twice 56 channels of 8 x 8 floats with the picture, against the widest branch and its sum with the picture.
    channel = 8 * 8 * 4
    assert found.peak_bytes == ((3 + 2 * 56) * channel, (3 + 24 + 4) * channel)
    # Before, the parts lie in their sum where they are whole vectors of the processor, so that it takes half the bytes.
    assert found.arena_bytes[1] < 0.6 * found.arena_bytes[0]
    assert compiled.compiled.order == "memory"
    graph, device = compiled.compiled.graph, compiled.platform.devices[0]
    frame = random_frame(graph.inputs)
    [expected] = onnxruntime.InferenceSession(path.read_bytes()).run(None, frame)
    names = graph.operator_names

    def output(*stages: list[str]) -> Any:
        made_ = run_stages(compiled.compiled, [(stage, device) for stage in stages], frame)
        return made_[graph.outputs[0]][1]

    whole = output(names)
    assert np.abs(whole - expected).max() <= 1e-5 * expected.max()
    for cut in range(1, len(names)):
        np.testing.assert_array_equal(output(names[:cut], names[cut:]), whole)


@pytest.mark.thorough
def test_a_model_and_its_rewritten_one_are_two_in_the_cache(made) -> None:
    path, compiled = made
    plain = compile_source(path)
    assert plain.rewriting is None
    assert len(compiled.compiled.graph) == len(plain.compiled.graph) + 1  # three partial convolutions, no concatenation
    assert {operator.kind for operator in plain.compiled.graph.operators} >= {"concatenate"}
    assert all("concatenate" not in operator.kind for operator in compiled.compiled.graph.operators)


@pytest.mark.thorough
@pytest.mark.needs("Relax")
def test_the_commands_take_a_rewritten_model(made, tmp_path, capfd, monkeypatch) -> None:
    path, compiled = made
    bundle, plan = tmp_path / "net.tar", tmp_path / "plan.txt"

    def command(*arguments: object) -> Any:
        outcome = run_command(capfd, monkeypatch, *arguments)
        assert outcome.code == 0, outcome.err
        return outcome

    profile, graph = tmp_path / "profile.json", tmp_path / "graph.json"
    command("profile", path, "-o", profile, "--graph", graph, "--repeats", 4, "--memory-rewrite")
    command("plan", graph, "--profile", profile, "--stages", 2, "-o", plan)
    given = ("--profile", profile, "--plan", plan, "-o", bundle, "--json")
    done = command("compile", path, *given, "--memory-rewrite").json
    assert done["rewriting"]["operators"] == [JOIN]
    assert [row["stage"] for row in done["activations"]] == [0, 1]
    shown = command("show", bundle, "-o", tmp_path / "out", "--json").json
    assert shown["rewriting"] == done["rewriting"]
    planned = [name for stage in shown["stages"] for name in stage["operators"]]  # in stages as the profile has it
    assert sorted(planned) == sorted(compiled.compiled.graph.operator_names)
    (ran,) = command("bench", bundle, "--plan", plan, "--seconds", 0.05, "--rounds", 1, "--json").json["candidates"]
    assert ran["measured"]["throughput_fps"] > 0
    # A plan and a profile of the rewritten model are not for the model as it is.
    outcome = run_command(capfd, monkeypatch, "compile", path, *given)
    assert outcome.code == 1
    assert "profile was measured on net" in outcome.err


def test_outputs_and_inputs_keep_their_names(tmp_path) -> None:
    path = write_branches(tmp_path / "net.onnx")
    model = load(path)
    rewriting = installed_model().rewriting(model)
    after = rewriting.rewritten(rewriting.names)
    assert (after.inputs, after.outputs, after.format) == (model.inputs, ("y",), f"{installed_ir()}.json")
    assert after.digest != model.digest


def test_nothing_is_gained_where_no_reader_takes_parts(tmp_path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Concat", ["x", "r"], ["y"], axis=1)]
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx_bytes(nodes, shape=(1, 4, 8, 8)))
    heard = log_lines("WARNING")
    made = compile_source(path, memory_rewrite=True)
    assert made.rewriting is not None
    assert made.rewriting.operators == ()
    assert any("no concatenation of channels has only readers that could read it in parts" in line for line in heard)
