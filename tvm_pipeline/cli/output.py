"""The output of a command: tables for people, one JSON object for programs, an error in one line.

Messages of the library name settings by their fields, such as `min_throughput_fps`; they are printed here with the
option of the command line, such as --min-throughput. What others wrote, such as the name of a device or the refusal of
a board, is text on every console here: it has no markup, and its control characters are printed as their escapes.
Read next: option_names.py, the table of names.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tvm_pipeline.addresses import without_secrets
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.option_names import explained, translated

if TYPE_CHECKING:
    from tvm_pipeline.core.plan import Decision, Measured
    from tvm_pipeline.core.platform import Platform

LINES_S = 5.0  # between two lines of progress where standard error is no terminal
# All but the tab and the end of a line, and what turns the direction of a text around.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class PlainConsole(Console):
    """A console that takes no command from the text that it prints."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of a renderable; those of rich itself that move the cursor are no text."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(printable(piece.text), piece.style)


errors = PlainConsole(stderr=True)


def printable(text: str) -> str:
    """Return a text with its control characters as escapes, such as `\\x1b`: a terminal would obey them."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def show(renderable: RenderableType, as_json: bool) -> None:
    """Print for people: on standard output, or on standard error where standard output belongs to JSON."""
    (errors if as_json else PlainConsole()).print(renderable)


def say(line: str, style: str | None = None) -> None:
    """Print one line on standard error, unbroken however long: logs and scripts read it."""
    errors.print(with_options(line), style=style, highlight=False, soft_wrap=True)


def warn(line: str) -> None:
    """Print a warning on standard error."""
    say(f"warning: {line}", "yellow")


def print_json(value: Any) -> None:
    """Print the one JSON object of a command."""
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


class LogHandler(logging.Handler):
    """Print warnings, but none `without_warnings`, and show the steps of the work (INFO) as `steps_to` asks.

    Records of this package and its guests have the names of options; warnings of others are as without a handler.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.show_step: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        is_step = record.levelno < logging.WARNING
        if not record.name.startswith("tvm_pipeline"):
            if logging.lastResort and not is_step:
                logging.lastResort.handle(record)
        elif is_step and self.show_step:
            self.show_step(self.format(record))
        elif not is_step and not _drops_warnings.get():
            warn(self.format(record))


_handler = LogHandler()
_drops_warnings: ContextVar[bool] = ContextVar("_drops_warnings", default=False)


@contextmanager
def logged() -> Iterator[None]:
    """Print what is logged meanwhile, from warnings on, and show steps where a command asks for them."""
    logger = logging.getLogger()
    level = logger.level
    logger.addHandler(_handler)
    logger.setLevel(min(logging.INFO, level))
    try:
        yield
    finally:
        logger.removeHandler(_handler)
        logger.setLevel(level)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Print no warnings meanwhile, of what the calling thread does: they were printed before."""
    token = _drops_warnings.set(True)
    try:
        yield
    finally:
        _drops_warnings.reset(token)


@contextmanager
def steps_to(show_step: Callable[[str], None]) -> Iterator[None]:
    """Have a function show the steps of the work meanwhile, from any thread."""
    before, _handler.show_step = _handler.show_step, show_step
    try:
        yield
    finally:
        _handler.show_step = before


@contextmanager
def spinner() -> Iterator[None]:
    """Show the steps of the work on standard error: beside a spinner, or in a file as a line every few seconds."""
    if not errors.is_terminal:
        with steps_to(every_few_seconds(say)):
            yield
        return
    with errors.status("starting") as status, steps_to(lambda line: status.update(Text(with_options(line)))):
        yield


def every_few_seconds(show_line: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes a line on if none was for `LINES_S` seconds, and drops it otherwise."""
    told_s = time.monotonic()

    def heard(line: str) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= LINES_S:
            told_s = now_s
            show_line(line)

    return heard


def with_options(text: str) -> str:
    """Return a text of the library with options of the command line in place of fields."""
    return translated(text, _option)


def print_error(error: Exception, wants_traceback: bool) -> int:
    """Print the error in one line; return the status to end with: 2 for wrong usage, else 1."""
    if wants_traceback:
        trace = without_secrets("".join(traceback.format_exception(error)))
        errors.print(trace, highlight=False, soft_wrap=True, end="")
    is_known = isinstance(error, PipelineError)
    reason = explained(error, _option) if is_known else without_secrets(f"{type(error).__name__}: {error}")
    hint = "" if is_known or wants_traceback else " (--traceback shows where)"
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    say(f"error: {' '.join(lines[:2])}{hint}", "red")
    return 2 if isinstance(error, OptionError) else 1


def decision_json(decision: Decision, platform: Platform) -> dict[str, Any]:
    """Return the winner, why it won, and every candidate, for JSON."""
    from tvm_pipeline.workflow.steps import plan_json

    return {
        **plan_json(decision.plan, platform),
        **choice_json(decision),
        "candidates": [plan_json(plan) for plan in decision.candidates],
    }


def choice_json(decision: Decision) -> dict[str, Any]:
    """Return why a plan was chosen, for JSON: what decided, and the candidates that were measured for it."""
    return {
        "why": with_options(decision.why),
        "decided_by": decision.decided_by,
        "verified": [measured_json(found) for found in decision.measured],
    }


def measured_json(found: Measured) -> dict[str, Any]:
    """Return a plan that ran side by side with others, for JSON: measured figures beside those predicted."""
    from tvm_pipeline.core.frame_energy import energy_json
    from tvm_pipeline.workflow.steps import plan_json

    return {
        **plan_json(found.plan),
        "measured": {
            "throughput_fps": found.throughput_fps,
            "latency_s": found.latency_s,
            **energy_json(found.energy),
            "spread": found.spread,
            "statistics": asdict(found.statistics),
        },
        "prediction_error": found.prediction_error,
    }


def _option(name: str) -> str:
    return f"--{name}"
