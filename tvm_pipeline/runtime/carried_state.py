"""The state that goes from each frame to the next, held by the pipeline and not by a stage.

A stage may die, hang or be exchanged, so what it has computed of a frame's state is kept here, for as long as the frame
may be run again. A loop waits for the state that the frame before has left, whichever plan's stage leaves it, and the
first value that a frame leaves is the one that counts. So every frame meets the state that it would meet in a plain
loop over the model, across changes of the plan and failures. Frames are numbered over the whole run.

Read next: worker.py, which gives a stage its state; core/state_loops.py, which says what a loop is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.runtime.slots import Slot

LOOK_S = 0.05  # between two looks at whether the frame is still wanted


class CarriedState:
    """The states of the loops of a model: zeros before frame 0, then what each frame left.

    Args:
        graph: the graph that is planned.
    """

    def __init__(self, graph: OperatorGraph) -> None:
        self.loops = {operator.name: operator.carried for operator in graph.operators if operator.carried}
        zeros = {name: [np.zeros(s.shape, s.dtype) for s, _ in carried] for name, carried in self.loops.items()}
        self._before: dict[str, dict[int, list[Array]]] = {name: {0: states} for name, states in zeros.items()}
        self._changed = threading.Condition()

    def __bool__(self) -> bool:
        """Return whether there is any loop."""
        return bool(self.loops)

    def of(self, operators: Sequence[str]) -> StageState | None:
        """Return the states of the loops of a stage; None where it holds none."""
        names = [name for name in operators if name in self.loops]
        return StageState(self, names) if names else None

    def give(self, loop: str, slot: Slot, frame: int, dropped: Callable[[], bool]) -> bool:
        """Wait for the state that the frame before has left, and copy it into the slot.

        Returns whether that was done: it gives up once `dropped()`.
        """
        with self._changed:
            while (states := self._before[loop].get(frame)) is None:
                if dropped():
                    return False
                self._changed.wait(LOOK_S)
        for (state, _), array in zip(self.loops[loop], states, strict=True):
            np.copyto(slot.buffers[state.name], array)
        return True

    def keep(self, loop: str, slot: Slot, frame: int) -> None:
        """Keep what a frame has left, unless it has run before."""
        with self._changed:
            if frame + 1 not in self._before[loop]:
                shapes = [(state.shape, output) for state, output in self.loops[loop]]
                self._before[loop][frame + 1] = [slot.logical(output).copy().reshape(shape) for shape, output in shapes]
                self._changed.notify_all()

    def forget(self, frame: int) -> None:
        """Drop the states of the frames before this one: their results were taken, and they never run again."""
        with self._changed:
            for known in self._before.values():
                for old in [number for number in known if number < frame]:
                    del known[old]


class StageState:
    """The states of the loops of one stage."""

    def __init__(self, states: CarriedState, loops: Sequence[str]) -> None:
        self._states, self._loops = states, loops

    def give(self, slot: Slot, frame: int, dropped: Callable[[], bool]) -> bool:
        """Copy into the slot what the frame before has left; return False where the frame was dropped meanwhile."""
        return all(self._states.give(loop, slot, frame, dropped) for loop in self._loops)

    def keep(self, slot: Slot, frame: int) -> None:
        """Keep what the frame has left."""
        for loop in self._loops:
            self._states.keep(loop, slot, frame)
