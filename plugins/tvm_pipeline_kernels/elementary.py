"""Elementary functions as expressions that become vectors: LLVM calls the library for each number of a vector.

All take and return an expression of float32. What is read several times has a name, so that expressions stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

try:
    from tvm import tirx as tir  # Relax's
except ImportError:
    from tvm import tir

LEAST, MOST = -86.98, 88.72283  # exponents of what is not 0 and not infinite
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.12194440e-4
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Fitted by Lawson's algorithm, which makes the greatest error least: tanh x = x + x^3 P(x^2) and erf x = x + x P(x^2)
# below the bound, and erf x = 1 - e^-(x + x P(x)) from there to 4.
TANH_BOUND, TANH_MOST = 0.9, 10  # tanh 10 is 1 in float32
TANH_NEAR = (
    *(-4.5545989999e-4, 2.5826676283e-3, -8.2645434886e-3, 2.1663542837e-2, -5.3929302841e-2, 1.3332977891e-1),
    -3.3333322406e-1,
)
ERF_BOUND, ERF_MOST = 1, 4  # erf 4 is 1 in float32
ERF_NEAR = (
    *(7.8534860222e-5, -8.0100703053e-4, 5.1883123815e-3, -2.6853801683e-2, 1.1283584684e-1, -3.7612625957e-1),
    1.2837916613e-1,
)
ERF_FAR = (
    *(-2.1064258181e-4, 3.1869416125e-3, -2.2798446938e-2, 1.0511611402e-1, 6.3583147526e-1),
    1.2848003209e-1,
)


def exp(x: Any) -> Any:
    """Return e to the power of x, by S. Moshier's Cephes library (expf).

    x is n log 2 + f with |f| <= log(2) / 2, a polynomial of degree 7 gives e^f, and 2^n is made of its bits. Relative
    errors are below 2e-7. What is below 1.7e-38 becomes 0.
    """
    return _named(x, _exp)


def _exp(x: Any) -> Any:
    value = _exp_between(x, tir.max(tir.min(x, _number(MOST)), _number(LEAST)))
    value = tir.Select(x < _number(LEAST), _number(0), value)
    return tir.Select(x > _number(MOST), _number(float("inf")), value)


def _exp_between(x: Any, bounded: Any) -> Any:
    """Return e to the power of x, where x is `bounded`, which is from LEAST to MOST."""

    def of_parts(power: Any, rest: Any) -> Any:
        terms = _polynomial(rest, EXP) * (rest * rest) + rest + _number(1)
        half = (tir.Cast("int32", power) + tir.const(126, "int32")) << tir.const(23, "int32")  # of 2^power: its bits
        return terms * _number(2) * tir.reinterpret("float32", half)

    return _named(
        tir.floor(bounded * _number(1.44269504088896341) + _number(0.5)),
        lambda power: _named(
            x - power * _number(LOG2_HIGH) - power * _number(LOG2_LOW), lambda rest: of_parts(power, rest)
        ),
    )


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x). Errors are below 3 ulp."""
    return _number(1) / (_number(1) + exp(-x))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent: a polynomial near 0, else 1 - 2 / (e^2x + 1). Errors are below 2 ulp."""

    def far(size: Any) -> Any:
        bounded = tir.Select(size > _number(TANH_MOST), _number(TANH_MOST), size)
        power = _named(bounded + bounded, lambda double: _exp_between(double, double))
        return _number(1) - _number(2) / (power + _number(1))

    return _odd(x, TANH_BOUND, lambda x: x + x * (x * x) * _polynomial(x * x, TANH_NEAR), far)


def erf(x: Any) -> Any:
    """Return the error function: a polynomial near 0, else 1 - e^-P(x). Errors are below 2 ulp."""

    def far(size: Any) -> Any:
        bounded = tir.Select(size > _number(ERF_MOST), _number(ERF_MOST), size)
        exponent = _named(bounded, lambda size: -(size + size * _polynomial(size, ERF_FAR)))  # above -19
        return _number(1) - _named(exponent, lambda exponent: _exp_between(exponent, exponent))

    return _odd(x, ERF_BOUND, lambda x: x + x * _polynomial(x * x, ERF_NEAR), far)


def _odd(x: Any, bound: float, near: Callable[[Any], Any], far: Callable[[Any], Any]) -> Any:
    """Return `near` of x below a bound, and else `far` of its size with its sign."""

    def signed(x: Any) -> Any:
        sign = tir.reinterpret("int32", x) & tir.const(-(2**31), "int32")
        value = tir.reinterpret("float32", tir.reinterpret("int32", far(tir.abs(x))) | sign)
        return tir.Select(tir.abs(x) < _number(bound), near(x), value)

    return _named(x, signed)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    f"{tir.__name__.rpartition('.')[2]}.{function.__name__}": function for function in (exp, sigmoid, tanh, erf)
}


def _named(value: Any, body: Callable[[Any], Any]) -> Any:
    """Return what `body` makes of a name for a value."""
    name = tir.Var("value", "float32")
    return tir.Let(name, value, body(name))


def _number(value: float) -> Any:
    return tir.const(value, "float32")


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Return the polynomial of these coefficients, that of the highest power first."""
    value = _number(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _number(coefficient)
    return value
