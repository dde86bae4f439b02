"""Whether a backend keeps the contract: `check_backend` compiles a model, cuts it, runs it, saves it and closes it.

The model's results on one device are the reference: a backend may round as it likes, but every cut of the model has to
give what the whole gives there. Each check is a method of `_Check`, in the order in which a program meets them.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np

from tvm_pipeline.backends.contract import Array, Backend, CompiledModel, Order, StageRunner
from tvm_pipeline.backends.ports import frame_of_noise, input_for_timing
from tvm_pipeline.backends.sliced import SlicedModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.number_types import widened
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.tensor_layout import logical_shape
from tvm_pipeline.errors import BundleError, PipelineError, PlanError
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.profiling.computed import computed_runner, computed_stages
from tvm_pipeline.runtime import Pipeline
from tvm_pipeline.testing.cut_cases import around, buffers, fill, halves, logical, reshaped

T = TypeVar("T")
FRAMES = 6
SIZES = (4096, 65536)


class ContractError(AssertionError):
    """A backend does not keep the contract; the message says which part, and what it did instead."""


def check_backend(
    backend: Backend,
    model: Model,
    devices: Sequence[Device] | None = None,
    *,
    tolerance: float = 0.0,
) -> None:
    """Check that a backend keeps the contract of `tvm_pipeline.backends.contract`.

    Args:
        backend: the object that the entry point names.
        model: one that the backend compiles; a branch, several outputs and integers make the checks sharper.
        devices: what it is to compile for; what `detect` finds, unless given.
        tolerance: how far results of a model that was cut may be from those of the whole, relative and absolute;
            0 asks for equal bits.

    Raises:
        ContractError: the first part of the contract that does not hold.
    """
    check = _Check(backend, model, tolerance)
    check.describes_itself()
    settled = check.settles(list(backend.detect()) if devices is None else list(devices))
    check.accepts()
    for order in ("listed", "memory"):
        with closing(check.compiles(settled, order)) as compiled:
            frame = check.frame(compiled.graph)
            able = check.computes_all(compiled, settled)
            expected = {device.name: check.computes(compiled, device, frame) for device in able}
            if order == "listed":
                listed = expected
                for device in settled:
                    check.refuses_what_is_no_stage(compiled, device)
                    check.measures(compiled, device)
                for device in able:
                    check.cuts(compiled, device, frame, expected[device.name])
                check.runs_in_pipelines(compiled, able, frame)
                check.slices_files(compiled, able, frame, expected)
                check.shares(compiled, able)
            check.is_equal(expected[able[0].name], listed[able[0].name], f"order={order!r} changes results")
            check.saves_and_loads(compiled, settled, frame, expected)
        compiled.close()  # closing twice must do nothing
    backend.close()
    with closing(check.compiles(settled, "listed")):
        pass  # a backend that was closed takes up again


class _Check:
    """The checks of one backend and model."""

    def __init__(self, backend: Backend, model: Model, tolerance: float) -> None:
        self._backend, self._model, self._tolerance = backend, model, tolerance

    def describes_itself(self) -> None:
        name = self._backend.name
        self._expect(name.split() == [name], f"its name is {name!r}; a name is one word")
        versions = self._backend.versions()
        self._expect(
            all(isinstance(k, str) and isinstance(v, str) for k, v in versions.items()),
            f"versions() gives {dict(versions)}; software and versions are strings",
        )
        self._expect(not isinstance(self._backend.cuts, str), "cuts is a string; it is a sequence of formats")
        self._expect(not isinstance(self._backend.serves, str), "serves is a string; it is a sequence of names")

    def settles(self, devices: list[Device]) -> list[Device]:
        self._expect(bool(devices), "detect() finds no device here; give `devices` to check_backend")
        names = [device.name for device in devices]
        self._expect(len(set(names)) == len(names), f"two devices bear one name: {names}")
        settled = []
        for device in devices:
            self._expect(
                device.backend == self._backend.name,
                f"device {device.name} says that its backend is {device.backend}",
            )
            here = self._backend.settle(device)
            self._expect(
                (here.name, here.backend, here.cores) == (device.name, device.backend, device.cores),
                f"settle() turns {device} into {here}; it only fills in what the platform left open",
            )
            again = self._backend.settle(here)
            self._expect(again == here, f"settle() turns a settled device {here} into {again}")
            settled.append(here)
        return settled

    def accepts(self) -> None:
        reason = self._backend.refuses(self._model)
        self._expect(not reason, f"refuses() says of {self._model.name}: {reason}; check with a model that it compiles")

    def compiles(self, devices: Sequence[Device], order: Order) -> CompiledModel:
        compiled = self._backend.compile(self._model, devices, order)
        self._expect(
            compiled.order == order, f"compile(..., order={order!r}) gives a model of order {compiled.order!r}"
        )
        inputs = {tensor.name: tensor for tensor in compiled.graph.inputs}
        for tensor in self._model.inputs:
            self._expect(
                inputs.get(tensor.name) == tensor,
                f"the model's input {tensor} is {inputs.get(tensor.name)} in the compiled graph",
            )
        self._expect(len(compiled.graph) > 0, "the compiled graph has no operators")
        return compiled

    def frame(self, graph: OperatorGraph) -> dict[str, Array]:
        return frame_of_noise(graph)

    def computes(self, compiled: CompiledModel, device: Device, frame: Mapping[str, Array]) -> dict[str, Array]:
        """Run the whole model as one stage: twice on its first buffers, then on others, as a pipeline's slots are."""
        graph, where = compiled.graph, f"device {device.name}: the whole model as a stage"
        with self._opened(compiled, graph.operator_names, device) as runner:
            self._check_ports(graph, runner, where)
            taken, given = {p.name for p in runner.inputs}, {p.name for p in runner.outputs}
            self._expect(taken <= set(frame), f"{where} takes {sorted(taken)}; the model's inputs are {sorted(frame)}")
            computed = {tensor.name for operator in graph.operators for tensor in operator.outputs}
            self._expect(
                given == computed.intersection(graph.outputs),
                f"{where} gives {sorted(given)}; the model's outputs are {list(graph.outputs)}",
            )

            def run() -> list[dict[str, Array]]:
                results = []
                sets = [buffers(runner) for _ in range(2)]
                for inputs, outputs in (sets[0], sets[0], sets[1], sets[0]):
                    fill(runner, inputs, frame)
                    before = [array.copy() for array in inputs]
                    for array in outputs:
                        array.view(np.uint8).fill(0xA5)
                    runner.run(inputs, outputs)
                    for port, array, old in zip(runner.inputs, inputs, before, strict=True):
                        self._expect(
                            np.array_equal(array, old, True), f"{where}: run() writes into its input {port.name}"
                        )
                    results.append(logical(graph, runner, outputs))
                return results

            first, *others = self._bound(runner, run)
        for result in others:
            self.is_equal(result, first, f"{where} gives other results for the same frame in a later run")
        return first

    def computes_all(self, compiled: CompiledModel, devices: Sequence[Device]) -> list[Device]:
        """Return the devices that compute every operator: those on which the model runs whole."""
        names = compiled.graph.operator_names
        for device in devices:
            computed = compiled.computes(device)
            unknown = sorted(set(computed).difference(names))
            self._expect(not unknown, f"device {device.name}: computes() names {unknown}, which are no operators")
            self._expect(bool(computed), f"device {device.name}: computes() names no operator")
            ordered = [name for name in names if name in computed]
            self._expect(computed == ordered, f"device {device.name}: computes() gives {computed}, not {ordered}")
        able = [device for device in devices if compiled.computes(device) == names]
        self._expect(bool(able), "no device computes every operator; check with a model that one of them computes")
        return able

    def refuses_what_is_no_stage(self, compiled: CompiledModel, device: Device) -> None:
        graph = compiled.graph
        illegal: dict[str, list[str]] = {
            "no operators": [],
            "an operator that is not in the graph": ["no such operator"],
        }
        for name in sorted(set(graph.operator_names).difference(compiled.computes(device))):
            illegal[f"{name}, which computes() lacks,"] = [name]
        if left_and_reentered := around(graph):
            illegal["operators that a path leaves and comes back to"] = left_and_reentered
        for what, operators in illegal.items():
            try:
                compiled.stage(operators, device).close()
            except PlanError:
                continue
            except Exception as error:
                self._fail(f"device {device.name}: a stage of {what} raises {error!r}; the contract says PlanError")
            self._fail(f"device {device.name}: a stage of {what} is made; the contract says PlanError")

    def measures(self, compiled: CompiledModel, device: Device) -> None:
        graph, where = compiled.graph, f"device {device.name}"
        with closing(computed_runner(compiled, device)) as runner:
            inputs, outputs = [input_for_timing(graph, p) for p in runner.inputs], [p.buffer() for p in runner.outputs]
            self._bound(runner, lambda: runner.run(inputs, outputs))
            has_times = compiled.has_operator_times(device)
            seconds = self._bound(runner, lambda: compiled.time_operators(device, 3)) if has_times else None
            moved = self._bound(runner, lambda: compiled.time_transfers(device, SIZES, 3))
        if seconds is not None:
            timed = np.isin(graph.operator_names, compiled.computes(device))
            self._check_seconds(seconds, (3, len(graph)), f"{where}: time_operators()", timed)
        for index, figures in enumerate(() if moved is None else moved):
            self._check_seconds(figures, (3, len(SIZES)), f"{where}: time_transfers()[{index}]")
        sizes = compiled.activation_bytes(computed_stages(compiled, device)[0], device)
        self._expect(
            len(sizes) == 2 and all(isinstance(size, int) and size >= 0 for size in sizes),
            f"{where}: activation_bytes() gives {sizes}; the contract says two numbers of bytes",
        )
        self._expect(sizes[0] == sizes[1], f"{where}: a model in its listed order has activations of {sizes} bytes")

    def cuts(
        self, compiled: CompiledModel, device: Device, frame: Mapping[str, Array], expected: Mapping[str, Array]
    ) -> None:
        """Cut the model in two at up to MOST_CUTS places and hand the tensors on by name."""
        for groups in halves(compiled.graph):
            where = f"device {device.name}: cut after {groups[0][-1]}"
            tensors: dict[str, Array] = dict(frame)
            for group in groups:
                tensors.update(self._runs_once(compiled, group, device, tensors, where))
            self.is_equal(tensors, expected, f"{where}, the model gives other results than whole")

    def runs_in_pipelines(self, compiled: CompiledModel, devices: Sequence[Device], frame: Mapping[str, Array]) -> None:
        """Run two stages in threads of their own, on one device and on two, and look for threads that are left."""
        before = threading.active_count()
        first = devices[0]
        pairs = [(first, first), *((first, other) for other in devices if not other.overlaps(first))][:2]
        apart = replace(first, concurrent_copies=True)
        with closing(computed_runner(compiled, apart)) as runner:
            pairs += [(apart, apart)] if runner.take_turns(nullcontext()) else []
        for groups in halves(compiled.graph)[:1]:
            for pair in pairs:
                where = f"a pipeline of {pair[0].name} and {pair[1].name}"
                tensors: dict[str, Array] = dict(frame)
                for device, group in zip(pair, groups, strict=True):
                    tensors.update(self._runs_once(compiled, group, device, tensors, where))
                stages = tuple(Stage((d.name,), tuple(group)) for d, group in zip(pair, groups, strict=True))
                plan = Plan(compiled.graph.name, "conformance", "throughput", stages, Prediction(1.0, 1.0))
                outputs = {name: tensors[name] for name in compiled.graph.outputs}
                platform = Platform("conformance", tuple(dict.fromkeys(pair)))
                with Pipeline(compiled, plan, platform) as pipeline:
                    for result in pipeline.map(dict(frame) for _ in range(FRAMES)):
                        told = f"{where} gives other results for frame {result.frame} than its stages alone"
                        self.is_equal(reshaped(compiled.graph, result.outputs), outputs, told)
        left = threading.active_count() - before
        self._expect(left <= 0, f"{left} threads are left after every stage was closed")

    def slices_files(
        self,
        compiled: CompiledModel,
        devices: Sequence[Device],
        frame: Mapping[str, Array],
        expected: Mapping[str, Mapping[str, Array]],
    ) -> None:
        """Cut the file, as is done for other backends, and compile the slices by this one."""
        slicer, device = compiled.slicer(), devices[0]
        offers = self._model.format in self._backend.cuts
        self._expect(
            not offers or slicer is not None or isinstance(compiled, SlicedModel),
            f"cuts lists {self._model.format}, and slicer() of a compiled {self._model.name} gives None",
        )
        if slicer is None or not offers:
            return
        values = slicer.values()
        missing = set(compiled.graph.tensors) - set(values)
        self._expect(not missing, f"the slicer's values() lack the tensors {sorted(missing)}")
        for groups in halves(compiled.graph)[:2]:
            where = f"the file cut after {groups[0][-1]}"
            tensors: dict[str, Array] = dict(frame)
            for group in groups:
                part = slicer.cut(group)
                reason = self._backend.refuses(part.model)
                self._expect(not reason, f"it refuses the slice {part.model.name} of its own slicer: {reason}")
                with closing(self._backend.compile(part.model, [device])) as slice_compiled:
                    graph = slice_compiled.graph
                    made = self._runs_once(slice_compiled, graph.operator_names, device, tensors, where)
                    for tensor, output in zip(part.outputs, graph.outputs, strict=True):
                        tensors[tensor.name] = made[output].reshape(tensor.shape)
            self.is_equal(tensors, expected[device.name], f"{where}: other results than whole")

    def shares(self, compiled: CompiledModel, devices: Sequence[Device]) -> None:
        stages = [Stage((devices[0].name,), tuple(compiled.graph.operator_names))]
        self._backend.share([(compiled, stages), (compiled, stages)], self._platform(devices))

    def saves_and_loads(
        self,
        compiled: CompiledModel,
        devices: Sequence[Device],
        frame: Mapping[str, Array],
        expected: Mapping[str, Mapping[str, Array]],
    ) -> None:
        able = next(device for device in devices if device.name in expected)
        stages = [Stage((able.name,), tuple(compiled.graph.operator_names))]
        with tempfile.TemporaryDirectory() as folder:
            compiled.save(Path(folder), stages, self._platform(devices))
            try:
                loaded = self._backend.load(Path(folder), devices)
            except Exception as error:
                self._fail(f"load() of what it saved raises {error!r}")
            with closing(loaded):
                self._expect(loaded.graph == compiled.graph, "a model that was saved and loaded has another graph")
                self._expect(
                    loaded.order == compiled.order,
                    f"a model of order {compiled.order!r} that was saved and loaded has order {loaded.order!r}",
                )
                for device in devices:
                    same = loaded.computes(device) == compiled.computes(device)
                    self._expect(same, f"device {device.name} computes other operators of a model that was loaded")
                result = self.computes(loaded, able, frame)
            self.is_equal(result, expected[able.name], "a model that was saved and loaded gives other results")
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._backend.load(Path(folder), devices).close()
            except BundleError:
                return
            except Exception as error:
                self._fail(f"load() of an empty folder raises {error!r}; the contract says BundleError")
            self._fail("load() of an empty folder gives a model; the contract says BundleError")

    def is_equal(self, found: Mapping[str, Array], expected: Mapping[str, Array], what: str) -> None:
        for name, array in expected.items():
            other = found.get(name)
            if other is None:
                self._fail(f"{what}: output {name} is missing")
            if other.shape != array.shape or other.dtype != array.dtype:
                self._fail(f"{what}: output {name} is {other.dtype} {other.shape}, not {array.dtype} {array.shape}")
            other, array = widened(other), widened(array)
            if self._tolerance == 0 and np.array_equal(other, array, equal_nan=array.dtype.kind in "fc"):
                continue
            if not np.allclose(other, array, self._tolerance, self._tolerance, equal_nan=True) or not self._tolerance:
                worst = np.max(np.abs(other.astype(float) - array.astype(float)))
                self._fail(f"{what}: output {name} is off by up to {worst:g} (tolerance {self._tolerance:g})")

    @contextmanager
    def _opened(self, compiled: CompiledModel, operators: Sequence[str], device: Device) -> Iterator[StageRunner]:
        """Make a stage, and close it twice in the end: the second call must do nothing."""
        runner = compiled.stage(operators, device)
        with closing(runner):
            yield runner
        try:
            runner.close()
        except Exception as error:
            self._fail(f"device {device.name}: to close a stage a second time raises {error!r}")

    def _runs_once(
        self,
        compiled: CompiledModel,
        operators: Sequence[str],
        device: Device,
        tensors: Mapping[str, Array],
        where: str,
    ) -> dict[str, Array]:
        """Run operators as a stage on tensors by name, and return what it gives by name."""
        with self._opened(compiled, operators, device) as runner:
            self._check_ports(compiled.graph, runner, where)
            missing = {port.name for port in runner.inputs} - set(tensors)
            self._expect(not missing, f"{where}: a stage takes {sorted(missing)}, which no stage before it gives")

            def run() -> dict[str, Array]:
                inputs, outputs = buffers(runner)
                fill(runner, inputs, tensors)
                runner.run(inputs, outputs)
                return logical(compiled.graph, runner, outputs)

            return self._bound(runner, run)

    def _bound(self, runner: StageRunner, action: Callable[[], T]) -> T:
        try:
            return in_bound_thread(runner, action)
        except (ContractError, PipelineError):
            raise
        except Exception as error:
            self._fail(f"a call from the thread that is bound raises {error!r}")

    def _check_ports(self, graph: OperatorGraph, runner: StageRunner, where: str) -> None:
        tensors = graph.tensors
        for port in (*runner.inputs, *runner.outputs):
            tensor = tensors.get(port.name)
            if tensor is None:
                self._fail(f"{where}: the port {port.name} is no tensor of the graph")
            extents = math.prod(logical_shape(port.shape, port.layout)), math.prod(tensor.shape)
            same = extents[0] == extents[1] and port.dtype == tensor.dtype
            self._expect(same, f"{where}: {port} holds other elements than the graph's {tensor}")

    def _check_seconds(self, seconds: Array, shape: tuple[int, int], what: str, timed: Array | bool = True) -> None:
        """Check that times are positive, and NaN in the columns that are not `timed`."""
        found = np.shape(seconds)
        self._expect(found == shape, f"{what} gives an array of shape {found}; the contract says {shape}")
        untimed = bool(np.all(timed | np.isnan(seconds)))
        self._expect(untimed, f"{what} gives times of operators that computes() lacks; the contract says NaN")
        positive = np.isfinite(seconds) & (seconds > 0)
        self._expect(bool(np.all(positive == timed)), f"{what} gives times that are not positive")

    def _platform(self, devices: Sequence[Device]) -> Platform:
        return Platform("conformance", tuple(devices))

    def _expect(self, holds: bool, message: str) -> None:
        if not holds:
            self._fail(message)

    def _fail(self, message: str) -> NoReturn:
        raise ContractError(f"backend {self._backend.name}: {message}")
