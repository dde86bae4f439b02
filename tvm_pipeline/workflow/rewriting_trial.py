"""A model with concatenations done in parts, accepted only if it needs less memory and computes the same.

The backend says what can be done in parts (`Backend.rewriting`). Here the operators that the least peak
requires are chosen, the model is compiled with and without them, and both compute the same frames of noise. A model
that computes in integers must give equal bits. Sums of floats have their terms in another order, so other models may
differ by TOLERANCE of their largest output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from tvm_pipeline.backends.contract import Array, Backend, CompiledModel, MemoryRewriting, Rewriting
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory.rewriting import fewest
from tvm_pipeline.memory.stage_memory import least_peak

_log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # of the largest output, for sums of floats
FRAMES = 3  # of noise, on which outputs are compared

Compile = Callable[[Model], CompiledModel]


def compiled_in_parts(
    model: Model, backend: Backend, devices: Sequence[Device], compile_: Compile
) -> tuple[CompiledModel, MemoryRewriting]:
    """Return the model compiled with those operators in parts that the least peak requires; as it is if none pays.

    Operators whose parts change the outputs by more than is allowed are left out, and the others are tried again.

    Args:
        compile_: compiles for `devices`, in the order of least memory.

    Raises:
        OptionError: the backend cannot rewrite models, or no device computes all of the model.
        ModelError: the model cannot be read or compiled.
    """
    rewriting = backend.rewriting(model)
    plain = compile_(model)
    trial = _Trial(model, rewriting, plain, devices, compile_)
    try:
        made, report = trial.run()
    except BaseException:
        plain.close()
        raise
    if made is not plain:
        plain.close()
    return made, report


class _Trial:
    """Compiles a model with some operators in parts, and compares it with the model as it is."""

    def __init__(
        self, model: Model, rewriting: Rewriting, plain: CompiledModel, devices: Sequence[Device], compile_: Compile
    ) -> None:
        self._model, self._rewriting, self._plain = model, rewriting, plain
        self._compile = compile_
        self._device = next((device for device in devices if len(plain.computes(device)) == len(plain.graph)), None)
        self._tolerance = 0.0 if rewriting.is_quantized else TOLERANCE
        self._left_out = dict(rewriting.refused)

    def run(self) -> tuple[CompiledModel, MemoryRewriting]:
        expected: list[list[Array]] = []
        while True:
            names = [name for name in self._rewriting.names if name not in self._left_out]
            chosen = fewest(names, self._rewriting.peak_bytes) if names else []
            if not chosen:
                return self._plain, self._as_it_is(self._nothing(names))
            device = self._comparing_device()
            expected = expected or self._outputs(self._plain, device)
            _log.info(f"comparing {self._model.name} with {', '.join(chosen)} in parts")
            made = self._compile(self._rewriting.rewritten(chosen))
            report = self._report(made, device, chosen, greatest_difference(expected, self._outputs(made, device)))
            if report.difference <= self._tolerance:
                if report.peak_bytes[1] < report.peak_bytes[0] and report.arena_bytes[1] <= report.arena_bytes[0]:
                    return made, report
                made.close()
                return self._plain, self._as_it_is(
                    f"with {', '.join(chosen)} in parts, the compiled kernels need {report.peak_bytes[1]:,} bytes "
                    f"and an arena of {report.arena_bytes[1]:,}, as it is {report.peak_bytes[0]:,} and "
                    f"{report.arena_bytes[0]:,}"
                )
            made.close()
            self._leave_out(chosen, device, expected, report.difference)

    def _leave_out(self, chosen: Sequence[str], device: Device, expected: list[list[Array]], together: float) -> None:
        """Leave out the operators whose parts alone change the outputs by too much; all of them if none does alone."""
        found: dict[str, float] = {}
        for name in chosen if len(chosen) > 1 else ():
            with closing(self._compile(self._rewriting.rewritten([name]))) as made:
                difference = greatest_difference(expected, self._outputs(made, device))
            if not difference <= self._tolerance:
                found[name] = difference
        allowed = f"{self._tolerance:g} of the largest output is allowed" if self._tolerance else "no bit may differ"
        for name, difference in (found or dict.fromkeys(chosen, together)).items():
            self._left_out[name] = f"in parts it changes the outputs by {difference:.1e}, and {allowed}"

    def _comparing_device(self) -> Device:
        if self._device is None:
            raise OptionError(
                f"`memory_rewrite`: no device of the platform computes all operators of {self._model.name}, so the "
                "rewritten model cannot be compared with it; compile without it",
                option="memory_rewrite",
            )
        return self._device

    def _report(self, made: CompiledModel, device: Device, chosen: Sequence[str], difference: float) -> MemoryRewriting:
        return MemoryRewriting(
            tuple(chosen),
            dict(self._left_out),
            (_peak(self._plain), _peak(made)),
            (_arena(self._plain, device), _arena(made, device)),
            device.name,
            difference,
            self._tolerance,
        )

    def _as_it_is(self, why: str) -> MemoryRewriting:
        peak = _peak(self._plain)
        return MemoryRewriting(left_out=dict(self._left_out), peak_bytes=(peak, peak), why=why)

    def _nothing(self, names: Sequence[str]) -> str:
        if not names:
            return "no concatenation of channels has only readers that could read it in parts" + (
                ", but for those left out" if self._left_out else ""
            )
        without, every = (self._rewriting.peak_bytes(some) for some in ((), names))
        return f"with all of {', '.join(names)} in parts, the least peak is {every:,} bytes, as it is {without:,}"

    def _outputs(self, compiled: CompiledModel, device: Device) -> list[list[Array]]:
        """Return the outputs for each frame of noise, from a thread of its own, which is bound to the device."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_outputs, compiled, device).result()


def _outputs(compiled: CompiledModel, device: Device) -> list[list[Array]]:
    made = []
    with closing(compiled.stage(compiled.graph.operator_names, device)) as stage:
        stage.bind()
        ports = {port.name: index for index, port in enumerate(stage.outputs)}
        for seed in range(FRAMES):
            outputs = [port.buffer() for port in stage.outputs]
            stage.run([_frame(port, seed) for port in stage.inputs], outputs)
            made.append(
                [
                    to_logical(outputs[ports[name]], stage.outputs[ports[name]].layout)
                    for name in compiled.graph.outputs
                    if name in ports
                ]
            )
    return made


def _frame(port: Port, seed: int) -> Array:
    """Return noise: every value of a type of one byte, else as `noise` makes it."""
    array, draw = noise(port), np.random.default_rng(seed)
    if array.dtype in (np.int8, np.uint8):
        ends = np.iinfo(array.dtype)
        array[...] = draw.integers(ends.min, ends.max + 1, array.shape)
    elif np.issubdtype(array.dtype, np.floating):
        array[...] = draw.standard_normal(array.shape)
    return array


def greatest_difference(expected: Sequence[Sequence[Array]], found: Sequence[Sequence[Array]]) -> float:
    """Return the greatest difference of two lists of outputs, each as a share of the largest output of its frame.

    Infinity stands for outputs of different shapes, and for one that is a number in one of them only.

    Examples:
        >>> import numpy as np
        >>> greatest_difference([[np.array([1.0, 4.0])]], [[np.array([1.0, 5.0])]])
        0.25
    """
    greatest = 0.0
    for before, after in zip(expected, found, strict=True):
        for one, other in zip(before, after, strict=True):
            if one.shape != other.shape or one.dtype != other.dtype:
                return float("inf")
            if np.array_equal(one, other, equal_nan=np.issubdtype(one.dtype, np.floating)):
                continue
            a, b = one.astype(np.float64), other.astype(np.float64)
            if not np.array_equal(np.isfinite(a), np.isfinite(b)):
                return float("inf")
            difference, largest = np.nanmax(np.abs(a - b)), np.nanmax(np.abs(a))
            greatest = max(greatest, float(difference / largest) if largest else float("inf"))
    return greatest


def _peak(compiled: CompiledModel) -> int:
    return least_peak(compiled.graph, compiled.graph.operator_names).peak_bytes


def _arena(compiled: CompiledModel, device: Device) -> int:
    return compiled.activation_bytes(compiled.graph.operator_names, device)[1]
