"""A child that reports: compiling (`relay/child.py`) and kernels on a device may end a process.

Kernels may also hang, so a report may say how long the parent may hear nothing.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import msgspec

from tvm_pipeline import errors
from tvm_pipeline.errors import RunError
from tvm_pipeline.processes import Child, send

_ENDING_S = 60.0  # that a child has for ending after it has hung up
_stopped: ContextVar[threading.Event | None] = ContextVar("_stopped", default=None)


class ChildReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child tells; fields that are empty are not meant.

    Attributes:
        log: logger, level and message of a record.
        error: the type and the message of the error that ended it.
    """

    log: tuple[str, int, str] = ("", 0, "")
    error: tuple[str, str] = ("", "")


AnyReport = TypeVar("AnyReport", bound=ChildReport)


def run_child(
    function: str, order: msgspec.Struct, kind: type[AnyReport], heard: Callable[[AnyReport], float | None]
) -> Child:
    """Run a function, as `Child` names it, in a child until it ends; return the child.

    Args:
        order: what it is to do, which comes as MessagePack.
        kind: of its reports.
        heard: takes a report, and returns the seconds within which the next must come; None for any time.

    Raises:
        PipelineError: the child reported it as the last thing.
        TimeoutError: a report did not come in time, and the child was killed.
        RunError: it cannot be started; its result is not needed any more (`raise_if_stopped`); or it was killed and
            does not go, because a driver holds it.
    """
    try:
        child = Child(function, msgspec.msgpack.encode(order), keeps_words=True)
    except OSError as error:
        raise RunError(
            f"no process can be started for {function}: {error.strerror or error}; end other programs, or raise the "
            "limit of processes (`ulimit -u`)"
        ) from error
    report, limit_s = kind(), None
    try:
        while message := child.receive(None if limit_s is None else time.monotonic() + limit_s)[0]:
            raise_if_stopped()
            report = msgspec.json.decode(message, type=kind)
            if report.log[0]:
                logging.getLogger(report.log[0]).log(report.log[1], "%s", report.log[2])
            limit_s = heard(report)
        child.wait(_ENDING_S)
    finally:
        if not child.end():
            raise RunError(
                f"process {child.pid} was killed and does not go: a driver holds it; restart the machine before the "
                "device is used again"
            )
    if report.error[0]:
        raise getattr(errors, report.error[0], RunError)(report.error[1])
    return child


@contextlib.contextmanager
def stoppable_pool(workers: int) -> Iterator[Callable[..., Future[Any]]]:
    """Yield the function that submits work to threads, which has the context of the caller.

    When the block ends, be it by Ctrl-C, work that still runs ends at its next `raise_if_stopped`.
    """
    stopped = threading.Event()

    def submit(function: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        context = copy_context()
        context.run(_stopped.set, stopped)
        return pool.submit(context.run, function, *arguments, **options)

    with ThreadPoolExecutor(workers) as pool:
        try:
            yield submit
        finally:
            stopped.set()  # the pool waits for its threads


def raise_if_stopped() -> None:
    """Raise RunError in a thread of a `stoppable_pool` whose block has ended."""
    if (stopped := _stopped.get()) and stopped.is_set():
        raise RunError("it was stopped, since its result is not needed any more")


def last_words(child: Child) -> str:
    """Return the assertion that failed, or the last line, without the path of LLVM's source in front of it."""
    lines = [line.strip() for line in child.words.splitlines() if line.strip()]
    told = [line for line in lines if "Assertion" in line or "LLVM ERROR" in line] or lines[-1:]
    return told[0][-300:] if told else ""


@contextlib.contextmanager
def reporting(channel: socket.socket, kind: type[ChildReport], log_level: int) -> Iterator[Callable[..., None]]:
    """Have a child report: records of its log, the PipelineError that ends the block, and what it is called with."""

    def report(**fields: Any) -> None:
        send(channel, msgspec.json.encode(kind(**fields)))

    logging.getLogger().addHandler(_ParentHandler(report))
    logging.getLogger().setLevel(log_level)
    try:
        yield report
    except errors.PipelineError as error:
        report(error=(type(error).__name__, str(error)))


class _ParentHandler(logging.Handler):
    """Sends records to the parent, whose handlers know what to do with them."""

    def __init__(self, report: Callable[..., None]) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(log=(record.name, record.levelno, record.getMessage()))
