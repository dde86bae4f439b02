"""The contract reads as documentation: its example runs, few members must be written, and the others have defaults."""

from __future__ import annotations

import ast
import doctest
import inspect
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.guards.sources import BACKENDS, CORE, files, name, tree
from tests.support.fake_backend import chain_model
from tvm_pipeline.backends import contract
from tvm_pipeline.backends.contract import (
    Array,
    Backend,
    CompiledModel,
    Delegating,
    Order,
    Port,
    Seconds,
    StageRunner,
)
from tvm_pipeline.backends.operator_timing import OperatorTimer
from tvm_pipeline.backends.ports import input_for_timing, noise
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage, slice_ends
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, OptionError, PlatformError
from tvm_pipeline.testing import FakeModel, check_backend

BASES = (Backend, CompiledModel, StageRunner)


def members(base: type) -> set[str]:
    """Return the names of what a class of the contract has."""
    return {name for name in (*vars(base), *inspect.get_annotations(base)) if not name.startswith("_")}


def to_write(base: type) -> set[str]:
    """Return the members that have no default: abstract methods, and attributes without a value."""
    abstract: frozenset[str] = base.__abstractmethods__  # type: ignore[attr-defined]
    return {name for name in members(base) if name in abstract or not hasattr(base, name)}


def test_the_example_runs() -> None:
    tried = doctest.testmod(contract)
    assert tried.attempted > 10
    assert tried.failed == 0


def test_a_new_backend_writes_twelve_members() -> None:
    assert sum(len(to_write(base)) for base in BASES) <= 12


# ------------------------------------------------------------------------------- a backend of these members, no others


class LeastStage(StageRunner):
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def __init__(self, model: FakeModel, operators: Sequence[str]) -> None:
        self._model, self._operators = model, operators
        self.inputs, self.outputs = (tuple(map(Port.of, ends)) for ends in slice_ends(model.graph, operators))

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        tensors = {port.name: array for port, array in zip(self.inputs, inputs, strict=True)}
        for operator in self._model.graph.operators:
            if operator.name in self._operators:
                results = self._model.functions[operator.name](*(tensors[name] for name in operator.inputs))
                tensors.update(zip((tensor.name for tensor in operator.outputs), results, strict=True))
        for port, array in zip(self.outputs, outputs, strict=True):
            array[...] = tensors[port.name]


class LeastModel(CompiledModel):
    graph: OperatorGraph
    order: Order

    def __init__(self, model: FakeModel, order: Order) -> None:
        self.graph, self.order, self._model = model.graph, order, model
        self._timer = OperatorTimer(model.graph, self.stage, model.values)

    def stage(self, operators: Sequence[str], device: Device) -> LeastStage:
        check_stage(self.graph, operators)
        return LeastStage(self._model, operators)

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        return self._timer.seconds(device, repeats)

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        (folder / "model").write_bytes(pickle.dumps((self.graph, self._model.functions, self.order)))


class LeastBackend(Backend):
    name = "least"

    def detect(self) -> Sequence[Device]:
        return [Device("npu0", self.name, target="a"), Device("npu1", self.name, target="b", stand_in="numpy")]

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> LeastModel:
        return LeastModel(chain_model(4), order)

    def load(self, folder: Path, devices: Sequence[Device]) -> LeastModel:
        try:
            graph, functions, order = pickle.loads((folder / "model").read_bytes())
        except OSError as error:
            raise BundleError(f"{folder}: {error}") from error
        return LeastModel(FakeModel(graph, functions), order)


def test_a_backend_of_these_members_keeps_the_contract() -> None:
    written = [members(own) for own in (LeastBackend, LeastModel, LeastStage)]
    assert written == [to_write(base) for base in BASES]
    check_backend(LeastBackend(), Model("chain", "onnx", b""))


def test_a_device_is_settled_by_its_target() -> None:
    backend = LeastBackend()
    assert backend.settle(Device("mine", "least", target="b", memory_bytes=9)) == Device(
        "mine", "least", target="b", memory_bytes=9, stand_in="numpy"
    )
    for target in ("", "c"):
        with pytest.raises(PlatformError, match=r"device mine: .* targets of this machine: a, b"):
            backend.settle(Device("mine", "least", target=target))


def test_what_only_some_backends_can_is_refused_with_the_next_step() -> None:
    backend, model, [device, _] = LeastBackend(), Model("chain", "onnx", b""), LeastBackend().detect()
    with pytest.raises(PlatformError, match=r"compiles on the machine that has the device alone\. Run"):
        backend.settle_elsewhere(device)
    with pytest.raises(PlatformError, match="the backend least tunes no kernels"):
        backend.tune(model, device, 1.0)
    with pytest.raises(OptionError, match="the backend least cannot rewrite chain, which is onnx; compile without it"):
        backend.rewriting(model)


def test_tensors_alive_at_one_time_count_as_activations() -> None:
    """Each operator of the chain reads eight bytes and writes eight."""
    compiled = LeastModel(chain_model(4), "listed")
    names = compiled.graph.operator_names
    whole, _ = compiled.activation_bytes(names, Device("npu0", "least"))
    assert whole == 16 + 8  # the input stays, since the runtime owns its buffer


# ------------------------------------------------------------------------------------------------------------ wrappers


class Recorder:
    """Answers every method of a CompiledModel, and remembers with what it was called."""

    graph, order = chain_model(2).graph, "memory"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def called(*given: object) -> object:
            self.calls.append((name, given))
            return name

        return called


METHODS = sorted(name for name in members(CompiledModel) if inspect.isfunction(vars(CompiledModel).get(name)))
# Arguments by the name of their parameter.
GIVEN: dict[str, object] = {
    "operators": ["op1"],
    "device": Device("d0", "fake"),
    "devices": [Device("d0", "fake"), Device("d1", "fake")],
    "repeats": 3,
    "sizes_bytes": [1, 2],
    "folder": Path("folder"),
    "stages": [Stage(("d0",), ("op0", "op1"))],
    "platform": Platform("box", (Device("d0", "fake"),)),
    "progress": print,
    "refused": {"llvm": {"op0": "no"}},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_wrapper_hands_on_every_member(method: str) -> None:
    inner: Any = Recorder()
    wrapper = Delegating(inner)
    assert (wrapper.graph, wrapper.order) == (inner.graph, inner.order)
    given = [GIVEN[name] for name in inspect.signature(getattr(CompiledModel, method)).parameters if name != "self"]
    answer = getattr(wrapper, method)(*given)
    assert inner.calls == [(method, tuple(given))]
    assert answer == (None if inspect.signature(getattr(CompiledModel, method)).return_annotation == "None" else method)


def test_the_members_of_a_wrapper_are_methods_but_for_two() -> None:
    assert members(CompiledModel) == {*METHODS, "graph", "order"}


def test_a_wrapper_translates_its_devices_and_operators() -> None:
    class Renamed(Delegating):
        def inner_device(self, device: Device) -> Device:
            return replace(device, name=f"inner-{device.name}")

        def inner_operators(self, operators: Sequence[str]) -> list[str]:
            return [f"inner {operator}" for operator in operators]

    for method in METHODS:
        inner: Any = Recorder()
        parameters = inspect.signature(getattr(CompiledModel, method)).parameters
        getattr(Renamed(inner), method)(*(GIVEN[name] for name in parameters if name != "self"))
        [(_, given)] = inner.calls
        told = dict(zip([name for name in parameters if name != "self"], given, strict=True))
        assert told.get("operators", ["inner op1"]) == ["inner op1"]
        assert told.get("device", Device("inner-d0", "fake")) == Device("inner-d0", "fake")
        for device in (*told.get("devices", ()), *(told["platform"].devices if "platform" in told else ())):
            assert device.name.startswith("inner-d")
        for stage in told.get("stages", ()):
            assert stage.operators == ("inner op0", "inner op1")


@pytest.mark.thorough
def test_nobody_looks_for_members_by_a_text() -> None:
    """A member of the contract is there: no `getattr` asks for one, and no class answers for names that it lacks."""
    names = set().union(*map(members, BASES)) - {"name", "close"}  # which objects of other kinds have, too
    found = []
    for path in files(CORE, BACKENDS):
        text = path.read_text()
        for node in ast.walk(tree(path)) if "getattr" in text or "hasattr" in text else ():
            if isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "__getattr__" for part in node.body):
                found.append(f"{name(path)}: {node.name} has __getattr__")
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("getattr", "hasattr"):
                continue
            if isinstance(node.args[1], ast.Constant) and node.args[1].value in names:
                found.append(f"{name(path)}: {ast.unparse(node)}")
    assert found == []


# --------------------------------------------------------------------------------------------------------------- ports


def test_integers_of_other_operators_are_zero_where_a_stage_is_timed() -> None:
    """They may be indices into a tensor; what the model itself is given stays noise."""
    graph = chain_model(3).graph
    own, inner = (Port(name, (100,), "int64") for name in ("x", "t0"))
    assert np.array_equal(input_for_timing(graph, own), noise(own))
    assert noise(inner).any()
    assert not input_for_timing(graph, inner).any()
    floats = replace(inner, dtype="float32")
    assert np.array_equal(input_for_timing(graph, floats), noise(floats))
