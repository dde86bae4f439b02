"""Models compiled with concatenations in parts: what onnxruntime computes, in less memory, cut anywhere."""

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
from tests.support.networks import Weights, as_model
from tests.support.onnx_models import onnx_bytes
from tvm_pipeline.frontends import load
from tvm_pipeline.workflow.steps import Compiled, compile_source
from tvm_pipeline_tvm.relay.relay_rewriting import RelayRewriting

import tvm  # isort: skip
from tvm import relay  # isort: skip

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


def run_stages(made: Compiled, cuts: list[list[str]], frame: Any) -> Any:
    device, known = made.platform.devices[0], {made.compiled.graph.inputs[0].name: frame}
    for names in cuts:
        stage = made.compiled.stage(names, device)
        inputs, outputs = [port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]
        for port, array in zip(stage.inputs, inputs, strict=True):
            array[...] = known[port.name]
        stage.run(inputs, outputs)
        known |= {port.name: array for port, array in zip(stage.outputs, outputs, strict=True)}
        stage.close()
    return known[made.compiled.graph.outputs[0]]


@pytest.mark.thorough
def test_a_compiled_model_is_that_of_the_file_in_less_memory(made) -> None:
    needs("onnxruntime")
    import onnxruntime

    path, compiled = made
    found = compiled.rewriting
    assert found is not None
    assert found.operators == ("join",)
    # Twice 56 channels of 8 x 8 floats with the picture, against the widest branch and its sum with the picture.
    channel = 8 * 8 * 4
    assert found.peak_bytes == ((3 + 2 * 56) * channel, (3 + 24 + 4) * channel)
    # Before, the parts lie in their sum where they are whole vectors of the processor, so that it takes half the bytes.
    assert found.arena_bytes[1] < 0.6 * found.arena_bytes[0]
    assert compiled.compiled.order == "memory"
    frame = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype("f4")
    [expected] = onnxruntime.InferenceSession(path.read_bytes()).run(None, {"x": frame})
    names = [operator.name for operator in compiled.compiled.graph.operators]
    whole = run_stages(compiled, [names], frame)
    assert np.abs(whole - expected).max() <= 1e-5 * expected.max()
    for cut in range(1, len(names)):
        assert (run_stages(compiled, [names[:cut], names[cut:]], frame) == whole).all()


@pytest.mark.thorough
def test_a_model_and_its_rewritten_one_are_two_in_the_cache(made) -> None:
    path, compiled = made
    plain = compile_source(path)
    assert plain.rewriting is None
    assert len(compiled.compiled.graph) == len(plain.compiled.graph) + 1  # three partial convolutions, no `join`
    assert {operator.kind for operator in plain.compiled.graph.operators} >= {"concatenate"}
    assert all("concatenate" not in operator.kind for operator in compiled.compiled.graph.operators)


@pytest.mark.thorough
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
    assert done["rewriting"]["operators"] == ["join"]
    assert [row["stage"] for row in done["activations"]] == [0, 1]
    shown = command("show", bundle, "-o", tmp_path / "out", "--json").json
    assert shown["rewriting"] == done["rewriting"]
    planned = [name for stage in shown["stages"] for name in stage["operators"]]  # in stages as the profile has it
    assert sorted(planned) == sorted(operator.name for operator in compiled.compiled.graph.operators)
    (ran,) = command("bench", bundle, "--plan", plan, "--seconds", 0.05, "--rounds", 1, "--json").json["candidates"]
    assert ran["measured"]["throughput_fps"] > 0
    # A plan and a profile of the rewritten model are not for the model as it is.
    outcome = run_command(capfd, monkeypatch, "compile", path, *given)
    assert outcome.code == 1
    assert "profile was measured on net" in outcome.err


def int8(w: Weights) -> relay.Expr:
    """Three int8 branches without weights of their own, and a convolution to few channels, which sums in int32."""
    one, zero = relay.const(0.05), relay.const(0)
    data = relay.var("data", shape=(1, 32, 8, 8), dtype="int8")
    wide = [relay.nn.max_pool2d(data, (size, size), padding=(size // 2, size // 2)) for size in (3, 5, 7)]
    joined = relay.concatenate(wide, axis=1)
    weights = w(1, 96, 1, 1, dtype="int8")
    options = {"kernel_size": (1, 1), "channels": 1}
    x = relay.qnn.conv2d(joined, weights, zero, zero, one, relay.const(0.01), **options)
    return relay.qnn.requantize(x, relay.const(0.0005), zero, relay.const(0.5), zero, out_dtype="int8")


def test_a_quantized_model_is_known_as_one_and_its_least_peak_counts_sums_in_int32() -> None:
    """That its outputs stay equal bit for bit is tested in `test_rewrite_concat.py`, and of models by the benchmark."""
    w = Weights()
    body = int8(w)
    mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body))
    rewriting = RelayRewriting(as_model("int8", relay.transform.InferType()(mod), w.params))
    assert rewriting.is_quantized
    assert rewriting.names == ("concatenation 0 (1x96x8x8)",)
    # Data, three branches and their concatenation; then data, a branch, and two sums of one channel in int32.
    assert rewriting.peak_bytes(()) == 64 * (32 + 96 + 96)
    assert rewriting.peak_bytes(rewriting.names) == 64 * (32 + 32 + 4 + 4)


def test_outputs_and_inputs_keep_their_names(tmp_path) -> None:
    path = write_branches(tmp_path / "net.onnx")
    model = load(path)
    rewriting = RelayRewriting(model)
    after = rewriting.rewritten(rewriting.names)
    assert (after.inputs, after.outputs, after.format) == (model.inputs, ("y",), "relay.json")
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
