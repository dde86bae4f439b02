"""The child that loads an engine first: what it raises, and how it ends, comes back as one error."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import closing
from typing import Any

import pytest

from tvm_pipeline.backends.trial import Trial, answer
from tvm_pipeline.errors import RunError

damaged: list[bool] = []


def serve(order: bytes, channel: socket.socket) -> None:
    """Be a child that does what it is asked."""

    def do(question: list[Any], content: bytes) -> object:
        if damaged:
            os.kill(os.getpid(), signal.SIGSEGV)
        match question:
            case ["damage"]:
                damaged.append(True)
            case ["die"]:
                sys.stderr.write("a driver's last words\n")
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGBUS)
            case ["hang"]:
                time.sleep(1000)
            case ["refuse"]:
                sys.stderr.write("about to refuse\n2026 [W] [ERROR] [Engine] no such device\n")
                sys.stderr.flush()
                raise ValueError("refused")
        return [os.getpid(), len(content)]

    answer(channel, do)


def test_it_answers_and_what_it_raises_is_told_with_what_it_logged() -> None:
    with closing(Trial(f"{__name__}:serve")) as trial:
        process, length = trial.ask(["pid"], b"x" * 100_000)
        assert length == 100_000
        with pytest.raises(RunError, match=r"^refused \(\[Engine\] no such device\)$"):
            trial.ask(["refuse"])
        assert trial.ask(["pid"])[0] == process


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("question", "limit_s", "message"),
    [
        ("die", 100.0, r"^the process that tried it first was killed by SIGBUS \(a driver's last words\)$"),
        ("hang", 0.2, r"^the process that tried it first did not end it in 0.2 s$"),
    ],
)
def test_one_that_dies_or_hangs_costs_an_error_and_the_next_question_has_another(
    question: str, limit_s: float, message: str
) -> None:
    with closing(Trial(f"{__name__}:serve")) as trial:
        process, _ = trial.ask(["pid"])
        with pytest.raises(RunError, match=message):
            trial.ask([question], limit_s=limit_s)
        assert trial.ask(["pid"])[0] != process


def test_one_that_an_earlier_question_damaged_costs_nothing() -> None:
    with closing(Trial(f"{__name__}:serve")) as trial:
        process, _ = trial.ask(["damage"])
        assert trial.ask(["pid"])[0] != process
