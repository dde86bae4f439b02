"""Elementary functions as expressions that become vectors: LLVM calls the library for each number of a vector.

The exponential function is that of S. Moshier's Cephes library (expf): x is n log 2 + f with |f| <= log(2) / 2, a
polynomial of degree 7 gives e^f, and 2^n is made of its bits. Relative errors are below 2e-7. What is below 1.7e-38
becomes 0.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

LEAST, MOST = -86.98, 88.72283  # exponents of what is not 0 and not infinite
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(x: Any) -> Any:
    """Return the exponential function of a float32 expression, which is evaluated several times."""

    def number(value: float) -> Any:
        return tirx.const(value, "float32")

    power = tirx.floor(tirx.max(tirx.min(x, number(MOST)), number(LEAST)) * number(1.44269504088896341) + number(0.5))
    rest = x - power * number(LOG2_HIGH) - power * number(LOG2_LOW)
    terms = number(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        terms = terms * rest + number(coefficient)
    terms = terms * (rest * rest) + rest + number(1)
    bits = (tirx.Cast("int32", power) + tirx.const(126, "int32")) << tirx.const(23, "int32")  # of half of the power
    value = terms * number(2) * tirx.reinterpret("float32", bits)
    value = tirx.Select(x < number(LEAST), number(0), value)
    return tirx.Select(x > number(MOST), number(float("inf")), value)
