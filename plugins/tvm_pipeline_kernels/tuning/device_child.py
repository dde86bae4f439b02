"""Tuning for a GPU in a separate process: a candidate may hang, lose the device or end its process.

The child says what it is about to run, and how long that may take. Where it dies or is silent for longer, the parent
tells the next child which candidate failed, and that child goes on with what is recorded. What a child does is in the
`device_child.py` of each IR.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from tvm_pipeline import Device, Model
from tvm_pipeline.backends.contract import TuningReport
from tvm_pipeline.errors import PlatformError, RunError
from tvm_pipeline_tvm.child_process import ChildReport, last_words, reporting, run_child

MOST_DEATHS = 5  # of children in one search
CANDIDATE_S, PASS_S = 30.0, 300.0  # that a candidate and a pass may take

Tried = tuple[tuple[str, str], ...]  # workloads and choices, as text of the IR
_log = logging.getLogger(__name__)


class SearchRequest(msgspec.Struct, frozen=True):
    """What a child is to tune.

    Attributes:
        host: the target of the code that launches kernels.
        known_as: what the device is called; devices of several OpenCL drivers may be numbered otherwise in the child.
        only: the workloads to search, as text; None for all.
        failed: candidates that ended the child before this one.
        begun: how many records there were before the first child; -1 for that one.
    """

    model: Model
    device: Device
    host: str
    seconds: float
    known_as: str
    only: tuple[str, ...] | None = None
    failed: Tried = ()
    begun: int = -1
    log_level: int = logging.WARNING

    def check_name(self, found: str) -> None:
        """Raise PlatformError where the child has another device under the target."""
        target = self.device.target
        if target.startswith("opencl") and found != self.known_as:
            raise PlatformError(
                f"device {self.device.name}: TVM has {found} as {target}, not {self.known_as}; set OCL_ICD_VENDORS to "
                "the driver of the GPU that is meant"
            )


class Report(ChildReport, frozen=True, omit_defaults=True):
    """What a child tells.

    Attributes:
        trying: candidates that are about to run.
        limit_s: the next report comes within so many seconds; 0 for any time.
        begun: how many records there were before the first child.
    """

    trying: Tried | None = None
    limit_s: float = 0.0
    begun: int = -1
    done: TuningReport | None = None


class DeviceLostError(Exception):
    """The device does no more work for this process."""


def tune_in_child(serve: str, order: SearchRequest) -> TuningReport:
    """Tune a model on a GPU, whatever its candidates do.

    Args:
        serve: the function of the child, as `Child` names it; it calls `serve_search`.

    Raises:
        ModelError: TVM cannot import or compile the model.
        PlatformError: TVM cannot use the device.
        RunError: the device fails without any candidate, or too many candidates end their process.
    """
    deadline = time.monotonic() + order.seconds
    order = msgspec.structs.replace(order, log_level=logging.getLogger().getEffectiveLevel())
    what = f"tuning {order.model.name} on {order.device.label} ended its process"
    for _ in range(MOST_DEATHS):
        ended = _run(serve, order)
        if isinstance(ended, TuningReport):
            return ended
        failed, begun, how = ended
        if not failed:
            raise RunError(f"{what}: {how}; what was measured is kept. See whether the model runs there without tuning")
        _log.warning("a candidate for %s on %s failed: %s", failed[0][0][:100], order.device.label, how)
        left = max(1e-3, deadline - time.monotonic())
        order = msgspec.structs.replace(order, seconds=left, failed=failed, begun=begun)
    raise RunError(
        f"{what} {MOST_DEATHS} times; what was measured is kept. Restart the machine if the device does not answer, "
        "then repeat the command"
    )


def _run(serve: str, order: SearchRequest) -> TuningReport | tuple[Tried, int, str]:
    """Run a child; return its report, or what it tried last, `begun` and how it ended; raise what it raised."""
    tried: Tried = ()
    begun = order.begun
    limit_s = 0.0
    done: TuningReport | None = None

    def heard(report: Report) -> float | None:
        nonlocal tried, limit_s, begun, done
        if report.trying is not None:
            tried, limit_s = report.trying, report.limit_s
        begun, done = max(begun, report.begun), report.done
        return limit_s or None

    try:
        child = run_child(serve, order, Report, heard)
        how = f"it {child.how()} ({last_words(child)})"
    except TimeoutError:
        how = f"it did not answer in {limit_s:g} s"
    if done is not None:
        return done
    return tried, begun, how


def serve_search(
    request: bytes, channel: socket.socket, search: Callable[[SearchRequest, Callable[..., None]], TuningReport]
) -> NoReturn:
    """Do, as the child, what an order says, and report.

    Args:
        search: takes the order, and what reports the fields of a `Report`.
    """
    order = msgspec.msgpack.decode(request, type=SearchRequest)
    if order.device.cores:  # before threads of a driver are made
        os.sched_setaffinity(0, order.device.cores)
    try:
        with reporting(channel, Report, order.log_level) as report:
            report(done=search(order, report))
    except DeviceLostError as error:
        sys.stderr.write(f"the device is lost: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    # What the device holds is freed by the driver: a device that hangs would keep this process.
    os._exit(0)
