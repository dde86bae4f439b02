"""What numpy computes of the operators that Relay and Relax have alike: the part of both tables that is the same.

A rule is a function of (the call or its attributes, the type of its result, the values of its arguments), giving the
value, or None where numpy's result may be another than TVM's. Next: `relay/fold_table.py`, `relax/numpy_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = "Array | tuple[Array, ...] | None"
Rule: TypeAlias = Callable[..., Any]

NUMPY_DTYPES = {"bool", "float16", "float32", "float64"}
NUMPY_DTYPES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def arithmetic(function: Callable[..., Any]) -> Rule:
    """Return a rule for any numbers."""
    return lambda call, out, *values: np.asarray(function(*values))


def floating(function: Callable[..., Any]) -> Rule:
    """Return a rule for floats; of integers numpy and TVM differ (rounding of a quotient, negative powers)."""
    return lambda call, out, *values: np.asarray(function(*values)) if out.dtype.startswith("float") else None


def ints(values: Any) -> list[int]:
    """Return the numbers of an attribute or of an argument."""
    return [int(value) for value in values]


# numpy's functions of these names compute what the operators of these names do.
_OF_NUMBERS = (
    *("add", "subtract", "multiply", "maximum", "minimum", "abs", "negative", "where"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
)
_OF_FLOATS = ("power", "sqrt", "exp", "floor", "ceil")

COMMON: dict[str, Rule] = {
    **{name: arithmetic(getattr(np, name)) for name in _OF_NUMBERS},
    **{name: floating(getattr(np, name)) for name in _OF_FLOATS},
    "rsqrt": floating(lambda x: np.reciprocal(np.sqrt(x))),
    "nn.relu": arithmetic(lambda x: np.maximum(x, x.dtype.type(0))),
    "zeros_like": lambda call, out, like: np.zeros(out.shape, out.dtype),
    "ones_like": lambda call, out, like: np.ones(out.shape, out.dtype),
}
