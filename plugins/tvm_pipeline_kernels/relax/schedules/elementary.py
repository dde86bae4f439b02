"""Elementary functions as expressions that become vectors: LLVM calls the library for each number of a vector.

All take and return an expression of float32. What is read several times has a name, so that expressions stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    return _named(x, _exp)


def _exp(x: Any) -> Any:
    def of_parts(power: Any, rest: Any) -> Any:
        terms = _polynomial(rest, EXP) * (rest * rest) + rest + _number(1)
        half = (tirx.Cast("int32", power) + tirx.const(126, "int32")) << tirx.const(23, "int32")  # of 2^power: its bits
        value = tirx.Select(x < _number(LEAST), _number(0), terms * _number(2) * tirx.reinterpret("float32", half))
        return tirx.Select(x > _number(MOST), _number(float("inf")), value)

    bounded = tirx.max(tirx.min(x, _number(MOST)), _number(LEAST))
    return _named(
        tirx.floor(bounded * _number(1.44269504088896341) + _number(0.5)),
        lambda power: _named(
            x - power * _number(LOG2_HIGH) - power * _number(LOG2_LOW), lambda rest: of_parts(power, rest)
        ),
    )


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x)."""
    return _number(1) / (_number(1) + exp(-x))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent, by Cephes (tanhf): 1 - 2 / (e^2x + 1), or a polynomial near 0."""
    return _named(x, lambda x: tirx.Select(tirx.abs(x) < _number(TANH_NEAR), _tanh_near(x), _tanh_far(x)))


def _tanh_near(x: Any) -> Any:
    return x + x * (x * x) * _polynomial(x * x, TANH)


def _tanh_far(x: Any) -> Any:
    return _number(1) - _number(2) / (exp(x + x) + _number(1))


def erf(x: Any) -> Any:
    """Return the error function, by the quotient of polynomials that Eigen has; errors are below 5e-7."""
    return _named(
        _within(x, 4),
        lambda x: _within(x * _polynomial(x * x, ERF_OVER) / _polynomial(x * x, ERF_UNDER), 1),
    )


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "tirx.exp": exp,
    "tirx.sigmoid": sigmoid,
    "tirx.tanh": tanh,
    "tirx.erf": erf,
}


def _named(value: Any, body: Callable[[Any], Any]) -> Any:
    """Return what `body` makes of a name for a value."""
    name = tirx.Var("value", "float32")
    return tirx.Let(name, value, body(name))


def _number(value: float) -> Any:
    return tirx.const(value, "float32")


def _within(x: Any, bound: float) -> Any:
    """Return x from -bound to bound; what is no number stays none."""

    def bounded(x: Any) -> Any:
        below = tirx.Select(x < _number(-bound), _number(-bound), x)
        return tirx.Select(x > _number(bound), _number(bound), below)

    return _named(x, bounded)


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Return the polynomial of these coefficients, that of the highest power first."""
    value = _number(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _number(coefficient)
    return value
