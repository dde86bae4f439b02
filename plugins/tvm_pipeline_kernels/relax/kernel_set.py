"""What the engine is given for Relax: layouts, legalizations and schedules of this package, and tuning of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.target import Target

from tvm_pipeline import Device, Model
from tvm_pipeline.backends.contract import Guide, TuningReport
from tvm_pipeline_kernels.relax import gpu_rules
from tvm_pipeline_kernels.relax.blocked import BlockedLayout
from tvm_pipeline_kernels.relax.legalizations import legalizations
from tvm_pipeline_kernels.relax.schedules import conv2d_winograd, scheduled, workload_of
from tvm_pipeline_kernels.relax.schedules.cores import converts_float16, cores_of
from tvm_pipeline_kernels.relax.schedules.lowering import PIPELINE
from tvm_pipeline_kernels.tuning import tuner, tuning_records
from tvm_pipeline_kernels.tuning.device_child import SearchRequest, tune_in_child
from tvm_pipeline_tvm.devices.targets import has_own_memory
from tvm_pipeline_tvm.kernel_sets import Choices, GpuRule, Legalization, RelaxKernels
from tvm_pipeline_tvm.target_text import tvm_target

SERVE = "tvm_pipeline_kernels.relax.device_child:serve"  # the child that tunes for a GPU


class OwnRelaxKernels(RelaxKernels):
    """Schedules of our own for CPU cores, and for convolutions and pools on GPUs."""

    key = "8"
    tir_pipeline = PIPELINE

    def recorded(self, target: str, *, tolerance: float = 0.0, measured_on: str = "") -> Choices:
        if has_own_memory(target):  # no GPU has Winograd's algorithm
            return tuning_records.recorded_choices(target)
        return tuning_records.recorded_choices(target, winograd=tolerance > 0, measured_on=measured_on)

    def digest_of(self, choices: Choices) -> str:
        return tuning_records.digest_of(choices)

    def tune(self, model: Model, target: str, seconds: float, guide: Guide | None = None) -> TuningReport:
        from tvm_pipeline_kernels.relax.emitter import RelaxEmitter  # it compiles by the kernels that are made here

        return tuner.tune(RelaxEmitter(model, target), seconds, guide)

    def tune_gpu(
        self,
        model: Model,
        device: Device,
        host: str,
        seconds: float,
        known_as: str,
        only: Collection[Any] | None = None,
    ) -> TuningReport:
        wanted = None if only is None else tuple(map(json.dumps, only))
        return tune_in_child(SERVE, SearchRequest(model, device, host, seconds, known_as, wanted))

    def tuning_records(self, target: str) -> list[bytes]:
        return tuning_records.lines_for(target)

    def take_tuning_records(self, target: str, measured_on: str, lines: Iterable[bytes]) -> int:
        return tuning_records.take_lines(target, measured_on, lines)

    def computes_integers(self, target: Target) -> bool:
        return True

    def refuses_weights(self, storage: str, target: str) -> str:
        if storage != "float16" or converts_float16(tvm_target(target)):
            return ""
        return "such cores have no instructions that convert float16; store them in bfloat16, which needs none"

    def layouts(self, target: Target, tolerance: float, choices: Choices, storage: str = "float32") -> Sequence[Any]:
        return [BlockedLayout(cores_of(target), tolerance, choices, storage)]

    def workload_of(self, function: tirx.PrimFunc) -> Any | None:
        return gpu_rules.workload_of(function) or workload_of(function)

    def legalizations(self, target: Target, storage: str = "float32") -> Mapping[str, Legalization]:
        return legalizations(cores_of(target), storage)

    def scheduled(self, function: tirx.PrimFunc, target: Target) -> tuple[tirx.PrimFunc, str]:
        return scheduled(function, cores_of(target))

    def is_winograd(self, rule: str) -> bool:
        return rule == conv2d_winograd.NAME

    def gpu_rules(self, choices: Choices) -> Sequence[GpuRule]:
        return partial(gpu_rules.by_convolution, choices=choices), gpu_rules.by_window


kernels = OwnRelaxKernels()
