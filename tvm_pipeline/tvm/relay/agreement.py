"""Check that the libraries of one model compute the same, whatever their targets.

`tvm/alignment.py` pairs the kernels of two libraries by what they compute and read, not by their results. A schedule
that computes something else, or a layout that was read wrongly, is seen only where both run. So both run once, when the
model is compiled, on one frame of noise: first each operator alone, on each target from the same tensors, since every
cut consists of operators; then a few random cuts against the unsplit model. Libraries that agreed are remembered in the
cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import tvm

from tvm_pipeline.backends.contract import Array, Port, Progress, StageRunner
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.tensor_layout import relayout, to_logical
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.files import cache_folder, write_bytes
from tvm_pipeline.tvm.devices.targets import compiler_target
from tvm_pipeline.tvm.relay.compiled import RelayModel
from tvm_pipeline.tvm.relay.importer import reason

FORMAT = 1  # raise it when what agreed once must be checked again
CUTS = 3  # for each pair of targets

# How far a tensor may be off, as a part of its largest value: targets add the same products in another order. The
# worst of all operators of squeezenet, mobilenet, the resnets, densenet and inception was 3e-6 (OpenCL against LLVM).
TOLERANCE = 1e-4
HALF_TOLERANCE = 2e-2  # of float16, whose sums are rounded 8192 times as coarsely
CUT_FACTOR = 10.0  # A cut passes on what its operators are off.
# Operators that round: a value that lies between two integers may become either. An off-by-one that goes on into a
# convolution comes out as about one, so integers may be off by one for each such operator. Floats that are computed
# from rounded values (dequantize) move by whole quanta, so that only their mean error tells; that of a wrong tensor is
# about 1.4 times the values.
ROUNDING = frozenset(
    ("round", "floor", "ceil", "trunc", "right_shift", "fixed_point_multiply", "fixed_point_multiply_per_axis")
)
ROUNDED_SHARE = 0.3  # of the integers may be off; between x86 and others one in 17 was, after one requantize
ROUNDED_ERROR = 0.25

Tensors = dict[str, tuple[Port, Array]]


def check_agreement(model: RelayModel, devices: Sequence[Device], progress: Progress) -> None:
    """Check that all libraries of a model compute the same, on the first of `devices` of each target.

    Nothing is done where the devices have one target, or where the same libraries agreed before.

    Raises:
        ModelError: they do not; the message names the operator, both targets and the difference.
    """
    first_of = {compiler_target(device.target): device for device in reversed(devices)}
    chosen = [first_of[target] for target in model.libraries if target in first_of]
    if len(chosen) < 2:
        return
    record = _record(model, chosen)
    if record is not None and record.exists():
        return
    progress(f"checking that {'both' if len(chosen) == 2 else f'all {len(chosen)}'} targets compute the same")
    with ExitStack() as stack:
        first, *others = (stack.enter_context(_bound(model, device)) for device in chosen)
        _check_operators(model.graph, first, others)
        _check_cuts(model.graph, first, others)
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(record, "\n".join(device.target for device in chosen).encode())


def _record(model: RelayModel, devices: Sequence[Device]) -> Path | None:
    """Return the file that says that these libraries agreed; None where a library was never in the cache."""
    folders = [model.libraries[compiler_target(device.target)].folder for device in devices]
    described = [tvm.__version__, str(FORMAT), *(device.target for device in devices)]
    for folder in folders:
        if folder is None:
            return None
        described.append(folder.name)  # a digest of all that it was compiled from
    return cache_folder() / "agreed" / hashlib.sha256("|".join(described).encode()).hexdigest()[:32]


def _check_operators(graph: OperatorGraph, first: _Bound, others: Sequence[_Bound]) -> None:
    """Run each operator on every device from the tensors of the first one."""
    tensors = _frame(graph)
    last_reader = {name: index for index, operator in enumerate(graph.operators) for name in operator.inputs}
    for index, operator in enumerate(graph.operators):
        if not operator.outputs:
            continue
        made = first.compute([operator.name], tensors)
        roundings = _roundings([operator.kind])
        for other in others:
            found = other.compute([operator.name], tensors)
            for name, tensor in made.items():
                apart = _apart(tensor, found[name])
                if not apart.is_close(roundings):
                    raise ModelError(
                        f"{graph.name}: operator {operator.name} computes something else for {other.target!r} than for "
                        f"{first.target!r}: {name} is {apart}; give its devices one target, and report this"
                    )
        tensors.update(made)
        for name in [name for name in tensors if last_reader.get(name, -1) <= index]:
            del tensors[name]


def _check_cuts(graph: OperatorGraph, first: _Bound, others: Sequence[_Bound]) -> None:
    """Run random cuts, their stages on the first device and another one in turns, against the unsplit model."""
    if len(graph) < 2:
        return
    frame, draw = _frame(graph), Random(0)
    whole = first.compute([operator.name for operator in graph.operators], frame)
    roundings = _roundings([operator.kind for operator in graph.operators])
    for other in others:
        for number in range(CUTS):
            parts, tensors = _random_parts(graph, draw), dict(frame)
            places = [(first, other)[(index + number) % 2] for index in range(len(parts))]
            for part, place in zip(parts, places, strict=True):
                tensors.update(place.compute(part, tensors))
            for name, tensor in whole.items():
                apart = _apart(tensor, tensors[name])
                if not apart.is_close_behind_a_cut(roundings):
                    shown = "; ".join(f"{_shown(p)} for {at.target!r}" for p, at in zip(parts, places, strict=True))
                    raise ModelError(
                        f"{graph.name}: cut into {shown}, it computes something else than unsplit: output {name} is "
                        f"{apart}; give its devices one target, and report this"
                    )


def _frame(graph: OperatorGraph) -> Tensors:
    """Return noise for each input of the model; two of one shape differ."""
    ports = [Port(tensor.name, tensor.shape, tensor.dtype) for tensor in graph.inputs]
    return {port.name: (port, np.roll(noise(port), index)) for index, port in enumerate(ports)}


def _random_parts(graph: OperatorGraph, draw: Random) -> list[list[str]]:
    """Return the operators in a random order that can run, in two to four parts."""
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
    return [order[a:b] for a, b in pairwise((0, *ends, len(order)))]


def _roundings(kinds: Sequence[str]) -> int:
    return sum(part in ROUNDING for kind in kinds for part in kind.split("+"))


def _shown(operators: Sequence[str]) -> str:
    rest = len(operators) - 4
    return ", ".join(operators[:4]) + (f" and {rest} more" if rest > 0 else "")


class _Bound:
    """A device, and a thread that is bound to it, since the caller's own thread must stay bound to none."""

    def __init__(self, model: RelayModel, device: Device, thread: ThreadPoolExecutor) -> None:
        self.target = device.target
        self._model, self._device, self._thread = model, device, thread
        self._is_bound = False

    def compute(self, operators: Sequence[str], tensors: Mapping[str, tuple[Port, Array]]) -> Tensors:
        """Return what the operators compute from these tensors, as one stage on the device.

        Raises:
            ModelError: the device cannot run them.
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
        except (tvm.TVMError, RunError) as error:
            raise ModelError(
                f"{self._model.graph.name}: {_shown(operators)} cannot run for {self.target!r}: {reason(error)}; leave "
                "that device out, or give its devices one target"
            ) from error
        return {port.name: (port, array) for port, array in zip(runner.outputs, outputs, strict=True)}

    def _run(self, runner: StageRunner, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        if not self._is_bound:
            runner.bind()
            self._is_bound = True
        runner.run(inputs, outputs)


@contextmanager
def _bound(model: RelayModel, device: Device) -> Iterator[_Bound]:
    with ThreadPoolExecutor(1) as thread:
        yield _Bound(model, device, thread)


@dataclass(frozen=True, slots=True)
class _Apart:
    """How far two tensors are apart.

    Attributes:
        worst: the largest difference; infinite where one is infinite or no number and the other is not.
        largest: the largest value.
        share: the part of the elements that differ at all.
        error: the root mean square of the difference over that of the values.
        dtype: of both tensors.
    """

    worst: float
    largest: float
    share: float
    error: float
    dtype: str

    def __str__(self) -> str:
        if self.worst == np.inf:
            return "infinite or no number in other places"
        return f"off by {self.worst:.3g}, its largest value is {self.largest:.3g}, and {self.share:.0%} of it differs"

    def is_close(self, roundings: int) -> bool:
        """Return whether one operator, which rounds so often, may give both."""
        if not self.dtype.startswith("float"):
            return self.worst <= max(roundings, 1) and self.share <= ROUNDED_SHARE
        return self._is_close(roundings, 1.0)

    def is_close_behind_a_cut(self, roundings: int) -> bool:
        """Return whether a network, which rounds so often, may give both."""
        return self._is_close(roundings or not self.dtype.startswith("float"), CUT_FACTOR)

    def _is_close(self, rounds: bool | int, factor: float) -> bool:
        if rounds:
            return self.error <= ROUNDED_ERROR
        tolerance = HALF_TOLERANCE if self.dtype == "float16" else TOLERANCE
        return self.worst <= max(factor * tolerance * self.largest, float(np.finfo("float32").tiny))


def _apart(expected: tuple[Port, Array], found: tuple[Port, Array]) -> _Apart:
    one, other = (to_logical(array, port.layout).ravel().astype("float64") for port, array in (expected, found))
    dtype = expected[0].dtype
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return _Apart(np.inf, 0.0, 1.0, np.inf, dtype)
    one, difference = one[finite], np.abs(one[finite] - other[finite])
    if not one.size:
        return _Apart(0.0, 0.0, 0.0, 0.0, dtype)
    values = float(np.linalg.norm(one))
    error = float(np.linalg.norm(difference))
    relative = error / values if values else float(np.inf if error else 0.0)
    return _Apart(float(difference.max()), float(np.abs(one).max()), float((difference > 0).mean()), relative, dtype)
