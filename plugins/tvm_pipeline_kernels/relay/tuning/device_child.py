"""Tuning for a GPU in a process of its own: a candidate may hang, lose the device or end its process.

The child says what it is about to run, and how long that may take. Where it dies or is silent for longer, the parent
notes that candidate as one that failed and starts another child, which goes on with what is recorded.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Sequence

import msgspec

from tvm_pipeline import Device, Model
from tvm_pipeline.backends.contract import TuningReport
from tvm_pipeline.errors import PlatformError, RunError
from tvm_pipeline_kernels.relay.schedules.device_choices import DEFAULT, DeviceChoice, DeviceWorkload
from tvm_pipeline_tvm.child_process import ChildReport, last_words, reporting, run_child

MOST_DEATHS = 5  # of children in one search

Tried = tuple[tuple[DeviceWorkload, DeviceChoice], ...]
_log = logging.getLogger(__name__)


class SearchRequest(msgspec.Struct, frozen=True):
    """What a child is to tune.

    Attributes:
        host: the target of the code that launches kernels.
        only: the workloads to search; None for all.
        known_as: what the device is called; TVM may number devices of several OpenCL drivers otherwise in the child.
        failed: candidates that ended the children before this one.
        begun: how many records there were before the first child; -1 for that one.
    """

    model: Model
    device: Device
    host: str
    seconds: float
    known_as: str
    log_level: int
    only: tuple[DeviceWorkload, ...] | None = None
    failed: Tried = ()
    begun: int = -1


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


def tune_in_child(
    model: Model,
    device: Device,
    host: str,
    seconds: float,
    known_as: str,
    only: tuple[DeviceWorkload, ...] | None = None,
) -> TuningReport:
    """Tune a model on a GPU, whatever its candidates do; see `device_tuner.tune_device`.

    Raises:
        ModelError: TVM cannot import or compile the model.
        PlatformError: TVM cannot use the device.
        RunError: the device fails without any candidate, or too many candidates end their process.
    """
    deadline = time.monotonic() + seconds
    failed: Tried = ()
    begun = -1
    for _ in range(MOST_DEATHS):
        level = logging.getLogger().getEffectiveLevel()
        left = max(1e-3, deadline - time.monotonic()) if failed else seconds
        order = SearchRequest(model, device, host, left, known_as, level, only, failed, begun)
        ended = _run(order)
        if isinstance(ended, TuningReport):
            return ended
        tried, begun, how = ended
        failed = tuple(one for one in tried if one[1] != DEFAULT)
        if not failed:
            raise RunError(
                f"tuning {model.name} on {device.label} ended its process: {how}; what was measured is kept. See "
                "whether the model runs there without tuning"
            )
        _log.warning("a candidate for %s on %s failed: %s", failed[0][0][:100], device.label, how)
    raise RunError(
        f"tuning {model.name} on {device.label} ended its process {MOST_DEATHS} times; what was measured is kept. "
        "Restart the machine if the device does not answer, then repeat the command"
    )


def _run(order: SearchRequest) -> TuningReport | tuple[Tried, int, str]:
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
        child = run_child(f"{__name__}:serve", order, Report, heard)
        how = f"it {child.how()} ({last_words(child)})"
    except TimeoutError:
        how = f"it did not answer in {limit_s:g} s"
    if done is not None:
        return done
    return tried, begun, how


# --- The child ---


def serve(request: bytes, channel: socket.socket) -> None:
    """Do what an order says, and report."""
    order = msgspec.msgpack.decode(request, type=SearchRequest)
    if order.device.cores:  # before threads of a driver are made
        os.sched_setaffinity(0, order.device.cores)
    import tvm

    from tvm_pipeline_kernels.relay.tuning.device_candidates import DeviceLostError
    from tvm_pipeline_kernels.relay.tuning.device_records import DeviceRecord, append_device_record, read_device_records
    from tvm_pipeline_kernels.relay.tuning.device_tuner import tune_device
    from tvm_pipeline_tvm.devices.runtimes import ready_to_run
    from tvm_pipeline_tvm.devices.targets import index_of, kind_of

    target = order.device.target
    try:
        with reporting(channel, Report, order.log_level) as report:

            def trying(candidates: Sequence[tuple[DeviceWorkload, DeviceChoice]], limit_s: float | None) -> None:
                report(trying=tuple(candidates), limit_s=limit_s or 0.0)

            ready_to_run(kind_of(target))
            named = tvm.device(kind_of(target), index_of(target)).device_name
            if kind_of(target) == "opencl" and named != order.known_as:
                raise PlatformError(
                    f"device {order.device.name}: TVM has {named} as {target}, not {order.known_as}; set "
                    "OCL_ICD_VENDORS to the driver of the GPU that is meant"
                )
            begun = order.begun if order.begun >= 0 else len(read_device_records(target))
            report(begun=begun)
            for workload, choice in order.failed:
                append_device_record(target, DeviceRecord(workload, choice, float("inf")))
            done = tune_device(
                order.model,
                order.device,
                order.host,
                order.seconds,
                begun,
                trying,
                order.only,
            )
            report(done=done)
    except DeviceLostError as error:
        sys.stderr.write(f"the device is lost: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    # What the device holds is freed by the driver: a device that hangs would keep this process.
    os._exit(0)
