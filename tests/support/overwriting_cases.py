"""Small functions of lowered TIR, in the text that TVM 0.19 and 0.27 both parse, whose result may overwrite or may not.

Each is run with its result in an argument and beside it, so that what is said of it here is itself checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SIZE = 64


@dataclass(frozen=True)
class Case:
    """A function of `x` and `w`, both of SIZE float32, and of the result `y`.

    Attributes:
        allowed: positions of the arguments that the result may overwrite.
        harmed: those with which the result is another, or the other results are: a refusal that must be.
    """

    body: str
    allowed: tuple[int, ...] = ()
    harmed: tuple[int, ...] = ()
    x: str = "float32"
    y: str = "float32"

    def text(self, no_alias: str) -> str:
        """Return the function; `no_alias` is the attribute by which TVM tells LLVM that arguments do not overlap."""
        body = "\n".join("    " + line for line in self.body.strip().splitlines())
        x, w, y = (f'T.Buffer(({SIZE},), "{dtype}")' for dtype in (self.x, "float32", self.y))
        return (
            f"@T.prim_func\ndef main(x: {x}, w: {w}, y: {y}):\n"
            f'    T.func_attr({{"global_symbol": "main", {no_alias}}})\n{body}\n'
        )


CASES = {
    "each element for itself": Case(
        """
for i in T.parallel(4):
    for j in range(16):
        y[i * 16 + j] = T.max(x[i * 16 + j] - w[i * 16 + j], T.float32(0))
""",
        (0, 1),
    ),
    "vectors": Case(
        """
for i in T.parallel(4):
    y[T.Ramp(i * 16, 1, 16)] = x[T.Ramp(i * 16, 1, 16)] * T.Broadcast(w[i], 16)
""",
        (0,),
    ),
    "the same index in other words": Case(
        """
for i in range(64):
    y[i // 8 * 8 + i % 8] = x[i] + w[i % 8 + (i - i % 8)]
""",
        (0, 1),
    ),
    "a branch for each part": Case(
        """
for i in range(64):
    if i < 40:
        y[i] = x[i] + T.float32(1)
    else:
        y[i] = w[i]
""",
        (0, 1),
    ),
    "a last tile that is cut off": Case(
        """
for i in range(5):
    for j in range(15):
        if i * 15 + j < 64:
            y[i * 15 + j] = x[i * 15 + j] * T.float32(3)
""",
        (0, 1),
    ),
    "an index that is the same where it is stored": Case(
        """
for i in range(64):
    if i < 63:
        y[i] = x[T.min(i, 62)] + T.float32(1)
    else:
        y[i] = w[i]
""",
        (0, 1),
    ),
    "rows of a triangle": Case(
        """
for i in range(8):
    for j in range(i + 1):
        y[i * 8 + j] = x[i * 8 + j] + T.float32(1)
    for j in range(7 - i):
        y[i * 8 + i + 1 + j] = w[i * 8 + i + 1 + j]
""",
        (0, 1),
    ),
    "a last tile that overlaps": Case(
        """
for i in range(5):
    for j in range(15):
        y[T.min(i * 15, 49) + j] = x[T.min(i * 15, 49) + j] * T.float32(3)
""",
        harmed=(0,),
    ),
    "an index into others": Case(
        """
for i in range(64):
    y[i] = w[T.Cast("int32", x[i])]
""",
        (0,),
        harmed=(1,),
    ),
    "an expression that is used twice": Case(
        """
for i in range(64):
    y[i] = T.exp(x[i] * T.float32(0.01)) * w[63 - i] + x[i]
""",
        (0,),
        harmed=(1,),
    ),
    "another type of as many bytes": Case(
        """
for i in range(64):
    y[i] = T.Cast("float32", x[i]) * w[0]
""",
        (0,),
        x="int32",
    ),
    "another type of fewer bytes": Case(
        """
for i in range(64):
    y[i] = T.Cast("float32", x[i]) + w[0]
""",
        x="int8",
    ),
    "stored once for each term": Case(
        """
for k, i in T.grid(3, 64):
    y[i] = x[i] * (w[k] + T.float32(1))
""",
        harmed=(0,),
    ),
    "stored by two statements": Case(
        """
for i in range(64):
    y[i] = x[i] + w[i]
for i in range(64):
    y[i] = x[i] * w[i]
""",
        harmed=(0, 1),
    ),
    "initialised first": Case(
        """
for i in range(64):
    y[i] = T.float32(0)
for k, i in T.grid(3, 64):
    y[i] = y[i] + x[i] * w[k]
""",
        harmed=(0,),
    ),
    "reversed": Case(
        """
for i in range(64):
    y[i] = x[63 - i] + w[0]
""",
        harmed=(0,),
    ),
    "a neighbour": Case(
        """
for i in range(64):
    y[i] = x[i] + x[T.max(i - 1, 0)] + w[0]
""",
        harmed=(0,),
    ),
    "lanes in another order": Case(
        """
for i in range(4):
    y[T.Ramp(i * 16, 1, 16)] = x[T.Ramp(48 - i * 16, 1, 16)] + T.Broadcast(w[0], 16)
""",
        harmed=(0,),
    ),
    "a lane for all": Case(
        """
for i in range(4):
    y[T.Ramp(i * 16, 1, 16)] = x[T.Ramp(i * 16, 1, 16)] + T.Broadcast(x[i * 16] + w[0], 16)
""",
    ),
    "lanes shuffled": Case(
        """
for i in range(16):
    y[T.Ramp(i * 4, 1, 4)] = T.Shuffle([x[T.Ramp(i * 4, 1, 4)]], [3, 2, 1, 0]) + T.Broadcast(w[0], 4)
""",
    ),
    "several lanes for one": Case(
        """
for i in range(64):
    y[i] = T.Cast("float32", T.reinterpret("int64", x[T.Ramp(i // 2 * 2, 1, 2)])) + w[0]
""",
    ),
    "results that others are made of": Case(
        """
for i in range(32):
    y[i] = x[i] + T.float32(1)
for i in range(32):
    y[32 + i] = x[32 + i] + y[i]
""",
    ),
    "a condition on what is overwritten": Case(
        """
for i in range(64):
    if x[0] < T.float32(100):
        y[i] = x[i] + T.float32(100) + w[0]
""",
    ),
    "two results": Case(
        """
for i in range(64):
    y[i] = x[i] + T.float32(1)
    w[i] = x[i]
""",
    ),
    "the address taken": Case(
        """
for i in range(64):
    T.evaluate(T.address_of(x[i]))
    y[i] = x[i] + w[0]
""",
    ),
    "the address of all": Case(
        """
T.evaluate(T.isnullptr(x.data))
for i in range(64):
    y[i] = x[i] + w[0]
""",
    ),
}


def check(case: Case, run: Callable[[Sequence[Array]], None]) -> None:
    """Run a function with its result in each argument; the result is that of a run apart, or is not where said so."""
    given = [(np.arange(SIZE) * 37 % SIZE).astype(case.x), (np.arange(SIZE) * 29 % SIZE).astype("float32")]
    apart = aligned(np.full(SIZE, 7, case.y))
    run([*map(aligned, given), apart])
    for position in (*case.allowed, *case.harmed):
        arrays = [aligned(each) for each in given]
        inside = arrays[position].view(case.y)
        run([*arrays, inside])
        assert np.array_equal(inside, apart) == (position in case.allowed), position


def aligned(array: Array) -> Array:
    """Return a copy at an address that vectors are aligned to."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
