"""How far the results of two processors, or of two compilations of one network, may be apart.

`tvm_pipeline_tvm/agreement.py` compares the targets of one machine, `engine_agreement.py` its engines, and the plug-in
tvm_pipeline_hosts a board with this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_pipeline.backends.ports import Array, Port
from tvm_pipeline.core.number_types import NARROW, dtype_of, is_float
from tvm_pipeline.core.tensor_layout import to_logical

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
    (
        *("round", "floor", "ceil", "trunc", "right_shift", "fixed_point_multiply", "fixed_point_multiply_per_axis"),
        *("quantizelinear", "dynamicquantizelinear", "qlinearconv", "qlinearmatmul"),  # of ONNX
    )
)
ROUNDED_SHARE = 0.3  # of the integers may be off; between x86 and others one in 17 was, after one requantize
ROUNDED_ERROR = 0.25


def roundings_of(kinds: Sequence[str]) -> int:
    """Return how many operators round, in operators of these kinds."""
    return sum(part in ROUNDING for kind in kinds for part in kind.split("+"))


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors are apart.

    Attributes:
        worst: the largest difference; infinite where one is infinite or no number and the other is not.
        largest: the largest value.
        share: the part of the elements that differ at all.
        error: the root mean square of the difference over that of the values.
        dtype: of both tensors, or the coarser type in which a device computes them.
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
        if not is_float(self.dtype):
            return self.worst <= max(roundings, 1) and self.share <= ROUNDED_SHARE
        return self._is_close(roundings, 1.0)

    def is_close_behind_a_cut(self, roundings: int) -> bool:
        """Return whether a network, which rounds so often, may give both."""
        return self._is_close(roundings or not is_float(self.dtype), CUT_FACTOR)

    def _is_close(self, rounds: bool | int, factor: float) -> bool:
        if rounds or self.dtype in NARROW:
            return self.error <= ROUNDED_ERROR
        tolerance = HALF_TOLERANCE if self.dtype == "float16" else TOLERANCE
        return self.worst <= max(factor * tolerance * self.largest, float(np.finfo("float32").tiny))


def difference(expected: tuple[Port, Array], found: tuple[Port, Array], precision: str = "float64") -> Difference:
    """Return how far two tensors, each with the port that says how it lies in memory, are apart.

    Args:
        precision: the type in which a device computes floats, see `Backend.precision`.
    """
    one, other = (to_logical(array, port.layout).ravel().astype("float64") for port, array in (expected, found))
    dtype = expected[0].dtype
    if is_float(dtype):
        dtype = min(dtype, precision, key=lambda name: dtype_of(name).itemsize)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return Difference(np.inf, 0.0, 1.0, np.inf, dtype)
    one, difference = one[finite], np.abs(one[finite] - other[finite])
    if not one.size:
        return Difference(0.0, 0.0, 0.0, 0.0, dtype)
    values = float(np.linalg.norm(one))
    error = float(np.linalg.norm(difference))
    relative = error / values if values else float(np.inf if error else 0.0)
    return Difference(
        float(difference.max()), float(np.abs(one).max()), float((difference > 0).mean()), relative, dtype
    )
