"""Kernels in the order of least memory: less of it, equal bits; as slices, as the pass MemoryOrder, and in a bundle."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("tvm")

from tests.support.examples import examples
from tests.support.networks import Weights, as_model, image, module_of
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.memory_order import MemoryOrder, planned_bytes
from tvm_pipeline_tvm.relay.slicing import SliceGraph

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip


def towers(w: Weights) -> relay.Expr:
    """A tensor that waits while others are made by way of large ones; as written, the one that waits is the first."""
    data = image(channels=8)
    waiting = w.conv(data, 32, 1)
    narrow = [w.conv(w.conv(data, channels, 1), 4, 1) for channels in (64, 48)]
    narrow[1] = relay.reshape(relay.nn.softmax(relay.reshape(narrow[1], (4, 256))), (1, 4, 16, 16))
    return relay.concatenate([waiting, *narrow], axis=1)


def module(network: Callable[[Weights], relay.Expr]) -> tuple[tvm.IRModule, dict[str, Any]]:
    weights = Weights()
    body = network(weights)
    return module_of(body), weights.params


@pytest.fixture(scope="module")
def model(target: str) -> RelayModel:
    return RelayModel.compile(as_model("towers", *module(towers)), [target], lambda _: None)


def as_written(model: RelayModel) -> RelayModel:
    return RelayModel(model.graph.name, list(model.libraries.values()), lambda _: None)


def in_order(model: RelayModel) -> RelayModel:
    return RelayModel(model.graph.name, list(model.libraries.values()), lambda _: None, order="memory")


def least_bytes(part: SliceGraph) -> int:
    """The most bytes in the arena at once in the best of all orders that can run: tried one by one.

    It reads the slice's own graph: kernels that run are the nodes with a function, and those called `__nop` show the
    bytes of what they read.
    """
    graph = json.loads(part.graph_json)
    rows, nodes = graph["node_row_ptr"], graph["nodes"]
    shown = list(range(rows[-1]))
    for position, node in enumerate(nodes):
        if node["op"] != "null" and node["attrs"]["func_name"] == "__nop":
            producer, index, _ = node["inputs"][0]
            shown[rows[position]] = shown[rows[producer] + index]
    runs = [n for n, node in enumerate(nodes) if node["op"] != "null" and node["attrs"]["func_name"] != "__nop"]
    reads = {n: {shown[rows[producer] + index] for producer, index, _ in nodes[n]["inputs"]} for n in runs}
    writes = {n: set(range(rows[n], rows[n + 1])) for n in runs}
    computed = set().union(*writes.values())
    size = {e: -(-int(np.prod(part.shapes[e])) * np.dtype(part.dtypes[e]).itemsize // 64) * 64 for e in computed}
    held = set(part.copied.values())

    def orders(done: tuple[int, ...], known: frozenset[int]) -> Iterator[tuple[int, ...]]:
        if len(done) == len(runs):
            yield done
        for n in runs:
            if n not in done and (reads[n] & computed) <= known:
                yield from orders((*done, n), known | writes[n])

    def most(order: tuple[int, ...]) -> int:
        last = {e: max(order.index(n) for n in runs if e in reads[n] | writes[n]) for e in computed}
        first = {e: next(place for place, n in enumerate(order) if e in writes[n]) for e in computed}
        inside = [e for e in computed if e in part.offsets]
        return max(
            sum(size[e] for e in inside if first[e] <= place and (place <= last[e] or e in held))
            for place in range(len(order))
        )

    return min(map(most, orders((), frozenset())))


@pytest.mark.thorough
def test_a_slice_takes_less_and_computes_the_same(model: RelayModel, cpu: Device) -> None:
    plain, ordered = (
        as_written(model).cut(model.graph.operator_names, cpu),
        in_order(model).cut(model.graph.operator_names, cpu),
    )
    assert plain.unordered_bytes == plain.activation_bytes == ordered.unordered_bytes
    assert ordered.activation_bytes < plain.activation_bytes
    frame = random_frame(model.graph.inputs)
    outputs = [
        model_outputs(m, run_stages(m, [(m.graph.operator_names, cpu)], frame))
        for m in (as_written(model), in_order(model))
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    # Every kernel counts to the operator that it counted to.
    assert Counter(name for _, name in ordered.operator_nodes) == Counter(name for _, name in plain.operator_nodes)
    assert [node for node, _ in ordered.operator_nodes] == sorted(node for node, _ in ordered.operator_nodes)


@pytest.mark.thorough
def test_no_order_needs_less(model: RelayModel, cpu: Device) -> None:
    plain, ordered = model.cut(model.graph.operator_names, cpu), in_order(model).cut(model.graph.operator_names, cpu)
    assert ordered.activation_bytes == least_bytes(plain) < plain.activation_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["towers", "shapes"])
def test_every_cut_is_bit_exact_and_takes_no_more(
    name: str, model: RelayModel, compiled: Callable[..., RelayModel], cpu: Device
) -> None:
    plain = model if name == "towers" else compiled(name)
    ordered = in_order(plain)
    frame = random_frame(plain.graph.inputs)

    @examples(10)
    @given(st.integers(0, 2**32), st.integers(1, 3))
    def check(seed: int, stages: int) -> None:
        cut = random_stages(plain.graph, Random(seed), stages)
        tensors = [run_stages(m, [(part, cpu) for part in cut], frame) for m in (plain, ordered)]
        for tensor, (_, array) in tensors[0].items():
            np.testing.assert_array_equal(tensors[1][tensor][1], array)
        for part in cut:
            before, after = ordered.activation_bytes(part, cpu)
            assert plain.activation_bytes(part, cpu) == (before, before)
            assert after <= before

    check()


def test_operators_are_timed_in_the_new_order(model: RelayModel, cpu: Device) -> None:
    seconds = in_order(model).time_operators(cpu, 3)
    assert seconds.shape == (3, len(model.graph))
    assert (seconds > 1e-9).all()


def test_a_saved_model_keeps_its_order(model: RelayModel, cpu: Device, tmp_path: Path) -> None:
    for ordered in (False, True):
        folder = tmp_path / str(ordered)
        folder.mkdir()
        (in_order(model) if ordered else as_written(model)).save(folder)
        loaded = RelayModel.load(folder, lambda _: None)
        before, after = loaded.activation_bytes(model.graph.operator_names, cpu)
        assert (after < before) == ordered


# The pass


def dense(x: relay.Expr, units: int, seed: int) -> relay.Expr:
    read = int(relay.transform.InferTypeLocal(x).shape[1])
    weights = np.random.default_rng(seed).standard_normal((units, read)) / np.sqrt(read)
    return relay.nn.dense(x, relay.const(weights.astype("float32")))


def test_the_pass_binds_kernels_in_the_least_order() -> None:
    """`waiting` (1 KiB) after `wide` (2 KiB) has become `narrow` (1 KiB): no other order does without 4 KiB."""
    data = relay.var("data", shape=(8, 16))
    calls = {"waiting": dense(data, 32, 0), "wide": dense(data, 64, 1)}
    calls["narrow"] = dense(calls["wide"], 32, 2)
    calls["joined"] = relay.nn.dense(calls["waiting"], calls["narrow"])
    mod = tvm.IRModule.from_expr(relay.Function([data], calls["joined"]))

    bound = {name: relay.Var(name) for name in ("wide", "narrow", "waiting", "joined")}
    body: relay.Expr = bound["joined"]
    for name in reversed(bound):
        arguments = calls[name].args
        types = [relay.transform.InferTypeLocal(argument) for argument in arguments]
        parameters = [relay.Var("p", type_) for type_ in types]
        kernel = relay.Function(parameters, relay.Call(calls[name].op, parameters, calls[name].attrs))
        kernel = kernel.with_attr("Primitive", tvm.tir.IntImm("int32", 1))
        read = [next((bound[n] for n in bound if calls[n].same_as(argument)), argument) for argument in arguments]
        body = relay.Let(bound[name], relay.Call(kernel, read), body)
    expected = tvm.IRModule.from_expr(relay.Function([data], body))
    tvm.ir.assert_structural_equal(bare(MemoryOrder()(mod)), bare(expected))


def bare(mod: tvm.IRModule) -> tvm.IRModule:
    """Without the hash that FuseOps writes on its functions."""

    class Bare(relay.ExprMutator):
        def visit_function(self, function: relay.Function) -> relay.Function:
            made = relay.Function(function.params, self.visit(function.body))
            return made.with_attr("Primitive", tvm.tir.IntImm("int32", 1))

    main = mod["main"]
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(main.params, Bare().visit(main.body))))


def leaning() -> tvm.IRModule:
    """As written, all of `first` are made before one is read: last(1, last(2, ... last(7, 8))). Three could do."""
    data = relay.var("data", shape=(8, 16))
    first = [relay.nn.softmax(dense(data, 64, seed)) for seed in range(8)]
    last = first.pop()
    for index, other in enumerate(reversed(first)):
        last = dense(relay.add(other, last), 64, 8 + index)
    function = relay.Function([data], relay.Tuple([last, relay.reshape(last, (512,))]))
    return relay.transform.InferType()(tvm.IRModule.from_expr(function))


def allocated(graph: dict[str, Any]) -> dict[str, int]:
    """Bytes of each storage that the kernels of a graph JSON write."""
    rows, attributes = graph["node_row_ptr"], graph["attrs"]
    sizes: dict[str, int] = {}
    for position, node in enumerate(graph["nodes"]):
        for entry in range(rows[position], rows[position + 1]) if node["op"] != "null" else ():
            storage = attributes["storage_id"][1][entry]
            size = int(np.prod(attributes["shape"][1][entry])) * np.dtype(attributes["dltype"][1][entry]).itemsize
            sizes[storage] = max(sizes.get(storage, 0), size)
    return sizes


@pytest.mark.thorough
def test_stock_relay_build_keeps_the_order_and_plans_less() -> None:
    mod, results, graphs = leaning(), [], []
    ordered = MemoryOrder()(mod)
    for one in (mod, ordered):
        with tvm.transform.PassContext(opt_level=1):
            library = relay.build(one, "llvm")
        executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
        executor.run(data=np.random.default_rng(0).standard_normal((8, 16)).astype("float32"))
        results.append([executor.get_output(index).numpy() for index in range(2)])
        graphs.append(json.loads(library.get_graph_json()))
    np.testing.assert_array_equal(*(result[0] for result in results))
    np.testing.assert_array_equal(*(result[1] for result in results))
    before, after = (sum(allocated(graph).values()) for graph in graphs)
    assert after == planned_bytes(ordered) <= before / 2
    # The executor runs what the lets bind, in their order.
    shapes, body = [], ordered["main"].body
    while isinstance(body, relay.Let):
        shapes.append([int(extent) for extent in body.var.checked_type.shape])
        body = body.body
    rows, attributes = graphs[1]["node_row_ptr"], graphs[1]["attrs"]
    ran = [rows[position] for position, node in enumerate(graphs[1]["nodes"]) if node["op"] != "null"]
    assert [attributes["shape"][1][entry] for entry in ran] == shapes


def test_the_pass_leaves_alone_what_does_not_get_smaller() -> None:
    mod = tvm.IRModule.from_expr(relay.Function([data := relay.var("data", shape=(8, 16))], dense(data, 4, 0)))
    tvm.ir.assert_structural_equal(MemoryOrder()(mod), mod)
