"""Models, plans and platforms for tests of what runs on `tvm_pipeline.testing.FakeBackend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvm_pipeline.backends.batched import BatchedModel
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.runtime import Pipeline, Result
from tvm_pipeline.testing import LAYOUTS, FakeBackend, FakeModel, FakeRunner, Function, Hook, busy, raise_at

__all__ = [
    "LAYOUTS",
    "FakeBackend",
    "FakeModel",
    "FakeRunner",
    "Function",
    "Hook",
    "Mix",
    "busy",
    "chain_model",
    "chain_pipeline",
    "fake_platform",
    "make_plan",
    "number",
    "numbers",
    "raise_at",
    "random_model",
    "values",
    "with_calls_of",
]


@dataclass(frozen=True)
class Mix:
    """An operator on integer matrices in which every element, position and order of the inputs counts."""

    weights: tuple[int, ...]
    outputs: tuple[Tensor, ...]

    def __call__(self, *inputs: Array) -> list[Array]:
        results = []
        for index, tensor in enumerate(self.outputs):
            total = np.full(tensor.shape, index, tensor.dtype)
            for weight, array in zip(self.weights, inputs, strict=True):
                total += (weight * np.resize(np.roll(array, weight + index), tensor.shape)).astype(tensor.dtype)
            results.append(total)
        return results


def random_model(random: np.random.Generator, operators: int, **options: Any) -> FakeModel:
    """Return an integer DAG with one or two inputs, operators of one to three inputs, one or two outputs.

    Every tensor that no operator reads is an output of the model, and so is one that is read, now and then.
    """

    def tensor(name: str) -> Tensor:
        shape = tuple(2 * int(extent) for extent in random.integers(1, 4, size=2))
        return Tensor(name, shape, str(random.choice(["int32", "int64"])))

    inputs = tuple(tensor(f"input{index}") for index in range(random.integers(1, 3)))
    known, unread = [t.name for t in inputs], {}
    nodes: list[Operator] = []
    functions: dict[str, Function] = {}
    for index in range(operators):
        count = min(int(random.integers(1, 4)), len(known))
        read = tuple(str(name) for name in random.choice(known, count, replace=False))
        written = tuple(tensor(f"t{index}.{output}") for output in range(random.integers(1, 3)))
        nodes.append(Operator(f"op{index}", "mix", read, written))
        functions[f"op{index}"] = Mix(tuple(int(w) for w in random.integers(-3, 4, size=count)), written)
        known += [t.name for t in written]
        unread.update(dict.fromkeys(t.name for t in written))
        for name in read:
            if random.random() < 0.9:
                unread.pop(name, None)
    return FakeModel(OperatorGraph("random", inputs, tuple(nodes), tuple(unread)), functions, **options)


def chain_model(operators: int = 2, **options: Any) -> FakeModel:
    """Return `op0` to `opN`, each adding one to the single number `x` of its frame; the output is `y`."""
    names = ["x", *(f"t{index}" for index in range(operators - 1)), "y"]
    tensors = [Tensor(name, (1,), "int64") for name in names]
    nodes = tuple(Operator(f"op{i}", "add", (names[i],), (tensors[i + 1],), macs=1) for i in range(operators))
    graph = OperatorGraph("chain", (tensors[0],), nodes, ("y",))
    return FakeModel(graph, dict.fromkeys((o.name for o in nodes), _add_one), **options)


def _add_one(x: Array) -> list[Array]:
    return [x + 1]


def make_plan(graph: OperatorGraph, *stages: tuple[Sequence[str], Sequence[str]]) -> Plan:
    """Return a plan of (devices, operators) stages; its prediction says nothing."""
    made = tuple(Stage(tuple(devices), tuple(operators)) for devices, operators in stages)
    return Plan(graph.name, "by hand", "throughput", made, Prediction(1.0, 1.0))


def fake_platform(*names: str) -> Platform:
    return Platform("fake machine", tuple(Device(name, "fake") for name in names))


def chain_pipeline(model: FakeModel, **options: Any) -> Pipeline:
    """Return a pipeline with each operator on a device of its own: op0 on d0, op1 on d1 ..."""
    names = [f"d{index}" for index in range(len(model.graph))]
    stages = [([device], [operator.name]) for device, operator in zip(names, model.graph.operators, strict=True)]
    return Pipeline(model, make_plan(model.graph, *stages), fake_platform(*names), **options)


def number(value: int) -> Array:
    """Return a frame of a chain model."""
    return np.array([value])


def numbers(count: int) -> Iterator[Array]:
    return map(number, range(count))


def values(results: Sequence[Result]) -> list[int]:
    """Return the outputs `y` of a chain model, after a check that every frame came once and in order."""
    assert [result.frame for result in results] == list(range(len(results)))
    return [int(result.outputs["y"][0]) for result in results]


def with_calls_of(batch: int, model: FakeModel) -> BatchedModel:
    """Return a fake model whose calls compute so many frames, each as `model` does."""
    graph = model.graph
    wide = OperatorGraph(
        graph.name,
        tuple(tensor.times(batch) for tensor in graph.inputs),
        tuple(replace(o, outputs=tuple(t.times(batch) for t in o.outputs)) for o in graph.operators),
        graph.outputs,
    )

    def of_each(function: Function) -> Function:
        def run(*arrays: Array) -> list[Array]:
            frames = zip(*(np.split(array, batch) for array in arrays), strict=True)
            return [np.concatenate(parts) for parts in zip(*(function(*frame) for frame in frames), strict=True)]

        return run

    functions = {name: of_each(function) for name, function in model.functions.items()}
    return BatchedModel(FakeModel(wide, functions, layouts=model.layouts, hooks=model.hooks), batch)
