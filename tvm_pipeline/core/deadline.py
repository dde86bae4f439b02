"""A limit of time for work on a file that somebody else made: a small model can ask for any amount of it."""

from __future__ import annotations

import time

from tvm_pipeline.errors import ModelError


class Deadline:
    """The time that a piece of work on a model may take; what goes from operator to operator checks it at each.

    It counts the processor time of the thread that makes it, so that a busy machine refuses no model.

    Args:
        doing: the model and the work, for the message.
        limit_s: seconds.
        remedy: what the user does next.

    Examples:
        >>> Deadline("net.onnx: reading it", 0.0, "export it without loops").check("operator Loop (node while)")
        Traceback (most recent call last):
            ...
        tvm_pipeline.errors.ModelError: net.onnx: reading it takes more than 0 s of processor time, \
the last at operator Loop (node while); export it without loops
    """

    def __init__(self, doing: str, limit_s: float, remedy: str) -> None:
        self._doing, self._limit_s, self._remedy = doing, limit_s, remedy
        self._until_s = time.thread_time() + limit_s

    def check(self, operator: str) -> None:
        """Raise ModelError where the time is over.

        Args:
            operator: what is at work now.
        """
        if time.thread_time() > self._until_s:
            raise ModelError(
                f"{self._doing} takes more than {self._limit_s:g} s of processor time, the last at {operator}; "
                f"{self._remedy}"
            )
