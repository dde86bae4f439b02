"""What the child does that tunes for a GPU; its parent is in `tuning/device_child.py` of the package.

A convolution of which a candidate has ended the child before keeps the tile of the static rule, in this search and in
later ones: a record says so.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace

from tvm_pipeline.backends.contract import TuningReport
from tvm_pipeline_kernels.choices import static_choice
from tvm_pipeline_kernels.tuning.device_child import SearchRequest, Tried, serve_search

FAILED_S = 1e10  # of a call, in a record of what failed


def serve(request: bytes, channel: socket.socket) -> None:
    """Do what an order says, and report."""
    serve_search(request, channel, _search)


def _search(order: SearchRequest, report: Callable[..., None]) -> TuningReport:
    from tvm_pipeline_kernels.relax.device_emitter import DeviceEmitter  # TVM, once the child is bound to its cores
    from tvm_pipeline_kernels.tuning import tuner
    from tvm_pipeline_kernels.tuning.tuning_records import Record, append_record, read_records
    from tvm_pipeline_tvm.kernel_sets import hashable
    from tvm_pipeline_tvm.relax.device_bench import device_name

    def trying(tried: Tried, limit_s: float) -> None:
        report(trying=tried, limit_s=limit_s)

    order.check_name(device_name(order.device.target))
    emitter = DeviceEmitter(order.model, order.device, order.host, trying)
    begun = order.begun if order.begun >= 0 else len(read_records(emitter.target))
    report(begun=begun)
    for workload in {hashable(json.loads(text)) for text, _ in order.failed}:
        rule = static_choice(workload, emitter.cores, winograd=False)
        append_record(emitter.target, Record(workload, rule, FAILED_S, proven=True))
    only = None if order.only is None else tuner.once({hashable(json.loads(text)) for text in order.only})
    done = tuner.tune(emitter, order.seconds, only)
    searched = {record.workload for record in read_records(emitter.target)[begun:] if not record.proven}
    return replace(done, measured=len(searched))  # by all children
