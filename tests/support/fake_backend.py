"""A backend without hardware: every operator is a numpy function, every device the calling thread.

It keeps the contract of `tvm_pipeline/backend.py` and holds its caller to it: `run` raises where it is called from
another thread than `bind` was, or with arrays that are not as its ports say. Devices may lay tensors out in blocks
(`LAYOUTS`), so that pipelines must convert; hooks make operators fail, dawdle or wait.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.contract import Array, CompiledModel, Port, Progress
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.runtime import Pipeline, Result

# An operator: arrays in the order of its inputs, to arrays in the order of its outputs.
Function = Callable[..., Sequence[Array]]
# Called before an operator runs, with how often it ran before on this device.
Hook = Callable[[int], None]

# How a matrix (even extents) may lie in memory: what packs it, what unpacks it. Written out, so that they are
# independent of `tvm_pipeline.core.tensor_layout`.
LAYOUTS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "": (lambda x: x, lambda x: x),
    "AB2a": (
        lambda x: x.reshape(x.shape[0] // 2, 2, x.shape[1]).transpose(0, 2, 1),
        lambda x: x.transpose(0, 2, 1).reshape(-1, x.shape[1]),
    ),
    "AB2a2b": (
        lambda x: x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2).transpose(0, 2, 1, 3),
        lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0] * 2, x.shape[1] * 2),
    ),
}


class FakeRunner:
    """Some operators on one device."""

    def __init__(self, model: FakeModel, operators: Sequence[Operator], device: Device) -> None:
        self._model, self._operators, self._device = model, operators, device
        written = {tensor.name for operator in operators for tensor in operator.outputs}
        read = dict.fromkeys(name for operator in operators for name in operator.inputs)
        inside = {operator.name for operator in operators}
        wanted = set(model.graph.outputs).union(
            *(operator.inputs for operator in model.graph.operators if operator.name not in inside)
        )
        self.inputs = tuple(self._port(name) for name in read if name not in written)
        self.outputs = tuple(
            self._port(tensor.name) for o in operators for tensor in o.outputs if tensor.name in wanted
        )
        self._calls = dict.fromkeys(inside, 0)
        self._thread: threading.Thread | None = None

    def _port(self, name: str) -> Port:
        tensor = self._model.graph.tensors[name]
        layout = self._model.layouts.get(self._device.name, {}).get(name, "")
        pack, _ = LAYOUTS[layout]
        return Port(name, pack(np.empty(tensor.shape)).shape, tensor.dtype, layout)

    def bind(self) -> None:
        self._thread = threading.current_thread()
        error = self._model.bind_errors.get(self._device.name)
        if error:
            raise error

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        if self._thread is not threading.current_thread():
            raise RuntimeError("run was called from another thread than bind")
        for port, array in zip((*self.inputs, *self.outputs), (*inputs, *outputs), strict=True):
            if (array.shape, array.dtype) != (port.shape, np.dtype(port.dtype)):
                raise RuntimeError(f"{port} was given {array.dtype} {array.shape}")
            if not array.flags.c_contiguous or array.ctypes.data % 64:
                raise RuntimeError(f"the array for {port.name} is not contiguous and aligned to 64 bytes")
        tensors = {p.name: LAYOUTS[p.layout][1](array) for p, array in zip(self.inputs, inputs, strict=True)}
        for operator in self._operators:
            self._run_operator(operator, tensors)
        for port, array in zip(self.outputs, outputs, strict=True):
            array[...] = LAYOUTS[port.layout][0](tensors[port.name])

    def _run_operator(self, operator: Operator, tensors: dict[str, Array]) -> None:
        hook = self._model.hooks.get((operator.name, self._device.name))
        call = self._calls[operator.name]
        self._calls[operator.name] += 1
        if hook:
            hook(call)
        results = self._model.functions[operator.name](*(tensors[name] for name in operator.inputs))
        for tensor, result in zip(operator.outputs, results, strict=True):
            tensors[tensor.name] = result


class FakeModel:
    """A graph with a function for each operator: the CompiledModel.

    Args:
        layouts: by device, how it lays out which tensors; others stand in logical order.
        hooks: by operator and device.
        bind_errors: by device, what `bind` raises.
    """

    memory_ordered = False

    def __init__(
        self,
        graph: OperatorGraph,
        functions: Mapping[str, Function],
        *,
        layouts: Mapping[str, Mapping[str, str]] | None = None,
        hooks: Mapping[tuple[str, str], Hook] | None = None,
        bind_errors: Mapping[str, BaseException] | None = None,
    ) -> None:
        self.graph, self.functions = graph, dict(functions)
        self.layouts, self.hooks, self.bind_errors = layouts or {}, hooks or {}, bind_errors or {}

    def stage(self, operators: Sequence[str], device: Device) -> FakeRunner:
        check_stage(self.graph, operators)
        chosen = set(operators)
        return FakeRunner(self, [o for o in self.graph.operators if o.name in chosen], device)

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        return 0, 0  # numpy keeps them where it likes

    def time_operators(self, device: Device, repeats: int) -> npt.NDArray[np.float64]:
        seconds = np.empty((repeats, len(self.graph)))
        for row in seconds:
            tensors = {t.name: np.ones(t.shape, t.dtype) for t in self.graph.inputs}
            runner = self.stage([operator.name for operator in self.graph.operators], device)
            for column, operator in enumerate(self.graph.operators):
                began = time.perf_counter()
                runner._run_operator(operator, tensors)
                row[column] = max(time.perf_counter() - began, 1e-9)
        return seconds

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        (folder / "model.pickle").write_bytes(pickle.dumps((self.graph, self.functions, self.layouts)))

    def unsplit(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """What the model computes, straight from its functions: the reference for every pipeline."""
        tensors = dict(inputs)
        for operator in self.graph.operators:
            results = self.functions[operator.name](*(tensors[name] for name in operator.inputs))
            tensors.update(zip((tensor.name for tensor in operator.outputs), results, strict=True))
        return {name: tensors[name] for name in self.graph.outputs}


class FakeBackend:
    """Finds the devices it is given, and compiles the models it is given, by name."""

    name = "fake"
    leads = False

    def __init__(self, devices: Sequence[Device], models: Iterable[FakeModel] = ()) -> None:
        self._devices = devices
        self._models = {model.graph.name: model for model in models}

    def refuses(self, model: Model) -> str:
        return "" if model.name in self._models else f"it was not given {model.name}"

    def detect(self) -> Sequence[Device]:
        return self._devices

    def settle(self, device: Device) -> Device:
        if device.name not in {known.name for known in self._devices}:
            raise PlatformError(f"this machine has no device {device.name}")
        return device

    def compile(self, model: Model, devices: Sequence[Device], progress: Progress) -> FakeModel:
        for device in devices:
            progress(f"{model.name} for {device.name}")
        return self._models[model.name]

    def share(self, residents: Sequence[tuple[CompiledModel, Sequence[Stage]]], platform: Platform) -> None:
        pass

    def load(self, folder: Path) -> FakeModel:
        graph, functions, layouts = pickle.loads((folder / "model.pickle").read_bytes())
        return FakeModel(graph, functions, layouts=layouts)

    def versions(self) -> Mapping[str, str]:
        return {"fake": "1"}


def raise_at(call: int, error: BaseException) -> Hook:
    """A hook that fails once: at the operator's call of this number (the frame's, where nothing overtakes)."""

    def hook(now: int) -> None:
        if now == call:
            raise error

    return hook


def busy(seconds: float) -> Hook:
    """A hook that really computes for at least so long."""
    matrix = np.eye(32)

    def hook(_: int) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            matrix @ matrix

    return hook


# Models and plans


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
    """An integer DAG with one or two inputs, operators of one to three inputs and one or two outputs.

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
    """`op0` to `opN`, each adding one to the single number `x` of its frame; the output is `y`."""
    names = ["x", *(f"t{index}" for index in range(operators - 1)), "y"]
    tensors = [Tensor(name, (1,), "int64") for name in names]
    nodes = tuple(Operator(f"op{i}", "add", (names[i],), (tensors[i + 1],), macs=1) for i in range(operators))
    graph = OperatorGraph("chain", (tensors[0],), nodes, ("y",))
    return FakeModel(graph, dict.fromkeys((o.name for o in nodes), _add_one), **options)


def _add_one(x: Array) -> list[Array]:
    return [x + 1]


def make_plan(graph: OperatorGraph, *stages: tuple[Sequence[str], Sequence[str]]) -> Plan:
    """A plan of (devices, operators) stages; its prediction says nothing."""
    made = tuple(Stage(tuple(devices), tuple(operators)) for devices, operators in stages)
    return Plan(graph.name, "by hand", "throughput", made, Prediction(1.0, 1.0))


def fake_platform(*names: str) -> Platform:
    return Platform("fake machine", tuple(Device(name, "fake") for name in names))


def chain_pipeline(model: FakeModel, **options: Any) -> Pipeline:
    """Each operator on a device of its own: op0 on d0, op1 on d1 ..."""
    names = [f"d{index}" for index in range(len(model.graph))]
    stages = [([device], [operator.name]) for device, operator in zip(names, model.graph.operators, strict=True)]
    return Pipeline(model, make_plan(model.graph, *stages), fake_platform(*names), **options)


def number(value: int) -> Array:
    """A frame of a chain model."""
    return np.array([value])


def numbers(count: int) -> Iterator[Array]:
    return map(number, range(count))


def values(results: Sequence[Result]) -> list[int]:
    """The outputs `y` of a chain model, after a look at the order: every frame from the first one, once."""
    assert [result.frame for result in results] == list(range(len(results)))
    return [int(result.outputs["y"][0]) for result in results]
