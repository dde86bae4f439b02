"""Elementary functions as expressions that become vectors: LLVM calls the library for each number of a vector.

All take and return an expression of float32, or of a vector of them, and evaluate it several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx

LEAST, MOST = -86.98, 88.72283  # exponents of what is not 0 and not infinite
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.12194440e-4
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
TANH_NEAR = 0.625
ERF_OVER = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
ERF_UNDER = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03),
    -1.42647390514189e-02,
)


def exp(x: Any) -> Any:
    """Return e to the power of x, by S. Moshier's Cephes library (expf).

    x is n log 2 + f with |f| <= log(2) / 2, a polynomial of degree 7 gives e^f, and 2^n is made of its bits. Relative
    errors are below 2e-7. What is below 1.7e-38 becomes 0.
    """
    number = _numbers_like(x)
    integer = f"int32x{_lanes(x)}" if _lanes(x) > 1 else "int32"
    power = tirx.floor(tirx.max(tirx.min(x, number(MOST)), number(LEAST)) * number(1.44269504088896341) + number(0.5))
    rest = x - power * number(LOG2_HIGH) - power * number(LOG2_LOW)
    terms = _polynomial(rest, EXP) * (rest * rest) + rest + number(1)
    bits = (tirx.Cast(integer, power) + tirx.const(126, integer)) << tirx.const(23, integer)  # of half of the power
    value = terms * number(2) * tirx.reinterpret(x.ty.dtype, bits)
    value = tirx.Select(x < number(LEAST), number(0), value)
    return tirx.Select(x > number(MOST), number(float("inf")), value)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x)."""
    one = _numbers_like(x)(1)
    return one / (one + exp(-x))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent, by Cephes (tanhf): 1 - 2 / (e^2x + 1), or a polynomial near 0."""
    number = _numbers_like(x)
    near = x + x * (x * x) * _polynomial(x * x, TANH)
    far = number(1) - number(2) / (exp(x + x) + number(1))
    return tirx.Select(tirx.abs(x) < number(TANH_NEAR), near, far)


def erf(x: Any) -> Any:
    """Return the error function, by the quotient of polynomials that Eigen has; errors are below 5e-7."""
    near = _within(x, 4)
    return _within(near * _polynomial(near * near, ERF_OVER) / _polynomial(near * near, ERF_UNDER), 1)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {"tirx.exp": exp, "tirx.sigmoid": sigmoid, "tirx.tanh": tanh}


def _within(x: Any, bound: float) -> Any:
    """Return x from -bound to bound; what is no number stays none."""
    number = _numbers_like(x)
    return tirx.Select(x > number(bound), number(bound), tirx.Select(x < number(-bound), number(-bound), x))


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Return the polynomial of these coefficients, that of the highest power first."""
    number = _numbers_like(x)
    value = number(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + number(coefficient)
    return value


def _numbers_like(x: Any) -> Callable[[float], Any]:
    """Return what makes a constant of the type of an expression."""
    return lambda value: tirx.const(value, x.ty.dtype)


def _lanes(x: Any) -> int:
    return int(tvm.DataType(x.ty.dtype).lanes)
