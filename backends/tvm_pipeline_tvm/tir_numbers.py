"""Indices of lowered TIR as numbers, for all iterations of the loops around at once; `overwriting.py` compares them.

Shapes are known, so that an index is a number in each iteration: exact, whatever divisions and remainders a schedule
leaves in it. Nodes of TIR are known by the names of their classes, since those of TVM 0.19 (`tvm.tir`) and 0.27
(`tvm.tirx`) agree but for a few.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = Any  # an int, or an array with an axis for each loop (the innermost first) and one for the lanes
VARIABLES = ("Var", "SizeVar")

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": np.minimum,
    "Max": np.maximum,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
}


class UnknownError(Exception):
    """An expression depends on what is in memory, or has a node that this module does not know."""


class Iterations:
    """The loops, branches and bound variables around a statement, as a walk over a function enters and leaves them."""

    def __init__(self) -> None:
        self._extents: list[int] = []
        self._numbers: dict[Any, Numbers] = {}  # of loop variables
        self._bound: dict[Any, Any] = {}  # expressions of other variables
        self._conditions: list[Callable[[], Numbers]] = []

    def bind(self, variable: Any, expression: Any) -> None:
        self._bound[variable] = expression

    def loop(self, node: Any, parts: int) -> Iterator[None]:
        """Enter a loop from 0, its iterations in so many parts if it is the outermost; yield in each.

        Raises:
            UnknownError: how often it runs is not known.
        """
        extent = self.value(node.extent)
        count = int(np.max(extent))
        parts = min(count, parts) if not self._extents else 1
        for turns in np.array_split(np.arange(count), parts) if count > 0 else ():
            turn = turns.reshape(-1, *[1] * (len(self._extents) + 1))
            self._numbers[node.loop_var] = turn
            self._extents.append(len(turns))
            outer = len(self._conditions)
            if np.ndim(extent):
                self._conditions.append(partial(np.less, turn, extent))
            yield
            del self._conditions[outer:]
            self._extents.pop()

    @contextmanager
    def branch(self, condition: Any, wanted: bool) -> Iterator[None]:
        """Enter the branch that runs where a condition is as wanted."""
        self._conditions.append(lambda: np.equal(self.value(condition), wanted))
        yield
        self._conditions.pop()

    def everywhere(self, node: Any, lanes: int) -> Numbers:
        """Return what an expression is, as an array of all iterations here and all lanes."""
        return np.broadcast_to(self.value(node), (*reversed(self._extents), lanes))

    def runs(self, lanes: int) -> Numbers:
        """Return in which iterations a statement here runs, in the shape of `everywhere`.

        Where a condition is not known, it may run.
        """
        runs: Numbers = True
        for condition in self._conditions:
            try:
                runs = np.logical_and(runs, condition())
            except UnknownError:
                continue
        return np.broadcast_to(runs, (*reversed(self._extents), lanes))

    def value(self, node: Any) -> Numbers:
        """Return what an expression is in all iterations of the loops around.

        Raises:
            UnknownError: it depends on what is in memory.
        """
        kind = type(node).__name__
        if kind == "IntImm":
            return int(node.value)
        if kind in VARIABLES:
            if node in self._numbers:
                return self._numbers[node]
            if node in self._bound:
                return self.value(self._bound[node])
        elif kind in BINARY:
            left, right = self.value(node.a), self.value(node.b)
            if kind in ("FloorDiv", "FloorMod") and not np.all(right):
                raise UnknownError
            return BINARY[kind](left, right)
        elif kind == "Not":
            return np.logical_not(self.value(node.a))
        elif kind == "Cast" and dtype_of(node) in ("int32", "int64"):
            return self.value(node.value)
        elif kind == "Ramp" and lanes_of(node.base) == 1:
            return self.value(node.base) + self.value(node.stride) * np.arange(int(node.lanes))
        elif kind == "Broadcast" and lanes_of(node.value) == 1:
            return self.value(node.value)
        elif name_of(node) == "likely":
            return self.value(node.args[0])
        raise UnknownError


def dtype_of(node: Any) -> str:
    return str(getattr(node, "ty", node).dtype)


def lanes_of(node: Any) -> int:
    dtype = dtype_of(node)
    lanes = re.search(r"x(\d+)$", dtype)
    if "vscale" in dtype:
        raise UnknownError
    return int(lanes[1]) if lanes else 1


def name_of(node: Any) -> str:
    """Return the name of the operator that a node calls, without the TIR that it is of; empty for any other node."""
    return str(getattr(getattr(node, "op", None), "name", "")).rpartition(".")[2]
