"""Check that the libraries of one model compute the same, whatever their targets.

`alignment.py` pairs the kernels of two libraries by what they compute and read, not by their results. A schedule
that computes something else, or a layout that was read wrongly, is seen only where both run. So both run once, when the
model is compiled, on one frame of noise: first each operator alone, on each target from the same tensors, since every
cut consists of operators; then a few random cuts against the unsplit model.

The CPU is the reference of GPUs. An operator that a GPU computes otherwise, or cannot run, is refused there: the model
says so (`TvmModel.refused`), and the operator stays on other devices. Any other difference is an error. What was
found is remembered in the cache.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from tvm_pipeline.backends.closeness import difference, roundings_of
from tvm_pipeline.backends.contract import Array, Port, StageRunner
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.graph import Operator, OperatorGraph
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.tensor_layout import relayout
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.files import cache_folder, keep, read_kept
from tvm_pipeline_tvm.compiled_model import RefusedKernelError, TvmModel
from tvm_pipeline_tvm.devices.targets import compiler_target, has_own_memory
from tvm_pipeline_tvm.tvm_errors import TVMError, reason

FORMAT = 3  # raise it when what agreed once must be checked again
CUTS = 3  # for each pair of targets

Tensors = dict[str, tuple[Port, Array]]
Refused = dict[str, dict[str, str]]  # by target, the operators that it must not compute, with the reason

_log = logging.getLogger(__name__)


def check_agreement(model: TvmModel[Any], devices: Sequence[Device], *, remember: bool = True) -> None:
    """Check that all libraries of a model compute the same, on the first of `devices` of each target; prepare these.

    What a GPU must not compute is put into `model.refused`, and logged as a warning. Nothing is run where the devices
    have one target, or where the same libraries were checked before.

    Args:
        remember: the libraries are those of the cache, by whose names what was found is kept.

    Raises:
        ModelError: two CPUs, or two GPUs without a CPU, compute something else; a GPU computes no operator as the CPU
            does; or a cut computes something else than the unsplit model. The message names the operator or the cut,
            the targets and the difference.
    """
    first_of = {compiler_target(device.target): device for device in reversed(devices)}
    chosen = [first_of[target] for target in model.libraries if target in first_of]
    chosen.sort(key=lambda device: has_own_memory(device.target))  # the first is the reference: a CPU, if there is one
    if len(chosen) < 2:
        return
    record = _record(model, chosen) if remember else None
    known = _remembered(record)
    if known is None:
        _log.info(f"checking that {'both' if len(chosen) == 2 else f'all {len(chosen)}'} targets compute the same")
        with ExitStack() as stack:
            first, *others = (stack.enter_context(_bound(model, device)) for device in chosen)
            known = _check_operators(model.graph, first, others)
            _check_cuts(model.graph, first, others, known)
        if record is not None:
            keep(record, msgspec.json.encode(known))
    model.refused = known
    for device in devices:
        refused = known.get(compiler_target(device.target))
        if refused:
            stay = "stays" if len(refused) == 1 else "stay"
            why = next(iter(refused.values()))
            _log.warning("%s: %s %s on other devices: %s", device.name, _shown(list(refused)), stay, why)
        model.prepare(device.target)


def _record(model: TvmModel[Any], devices: Sequence[Device]) -> Path | None:
    """Return the file of what was found of these libraries; None where a library was never in the cache."""
    import tvm

    from tvm_pipeline_tvm.devices.mirrors import mirrors_of

    folders = [model.libraries[compiler_target(device.target)].folder for device in devices]
    described = [tvm.__version__, str(FORMAT), *(device.target for device in devices)]
    for target in (device.target for device in devices if has_own_memory(device.target)):
        told = mirrors_of(target).device
        described.append(f"{told.device_name} {told.driver_version}")  # another driver may run what this one does not
    for folder in folders:
        if folder is None:
            return None
        described.append(folder.name)  # a digest of all that it was compiled from
    return cache_folder() / "agreed" / hashlib.sha256("|".join(described).encode()).hexdigest()[:32]


def _remembered(record: Path | None) -> Refused | None:
    """Return what was found before; None where nothing was, or where the file is damaged."""
    content = read_kept(record) if record else None
    return None if content is None else msgspec.json.decode(content, type=Refused)


def _check_operators(graph: OperatorGraph, first: _BoundDevice, others: Sequence[_BoundDevice]) -> Refused:
    """Run each operator on every device from the tensors of the first one; return what GPUs must not compute."""
    refused: Refused = {}
    tensors = _frame(graph)
    last_reader = {name: index for index, operator in enumerate(graph.operators) for name in operator.inputs}
    for index, operator in enumerate(graph.operators):
        if not operator.outputs:
            continue
        made = first.compute([operator.name], tensors)
        for other in others:
            why = _difference(graph, operator, made, first, other, tensors)
            if why:
                refused.setdefault(compiler_target(other.target), {})[operator.name] = why
        tensors.update(made)
        for name in [name for name in tensors if last_reader.get(name, -1) <= index]:
            del tensors[name]
    computable = sum(bool(operator.outputs) for operator in graph.operators)
    for target, found in refused.items():
        if len(found) == computable:
            name, why = next(iter(found.items()))
            raise ModelError(
                f"{graph.name}: {target!r} can compute none of its {computable} operators (of {name}, {why}); leave "
                "that device out of the platform"
            )
    return refused


def _difference(
    graph: OperatorGraph, operator: Operator, made: Tensors, first: _BoundDevice, other: _BoundDevice, tensors: Tensors
) -> str:
    """Return why another device must not compute an operator of which the first one made `made`; empty where it may.

    Raises:
        ModelError: it must not, and the first device is no CPU, or both are; or its failure ended all its work.
    """
    may_refuse = other.has_own_memory and not first.has_own_memory
    try:
        found = other.compute([operator.name], tensors)
    except _UnableError as error:
        if not may_refuse:
            raise
        other.check_answers(operator.name, error.why)
        return f"it fails there: {error.why}"
    for name, tensor in made.items():
        apart = difference(tensor, found[name])
        if apart.is_close(roundings_of([operator.kind])):
            continue
        if may_refuse:
            return f"against the CPU, its result {name} is {apart}"
        raise ModelError(
            f"{graph.name}: operator {operator.name} computes something else for {other.target!r} than for "
            f"{first.target!r}: {name} is {apart}; give its devices one target, and report this"
        )
    return ""


def _check_cuts(graph: OperatorGraph, first: _BoundDevice, others: Sequence[_BoundDevice], refused: Refused) -> None:
    """Run random cuts, their stages on the first device and another one in turns, against the unsplit model.

    Operators that the other device must not compute are left out: their results are those of the unsplit model, and
    what they read is compared, as outputs are. Such an operator may make much of a tiny difference: where two scores
    change places, non-maximum suppression gives other rows.
    """
    if len(graph) < 2:
        return
    frame, draw = _frame(graph), Random(0)
    roundings = roundings_of([operator.kind for operator in graph.operators])
    for other in others:
        left_out = refused.get(compiler_target(other.target), {})
        given, compared = _unsplit(graph, first, left_out, frame)
        for number in range(CUTS):
            parts, tensors = _random_parts(graph, draw, left_out), {**frame, **given}
            places = [(first, other)[(index + number) % 2] for index in range(len(parts))]
            for part, place in zip(parts, places, strict=True):
                tensors.update(place.compute(part, tensors))
            for name, tensor in compared.items():
                apart = difference(tensor, tensors[name])
                if not apart.is_close_behind_a_cut(roundings):
                    shown = "; ".join(f"{_shown(p)} for {at.target!r}" for p, at in zip(parts, places, strict=True))
                    raise ModelError(
                        f"{graph.name}: cut into {shown}, it computes something else than unsplit: output {name} is "
                        f"{apart}; give its devices one target, and report this"
                    )


def _unsplit(
    graph: OperatorGraph, first: _BoundDevice, left_out: Collection[str], frame: Tensors
) -> tuple[Tensors, Tensors]:
    """Return of the unsplit model what the operators that are left out make, and all that cuts without them make.

    The first device runs the model in one stage, or in several around the operators that are left out.
    """
    tensors = dict(frame)
    for _, part in groupby(graph.operator_names, left_out.__contains__):
        tensors.update(first.compute(list(part), tensors))
    without = [operator for operator in graph.operators if operator.name in left_out]
    made = {tensor.name for operator in without for tensor in operator.outputs}
    read = {name for operator in without for name in operator.inputs}.union(graph.outputs) - made - frame.keys()
    return (
        {name: tensor for name, tensor in tensors.items() if name in made},
        {name: tensors[name] for name in tensors if name in read},
    )


def _frame(graph: OperatorGraph) -> Tensors:
    """Return noise for each input of the model; two of one shape differ."""
    ports = [Port.of(tensor) for tensor in graph.inputs]
    return {port.name: (port, np.roll(noise(port), index)) for index, port in enumerate(ports)}


def _random_parts(graph: OperatorGraph, draw: Random, left_out: Collection[str]) -> list[list[str]]:
    """Return the operators in a random order that can run, in two to four parts; more where some are left out."""
    edges = graph.edges
    missing = [len(before) for before in edges.before]
    ready = [index for index, count in enumerate(missing) if not count]
    order: list[str] = []
    while ready:
        chosen = ready.pop(draw.randrange(len(ready)))
        order.append(graph.operators[chosen].name)
        for reader in edges.after[chosen]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    stages = min(draw.randint(2, 4), len(order))
    ends = sorted(draw.sample(range(1, len(order)), stages - 1))
    drawn = [order[a:b] for a, b in pairwise((0, *ends, len(order)))]
    divided = (groupby(part, left_out.__contains__) for part in drawn)
    return [list(names) for groups in divided for is_left_out, names in groups if not is_left_out]


def _shown(operators: Sequence[str]) -> str:
    rest = len(operators) - 4
    return ", ".join(operators[:4]) + (f" and {rest} more" if rest > 0 else "")


class _UnableError(ModelError):
    """A device cannot run operators; `why` is the reason alone."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class _BoundDevice:
    """A device, and a thread that is bound to it, since the caller's own thread must stay bound to none."""

    def __init__(self, model: TvmModel[Any], device: Device, thread: ThreadPoolExecutor) -> None:
        self.target = device.target
        self.has_own_memory = has_own_memory(device.target)
        self._model, self._device, self._thread = model, device, thread
        self._is_bound = False

    def compute(self, operators: Sequence[str], tensors: Mapping[str, tuple[Port, Array]]) -> Tensors:
        """Return what the operators compute from these tensors, as one stage on the device.

        Raises:
            _UnableError: the device cannot run them.
        """
        try:
            runner = self._model.stage(operators, self._device)
            try:
                inputs, outputs = ([port.buffer() for port in ports] for ports in (runner.inputs, runner.outputs))
                for port, array in zip(runner.inputs, inputs, strict=True):
                    stands, source = tensors[port.name]
                    relayout(source, stands.layout, array, port.layout)
                self._thread.submit(self._run, runner, inputs, outputs).result()
            finally:
                runner.close()
        except (TVMError, RunError, RefusedKernelError) as error:
            why = error.why if isinstance(error, RefusedKernelError) else reason(error)
            raise _UnableError(
                f"{self._model.graph.name}: {_shown(operators)} cannot run for {self.target!r}: {why}; leave that "
                "device out, or give its devices one target",
                why,
            ) from error
        return {port.name: (port, array) for port, array in zip(runner.outputs, outputs, strict=True)}

    def check_answers(self, failed: str, why: str) -> None:
        """Raise ModelError where a device with memory of its own does not even copy after an operator failed on it."""
        from tvm_pipeline_tvm.devices.mirrors import mirrors_of

        mirrors = mirrors_of(self.target)

        def copies() -> None:
            mirrors.holding(np.ones(1, "float32"))
            mirrors.device.sync()

        try:
            self._thread.submit(copies).result()
        except mirrors.failures as error:
            raise ModelError(
                f"{self._model.graph.name}: operator {failed} ends all work of this process for {self.target!r}: "
                f"{why}; leave that device out of the platform"
            ) from error

    def _run(self, runner: StageRunner, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        if not self._is_bound:
            runner.bind()
            self._is_bound = True
        runner.run(inputs, outputs)


@contextmanager
def _bound(model: TvmModel[Any], device: Device) -> Iterator[_BoundDevice]:
    with ThreadPoolExecutor(1) as thread:
        yield _BoundDevice(model, device, thread)
