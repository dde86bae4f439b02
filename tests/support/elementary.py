"""Elementary functions in double precision, and numbers at which functions of float32 may be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FUNCTIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
}
CALL = r"\t(?:callq?|bl)\t\w*(exp|tanh|erf)f?(@|\n)"  # of a library's function, in assembly
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 88.7, 88.8, -87.4, -200.0, 200.0]
VALUES = np.concatenate([np.linspace(-90, 90, 20_001), np.linspace(-5, 5, 20_001), np.geomspace(1e-8, 1, 998), SPECIAL])
VALUES = np.resize(VALUES, 41_024).astype("float32")  # a multiple of 64


@np.errstate(over="ignore", invalid="ignore")
def assert_within_two_ulp(name: str, found: NDArray[np.float32]) -> None:
    """Fail unless these are the values of a function at VALUES, each within two units of its last place."""
    exact = FUNCTIONS[name](VALUES.astype("float64"))
    unit = np.spacing(np.abs(exact).astype("float32"))
    is_finite = np.isfinite(unit)
    # Below 2e-38 a number has fewer digits.
    error = np.abs(found.ravel()[is_finite] - exact[is_finite])
    assert (error <= np.maximum(2 * unit[is_finite], 2e-38)).all(), f"{(error / unit[is_finite]).max()} ulp"
    np.testing.assert_array_equal(found.ravel()[~is_finite], exact[~is_finite].astype("float32"))
