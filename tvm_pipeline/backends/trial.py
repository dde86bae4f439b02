"""A child that loads an engine before this process does: a driver may hang, or end the process that it is in.

It lists the devices, and compiles a model for a device, before this process does either. One that dies or hangs costs
an error that says how. The next question starts another one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tvm_pipeline.errors import RunError
from tvm_pipeline.processes import Child, receive, send

MOST_S = 300.0  # for one answer
_ERROR = "[ERROR]"  # before the reasons that OpenVINO and its provider log alone


class Trial:
    """The child, which starts when it is first asked.

    Args:
        function: of the child, as `Child` takes it; it calls `answer`.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._child: Child | None = None
        self._asking = threading.Lock()
        self._known: dict[str, tuple[Any, str]] = {}

    def known(self, question: str) -> tuple[Any, str]:
        """Return the answer to a question that is asked once, by a fresh child, and why there is none."""
        if question not in self._known:
            self.close()
            try:
                self._known[question] = self.ask(question), ""
            except RunError as error:
                self._known[question] = None, str(error)
        return self._known[question]

    def ask(self, question: object, content: bytes = b"-", limit_s: float = MOST_S) -> Any:
        """Return the answer, as JSON has it.

        Raises:
            RunError: what the child raised, as its text; or that it died of the question or did not answer, and how.
        """
        with self._asking:
            was_asked_before = self._child is not None
            said, words = self._said(question, content, limit_s)
            if not said and was_asked_before:  # an earlier question may have damaged the child
                said, words = self._said(question, content, limit_s)
        if not said:
            raise RunError(words)
        value, fault = msgspec.json.decode(said)
        if fault:
            reasons = [line for line in words.splitlines() if _ERROR in line]
            raise RunError(fault + (f" ({reasons[0].rpartition(_ERROR)[2].strip()[:200]})" if reasons else ""))
        return value

    def _said(self, question: object, content: bytes, limit_s: float) -> tuple[bytes, str]:
        """Return what the child says, and what it logged meanwhile; of one that dies nothing, and how it ended."""
        try:
            child = self._child = self._child or Child(self._function, b"-", keeps_words=True)
            told = len(child.words)
            child.send(msgspec.json.encode(question))
            child.send(content)
            if said := child.receive(time.monotonic() + limit_s)[0]:
                return said, child.words[told:]
            last = child.words.strip().rpartition("\n")[2][-200:]
            how = f"the process that tried it first {child.how()}{last and f' ({last})'}"
        except TimeoutError:
            self._end()
            raise RunError(f"the process that tried it first did not end it in {limit_s:g} s") from None
        except OSError as error:
            how = f"no process can try it first: {error}"
        self._end()
        return b"", how

    def close(self) -> None:
        with self._asking:
            self._end()

    def _end(self) -> None:
        if self._child:
            self._child.end()
        self._child = None


def answer(channel: socket.socket, do: Callable[[Any, bytes], Any]) -> None:
    """Answer, as the child, each question by what `do` returns of it and of its content, or raises."""
    while question := receive(channel)[0]:
        content = receive(channel)[0]
        try:
            told = do(msgspec.json.decode(question), content), ""
        except Exception as error:  # of any engine
            told = None, str(error) or type(error).__name__
        send(channel, msgspec.json.encode(told))
