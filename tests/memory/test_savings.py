"""What operators in parts save: in either layout, of stages, of integers with sums in int32, and why nothing is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.support.command import run_command
from tests.support.memory_networks import Net
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.memory.rewriting import rewritable
from tvm_pipeline.memory.savings import channels_last, savings
from tvm_pipeline.memory.stage_memory import stage_graph

PIXELS = 4 * 4


def typed(graph: OperatorGraph, dtype: str) -> OperatorGraph:
    operators = (replace(o, outputs=tuple(replace(t, dtype=dtype) for t in o.outputs)) for o in graph.operators)
    return replace(graph, inputs=tuple(replace(t, dtype=dtype) for t in graph.inputs), operators=tuple(operators))


def first(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph as Relay compiles it: channels first, and elementwise functions counted as multiplications."""

    def tensor(one):
        height, width, channels = one.shape
        return replace(one, shape=(1, channels, height, width))

    operators = []
    for o in graph.operators:
        fused = {"kind": "conv2d+add", "macs": o.macs + PIXELS * o.outputs[0].shape[-1]} if o.kind == "conv2d" else {}
        operators.append(replace(o, outputs=tuple(map(tensor, o.outputs)), **fused))
    return replace(graph, inputs=tuple(map(tensor, graph.inputs)), operators=tuple(operators))


def joined(filters: int = 2) -> OperatorGraph:
    """Return three convolutions of 8 channels, their concatenation, and a convolution to `filters` channels."""
    net = Net()
    image = net.input(4, 4, 1)
    net.conv(net.concat(*(net.conv(image, 8) for _ in range(3))), filters)
    return net.graph("joined")


def summed() -> OperatorGraph:
    """Return the sum of four convolutions of 8 channels, and a convolution that reads it."""
    net = Net()
    image = net.input(4, 4, 1)
    net.conv(net.sum(*(net.conv(image, 8) for _ in range(4))), 1)
    return net.graph("summed")


def test_partitioned_and_piecewise_are_told_apart() -> None:
    found = savings("joined", joined())
    # Twice 24 channels and the image; then one branch, the image and the result.
    assert (found.plain.peak_bytes, found.every.ordering.peak_bytes) == (49 * 4 * PIXELS, 11 * 4 * PIXELS)
    assert found.partitioned.operators == found.every.operators == ("concat_3",)
    found = savings("summed", summed())
    # Four branches, their sum and the image; then one branch, the sum and the image.
    assert (found.plain.peak_bytes, found.every.ordering.peak_bytes) == (41 * 4 * PIXELS, 17 * 4 * PIXELS)
    assert found.partitioned.operators == ()
    assert len(found.every.operators) == 1
    assert (found.why, found.carried_bytes) == ("", 0)


@pytest.mark.parametrize("graph", [joined(), summed()], ids=["joined", "summed"])
def test_channels_may_come_first(graph: OperatorGraph) -> None:
    one, other = savings("net", graph), savings("net", first(graph))
    assert one.every.operators == other.every.operators != ()
    assert one.every.ordering.peak_bytes == other.every.ordering.peak_bytes
    # A graph whose channels are last already stays as it is.
    assert channels_last(graph) == graph
    with_batch = channels_last(first(graph))
    assert channels_last(with_batch) == with_batch
    assert [t.shape[1:] for t in with_batch.tensors.values()] == [t.shape for t in graph.tensors.values()]


def test_rows_that_are_joined_are_no_channels() -> None:
    net = Net()
    image = net.input(4, 4, 1)
    halves = [net.conv(image, 8), net.conv(image, 8)]
    rows = net.add("concat", tuple(halves), (8, 4, 8))
    net.conv(rows, 1)
    graph = first(net.graph("rows"))
    assert rewritable(channels_last(graph), stage_graph(channels_last(graph), None)) == {}


def test_grouped_convolutions_read_their_input_whole() -> None:
    net = Net()
    image = net.input(4, 4, 1)
    x = net.concat(net.conv(image, 8), net.conv(image, 8))
    net.add("conv2d", (x,), (4, 4, 16), 9 * 4 * 16)  # 36 products an element are no multiple of 16 channels
    graph = net.graph("grouped")
    assert rewritable(graph, stage_graph(graph)) == {"concat_2": "piecewise"}


def test_sums_of_integers_are_charged_in_int32() -> None:
    found = savings("joined", typed(joined(), "int8"))
    # One branch of 8 channels in a byte each, a sum of 2 channels in 4 bytes each, and the image.
    assert found.every.ordering.peak_bytes == (8 + 2 * 4 + 1) * PIXELS
    assert found.carried_bytes == 2 * 4 * PIXELS
    found = savings("joined", typed(joined(filters=10), "int8"))
    # The concatenation took 49 channels; a branch, and 10 channels in 4 bytes each, take as many with the image.
    assert found.every.operators == ()
    assert found.carried_bytes == 0
    assert found.why == (
        "with all 1 in parts the least peak is 816 bytes, at operator conv2d_4[requantize], as it is 784: partial sums "
        "of conv2d_4 are kept in int32, 4 bytes an element"
    )


def test_other_operators_stay_in_parts_where_sums_of_integers_do_not_pay() -> None:
    """With both concatenations in parts, the sum of 100 channels in int32 takes more than the first one did."""
    net = Net()
    x = net.concat(*(net.conv(net.input(4, 4, 1), 16) for _ in range(3)))
    x = net.add("softmax", (net.add("depthwise_conv2d", (x,), (2, 2, 48), 9 * 48),), (2, 2, 48))
    net.conv(net.concat(net.conv(x, 2), net.conv(x, 2)), 100)
    found = savings("mixed", typed(net.graph("mixed"), "int8"))
    assert found.every.operators == ("concat_3",)
    assert found.every.ordering.peak_bytes < found.plain.peak_bytes


def test_a_peak_elsewhere_is_named() -> None:
    net = Net()
    image = net.input(4, 4, 1)
    x = net.conv(net.concat(*(net.conv(image, 4) for _ in range(2))), 4)
    wide = net.conv(x, 100)
    net.conv(wide, 1)
    found = savings("net", net.graph("elsewhere"))
    assert found.every.operators == ()
    assert found.why.endswith(f"at operator {wide}, which needs as much whatever is in parts")
    assert "no concatenation of channels" in savings("net", net.graph("x"), [wide]).why


def test_the_command_lists_them_for_a_graph_and_the_stages_of_a_plan(tmp_path: Path, capfd, monkeypatch) -> None:
    graph = joined()
    (tmp_path / "net.json").write_bytes(msgspec.json.encode(graph))
    names = graph.operator_names
    lines = ["plan joined by hand", "objective throughput", "status feasible", "predicted"]
    for device, part in (("a", names[:2]), ("b", names[2:])):
        lines += [f"stage {device}", *(f"  {name}" for name in part)]
    (tmp_path / "plan.txt").write_text("\n".join(lines) + "\n")
    arguments = ("memory", tmp_path / "net.json", "--rewrite", "--plan", tmp_path / "plan.txt")
    whole, before, after = json.loads(run_command(capfd, monkeypatch, *arguments, "--json").out)["parts"]
    assert whole["rewriting"] == {
        "peak_bytes": 49 * 64,
        "partitioned": {"peak_bytes": 11 * 64, "status": "optimal", "operators": ["concat_3"]},
        "every": {"peak_bytes": 11 * 64, "status": "optimal", "operators": ["concat_3"]},
        "int32_bytes": 0,
        "why": "",
    }
    assert before["rewriting"]["why"] == "it has no concatenation of channels, and no sum of equal shapes"
    assert after["rewriting"]["every"]["peak_bytes"] < after["rewriting"]["peak_bytes"]
    monkeypatch.setenv("COLUMNS", "160")
    outcome = run_command(capfd, monkeypatch, *arguments)
    for text in ("3,136", "704", "joined in parts: concat_3", "stage 0 on a: nothing is gained by parts"):
        assert text in outcome.out
    assert "rewriting" not in json.loads(run_command(capfd, monkeypatch, *arguments[:2], "--json").out)["parts"][0]
