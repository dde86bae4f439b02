"""A backend without hardware: every operator is a numpy function, every device the calling thread.

It keeps the contract of `backends/contract.py` and holds its caller to it: `run` raises where it is called from another
thread than `bind` was, after `close`, or with arrays that are not as its ports say. Devices may lay tensors out in
blocks (`LAYOUTS`), so that pipelines must convert; hooks make operators fail, dawdle or wait.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from tvm_pipeline.backends.contract import (
    Array,
    Backend,
    CompiledModel,
    ModelSlice,
    Order,
    Port,
    Seconds,
    StageRunner,
    loading,
)
from tvm_pipeline.backends.ports import ALIGNMENT, frame_of_noise
from tvm_pipeline.core.graph import Operator, OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage, longest_stages, slice_ends
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlanError, PlatformError

_log = logging.getLogger(__name__)

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


class FakeRunner(StageRunner):
    """Some operators on one device."""

    def __init__(self, model: FakeModel, operators: Sequence[Operator], device: Device) -> None:
        self._model, self._operators, self._device = model, operators, device
        taken, given = slice_ends(model.graph, [operator.name for operator in operators])
        self.inputs = tuple(self._port(tensor.name) for tensor in taken)
        self.outputs = tuple(self._port(tensor.name) for tensor in given)
        self._calls = {operator.name: 0 for operator in operators}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._turn: AbstractContextManager[object] = nullcontext()

    def _port(self, name: str) -> Port:
        tensor = self._model.graph.tensors[name]
        layout = self._model.layouts.get(self._device.name, {}).get(name, "")
        pack, _ = LAYOUTS[layout]
        return Port(name, pack(np.empty(tensor.shape)).shape, tensor.dtype, layout)

    def bind(self) -> None:
        self._check_open("bind")
        self._thread = threading.current_thread()
        error = self._model.bind_errors.get(self._device.name)
        if error:
            raise error

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self._check_open("run")
        if self._thread is not threading.current_thread():
            raise RuntimeError("run was called from another thread than bind")
        for port, array in zip((*self.inputs, *self.outputs), (*inputs, *outputs), strict=True):
            if (array.shape, array.dtype) != (port.shape, np.dtype(port.dtype)):
                raise RuntimeError(f"{port} was given {array.dtype} {array.shape}")
            if not array.flags.c_contiguous or array.ctypes.data % ALIGNMENT:
                raise RuntimeError(f"the array for {port.name} is not contiguous and aligned to 64 bytes")
        tensors = {p.name: LAYOUTS[p.layout][1](array) for p, array in zip(self.inputs, inputs, strict=True)}
        with self._turn:
            for operator in self._operators:
                self.run_operator(operator, tensors)
        for port, array in zip(self.outputs, outputs, strict=True):
            array[...] = LAYOUTS[port.layout][0](tensors[port.name])

    def take_turns(self, turn: AbstractContextManager[object]) -> bool:
        self._turn = turn
        return True

    def run_operator(self, operator: Operator, tensors: dict[str, Array]) -> None:
        hook = self._model.hooks.get((operator.name, self._device.name))
        call = self._calls[operator.name]
        self._calls[operator.name] += 1
        if hook:
            hook(call)
        results = self._model.functions[operator.name](*(tensors[name] for name in operator.inputs))
        for tensor, result in zip(operator.outputs, results, strict=True):
            tensors[tensor.name] = result

    def close(self) -> None:
        self._closed = True
        self._model.open_stages.discard(self)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"{call} was called after close")


class FakeModel(CompiledModel):
    """A graph with a function for each operator: the CompiledModel, and a Slicer whose slices are pickled models.

    Args:
        layouts: by device, how it lays out which tensors; others stand in logical order.
        hooks: by operator and device.
        bind_errors: by device, what `bind` raises.
        refused: by device, the operators that it cannot compute.
        order: as `FakeBackend.compile` was told; it changes nothing here.

    Attributes:
        open_stages: stages that were made and not closed.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        functions: Mapping[str, Function],
        *,
        layouts: Mapping[str, Mapping[str, str]] | None = None,
        hooks: Mapping[tuple[str, str], Hook] | None = None,
        bind_errors: Mapping[str, BaseException] | None = None,
        refused: Mapping[str, Collection[str]] | None = None,
        order: Order = "listed",
    ) -> None:
        self.graph, self.functions = graph, dict(functions)
        self.layouts, self.hooks, self.bind_errors = layouts or {}, hooks or {}, bind_errors or {}
        self.refused = refused or {}
        self.order: Order = order
        self.open_stages: set[FakeRunner] = set()

    def computes(self, device: Device) -> list[str]:
        refused = self.refused.get(device.name, ())
        return [operator.name for operator in self.graph.operators if operator.name not in refused]

    def stage(self, operators: Sequence[str], device: Device) -> FakeRunner:
        check_stage(self.graph, operators)
        unable = sorted(set(operators).difference(self.computes(device)))
        if unable:
            raise PlanError(f"device {device.name} cannot compute operator {unable[0]} of {self.graph.name}")
        runner = FakeRunner(self, [o for o in self.graph.operators if o.name in set(operators)], device)
        self.open_stages.add(runner)
        return runner

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        return 0, 0  # numpy keeps them where it likes

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        seconds = np.full((repeats, len(self.graph)), np.nan)
        for names in longest_stages(self.graph, self.computes(device)):
            runner = self.stage(names, device)
            taken, _ = slice_ends(self.graph, names)
            for row in seconds:
                tensors = {tensor.name: np.ones(tensor.shape, tensor.dtype) for tensor in taken}
                for column, operator in enumerate(self.graph.operators):
                    if operator.name in names:
                        began = time.perf_counter()
                        runner.run_operator(operator, tensors)
                        row[column] = max(time.perf_counter() - began, 1e-9)
            runner.close()
        return seconds

    def slicer(self) -> FakeModel:
        return self

    def cut(self, operators: Collection[str]) -> ModelSlice:
        """Return the operators as a model whose content is this, cut and pickled."""
        check_stage(self.graph, operators)
        inputs, outputs = slice_ends(self.graph, operators)
        chosen = tuple(operator for operator in self.graph.operators if operator.name in set(operators))
        name = f"{self.graph.name}_{chosen[0].name}"
        graph = OperatorGraph(name, inputs, chosen, tuple(tensor.name for tensor in outputs))
        functions = {operator.name: self.functions[operator.name] for operator in chosen}
        return ModelSlice(Model(name, "onnx", pickle.dumps((graph, functions)), inputs), outputs)

    def values(self) -> dict[str, Array]:
        return self._computed(frame_of_noise(self.graph))

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        saved = self.graph, self.functions, self.layouts, self.refused, self.order
        (folder / "model.pickle").write_bytes(pickle.dumps(saved))

    def close(self) -> None:
        if self.open_stages:
            raise RuntimeError(f"{self.graph.name} was closed before its stages: {len(self.open_stages)} are open")

    def unsplit(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the model computes, straight from its functions: the reference for every pipeline."""
        tensors = self._computed(inputs)
        return {name: tensors[name] for name in self.graph.outputs}

    def _computed(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        tensors = dict(inputs)
        for operator in self.graph.operators:
            results = self.functions[operator.name](*(tensors[name] for name in operator.inputs))
            tensors.update(zip((tensor.name for tensor in operator.outputs), results, strict=True))
        return tensors


class FakeBackend(Backend):
    """Finds the devices it is given, and compiles the models it is given, by name, and slices of any FakeModel.

    Args:
        devices: those of "this machine"; a device is known by its name, and by its target where that says one.
        models: those it compiles.
        name: what `Device.backend` calls it.
        cuts: formats of which it says that it cuts files for others.
        serves: other backends whose devices it compiles for as well.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        models: Iterable[FakeModel] = (),
        *,
        name: str = "fake",
        cuts: Sequence[str] = (),
        serves: Sequence[str] = (),
    ) -> None:
        self.name, self.cuts, self.serves = name, tuple(cuts), tuple(serves)
        self._devices = devices
        self._models = {model.graph.name: model for model in models}

    def refuses(self, model: Model) -> str:
        return "" if model.content or model.name in self._models else f"it was not given {model.name}"

    def detect(self) -> Sequence[Device]:
        return self._devices

    def settle(self, device: Device) -> Device:
        if not any(
            device.name == known.name or (device.target and device.target == known.target) for known in self._devices
        ):
            raise PlatformError(f"this machine has no device {device.name}")
        return device

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> FakeModel:
        for device in devices:
            _log.info(f"{model.name} for {device.name}")
        if model.name not in self._models:
            graph, functions = pickle.loads(model.content)
            return FakeModel(graph, functions, order=order)
        found = self._models[model.name]
        if order == found.order:
            return found
        return FakeModel(
            found.graph,
            found.functions,
            layouts=found.layouts,
            hooks=found.hooks,
            refused=found.refused,
            order=order,
        )

    def load(self, folder: Path, devices: Sequence[Device]) -> FakeModel:
        with loading(folder):
            graph, functions, layouts, refused, order = pickle.loads((folder / "model.pickle").read_bytes())
        return FakeModel(graph, functions, layouts=layouts, refused=refused, order=order)

    def versions(self) -> Mapping[str, str]:
        return {self.name: "1"}


def raise_at(call: int, error: BaseException) -> Hook:
    """Return a hook that fails once: at the operator's call of this number (the frame's, where nothing overtakes)."""

    def hook(now: int) -> None:
        if now == call:
            raise error

    return hook


def busy(seconds: float) -> Hook:
    """Return a hook that really computes for at least so long."""
    matrix = np.eye(32)

    def hook(_: int) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            matrix @ matrix

    return hook
