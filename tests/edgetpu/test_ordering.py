"""The operators of a .tflite in the order of least memory: a smaller arena, read from addresses, and equal bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.networks import MOBILENET, Op, Options, Type, Writer, random_feeds, random_network, run, schema
from tests.support.command import run_command
from tvm_pipeline import open_bundle
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline_edgetpu.compiled import EdgeTpuModel
from tvm_pipeline_edgetpu.ordering import arena_bytes, memory_ordered

CPU = Device("tpu0", "edgetpu", target="cpu", stand_in="TFLite")


def towers() -> bytes:
    """Return a network whose first tensor waits while two others are computed from large ones."""
    writer, rng = Writer(), np.random.default_rng(0)

    def conv(x: int, channels: int) -> int:
        filters = rng.integers(-30, 31, (channels, 1, 1, writer.shape(x)[3])).astype(np.int8)
        constants = [
            writer.tensor(filters.shape, scale=0.01, data=filters),
            writer.tensor((channels,), Type.INT32, scale=0.0005, data=np.zeros(channels, np.int32)),
        ]
        made = writer.tensor((*writer.shape(x)[:3], channels))
        options = schema.Conv2DOptionsT(strideW=1, strideH=1)
        return writer.operator(Op.CONV_2D, [x, *constants], [made], Options.Conv2DOptions, options, version=3)[0]

    data = writer.tensor((1, 8, 8, 8))
    waiting = conv(data, 16)
    narrow = [conv(conv(data, wide), 4) for wide in (64, 48)]
    total = writer.tensor((1, 8, 8, 4))
    writer.operator(Op.ADD, narrow, [total], Options.AddOptions, schema.AddOptionsT())
    joined = writer.tensor((1, 8, 8, 20))
    options = schema.ConcatenationOptionsT(axis=3)
    writer.operator(Op.CONCATENATION, [waiting, total], [joined], Options.ConcatenationOptions, options)
    return writer.content([data], [joined])


def test_the_arena_shrinks_to_what_has_to_be_alive_at_once() -> None:
    content = towers()
    ordered = memory_ordered(content)
    pixel = 8 * 8
    # Input and output are alive to the end; beside the input stand `waiting`, a large tensor and what becomes of it.
    assert arena_bytes(content) == pixel * (8 + 16 + 64 + 4)
    assert arena_bytes(ordered) == pixel * (8 + 64 + 4)
    assert all_equal(content, ordered)


def all_equal(content: bytes, other: bytes) -> bool:
    feeds = random_feeds(EdgeTpuModel(Model("net", "tflite", content)).graph)
    results = [
        run(file, feeds, every=every, xnnpack=xnnpack)
        for every, xnnpack in ((True, False), (False, False), (False, True))
        for file in (content, other)
    ]
    same = [
        one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one if name)
        for one, two in zip(results[::2], results[1::2], strict=True)
    ]
    return all(same)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(12))
def test_random_networks_compute_the_same_in_no_more(seed: int) -> None:
    content = random_network(seed, operators=16)
    ordered = memory_ordered(content)
    assert arena_bytes(ordered) <= arena_bytes(content)
    assert all_equal(content, ordered)


def test_a_file_that_no_order_helps_stays_as_it_is() -> None:
    content = MOBILENET.read_bytes()
    assert memory_ordered(content) is content


def test_a_stage_runs_in_the_order_and_a_saved_model_keeps_it(tmp_path: Path) -> None:
    model = EdgeTpuModel(Model("net", "tflite", towers()))
    names = model.graph.operator_names
    plain = model.activation_bytes(names, CPU)
    assert plain[0] == plain[1]
    model = EdgeTpuModel(Model("net", "tflite", towers()), order="memory")
    model.save(tmp_path, (), Platform("a desk", (CPU,)))
    loaded = EdgeTpuModel.load(tmp_path)
    assert loaded.activation_bytes(names, CPU) == model.activation_bytes(names, CPU)
    before, after = model.activation_bytes(names, CPU)
    assert after < before == plain[0]
    feeds = random_feeds(model.graph)
    runner = loaded.stage(names, CPU)
    [output] = [port.buffer() for port in runner.outputs]
    runner.run([feeds[port.name] for port in runner.inputs], [output])
    assert (output == run(towers(), feeds, xnnpack=True)[runner.outputs[0].name]).all()


def test_tflite_copies_concatenations() -> None:
    """If this fails, TFLite has learnt to do without, and the page on memory says otherwise."""
    model = EdgeTpuModel(Model("net", "tflite", towers()))
    arena = model.stage_arena(model.graph.operator_names, CPU)
    kinds = [operator.kind for operator in model.graph.operators]
    assert (arena.in_place, arena.copied) == (0, kinds.count("concatenation"))
    assert arena.copied
    assert arena.arena_bytes == arena_bytes(towers())


def test_the_command_lists_both_orders_and_the_bundle_runs(tmp_path: Path, capfd, monkeypatch) -> None:
    (tmp_path / "net.tflite").write_bytes(towers())
    (tmp_path / "desk.toml").write_text(
        'name = "a desk"\n[[device]]\nname = "tpu0"\nbackend = "edgetpu"\ntarget = "cpu"\n'
    )
    bundle = tmp_path / "net.tar"
    arguments = ("--platform", tmp_path / "desk.toml", "-o", bundle, "--memory-order", "--json")
    outcome = run_command(capfd, monkeypatch, "compile", tmp_path / "net.tflite", *arguments)
    [row] = outcome.json["activations"]
    assert (row["stage"], row["device"]) == (0, "tpu0")
    assert row["ordered_bytes"] < row["usual_bytes"]
    with open_bundle(bundle) as opened:
        assert opened.compiled.order == "memory"
