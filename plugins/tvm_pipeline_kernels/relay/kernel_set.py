"""What the engine is given for Relay: the schedules of this package, and what tuning chose of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tvm

from tvm_pipeline import Device, Model
from tvm_pipeline.backends.contract import Guide, TuningReport
from tvm_pipeline_kernels.relay.lowered_int8 import lowered_int8
from tvm_pipeline_kernels.relay.schedules import own_schedules
from tvm_pipeline_kernels.relay.schedules.choice_context import following
from tvm_pipeline_kernels.relay.schedules.lowering import elementary_functions, marked_loops
from tvm_pipeline_kernels.relay.tuning import device_records, tasks
from tvm_pipeline_kernels.relay.tuning.emitter import RelayEmitter
from tvm_pipeline_kernels.tuning import tuner, tuning_records
from tvm_pipeline_kernels.tuning.device_child import SearchRequest, tune_in_child
from tvm_pipeline_tvm.devices.targets import has_own_memory
from tvm_pipeline_tvm.kernel_sets import Choices, RelayKernels

SERVE = "tvm_pipeline_kernels.relay.tuning.device_child:serve"  # the child that tunes for a GPU


class OwnRelayKernels(RelayKernels):
    """Schedules of our own for x86; on GPUs TOPI's, with what tuning chose of them."""

    key = "7"

    @contextmanager
    def building(self, choices: Choices, tolerance: float = 0.0) -> Iterator[None]:
        with own_schedules(), following(choices, tolerance):
            yield

    def lowering_passes(self) -> Sequence[tuple[int, Any]]:
        return [(1, elementary_functions), (3, marked_loops)]

    def prepared(self, mod: tvm.IRModule, target: Any, params: Mapping[str, Any] | None) -> tvm.IRModule:
        return lowered_int8(mod, target, params)

    def workload_of(self, function: Any, target: tvm.target.Target) -> Any | None:
        if has_own_memory(target.kind.name):
            return tasks.device_workload_of(function, target)
        return tasks.workload_of(function)

    def recorded(self, target: str, *, tolerance: float = 0.0, measured_on: str = "") -> Choices:
        return device_records.recorded(target, winograd=tolerance > 0, measured_on=measured_on)

    def digest_of(self, choices: Choices) -> str:
        return tuning_records.digest_of(choices)

    def is_winograd(self, function: Any) -> bool:
        return tasks.is_winograd(function)

    def tune(self, model: Model, target: str, seconds: float, guide: Guide | None = None) -> TuningReport:
        return tuner.tune(RelayEmitter(model, target), seconds, guide)

    def tune_gpu(
        self,
        model: Model,
        device: Device,
        host: str,
        seconds: float,
        known_as: str,
        only: Collection[Any] | None = None,
    ) -> TuningReport:
        wanted = None if only is None else tuple(map(str, only))
        return tune_in_child(SERVE, SearchRequest(model, device, host, seconds, known_as, wanted))

    def tuning_records(self, target: str) -> list[bytes]:
        return tuning_records.lines_for(target)

    def take_tuning_records(self, target: str, measured_on: str, lines: Iterable[bytes]) -> int:
        return tuning_records.take_lines(target, measured_on, lines)


kernels = OwnRelayKernels()
