"""What the child does that tunes for a GPU: AutoTVM's search. Its parent is in `tuning/device_child.py` of the package.

TVM is imported once the child is bound to its cores.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from tvm_pipeline.backends.contract import TuningReport
from tvm_pipeline_kernels.tuning.device_child import SearchRequest, serve_search


def serve(request: bytes, channel: socket.socket) -> None:
    """Do what an order says, and report."""
    serve_search(request, channel, _search)


def _search(order: SearchRequest, report: Callable[..., None]) -> TuningReport:
    import tvm

    from tvm_pipeline_kernels.relay.schedules.device_choices import DEFAULT, DeviceChoice, DeviceWorkload
    from tvm_pipeline_kernels.relay.tuning.device_records import DeviceRecord, append_device_record, read_device_records
    from tvm_pipeline_kernels.relay.tuning.device_tuner import tune_device
    from tvm_pipeline_tvm.devices.runtimes import ready_to_run
    from tvm_pipeline_tvm.devices.targets import index_of, kind_of

    def trying(candidates: Sequence[tuple[DeviceWorkload, DeviceChoice]], limit_s: float | None) -> None:
        report(trying=tuple(one for one in candidates if one[1] != DEFAULT), limit_s=limit_s or 0.0)

    target = order.device.target
    ready_to_run(kind_of(target))
    order.check_name(tvm.device(kind_of(target), index_of(target)).device_name)
    begun = order.begun if order.begun >= 0 else len(read_device_records(target))
    report(begun=begun)
    for workload, choice in order.failed:
        append_device_record(target, DeviceRecord(workload, choice, float("inf")))
    return tune_device(order.model, order.device, order.host, order.seconds, begun, trying, order.only)
