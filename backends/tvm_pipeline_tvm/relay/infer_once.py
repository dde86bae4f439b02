"""Types are inferred once for each function, because inferring them anew is half of what `relay.build` does in C++.

Most passes ask for the types of the whole module before they begin, and SimplifyExpr infers them anew behind each of
its two dozen patterns, of which few match: 94 times for a YOLO, of which 79 are of functions that have their types.
"""

from __future__ import annotations

from typing import Any

import tvm

MOST_TYPED = 4  # functions that are kept, as each keeps its constants


@tvm.instrument.pass_instrument
class InferOnce:
    """Leaves out InferType for a module whose functions an earlier InferType has returned.

    A function that somebody else holds is never changed in place, so its types are still right.
    """

    def __init__(self) -> None:
        self._typed: list[Any] = []  # the last that were met are at the end

    def should_run(self, mod: tvm.IRModule, info: Any) -> bool:
        if info.name != "InferType":
            return True
        have = [self._has(function) for _, function in mod.functions_items()]  # of all, so that all are kept
        return not all(have)

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if info.name == "InferType":
            self._typed = [*self._typed, *(function for _, function in mod.functions_items())][-MOST_TYPED:]

    def _has(self, function: Any) -> bool:
        for place, typed in enumerate(self._typed):
            if function.same_as(typed):
                self._typed.append(self._typed.pop(place))
                return True
        return False
