"""What the engine is given for Relax: layouts, legalizations and schedules of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.target import Target

from tvm_pipeline_kernels.relax.blocked import BlockedLayout
from tvm_pipeline_kernels.relax.gpu_rules import by_convolution, by_window
from tvm_pipeline_kernels.relax.legalizations import legalizations
from tvm_pipeline_kernels.relax.schedules import conv2d_winograd, scheduled
from tvm_pipeline_kernels.relax.schedules.cores import cores_of
from tvm_pipeline_kernels.relax.schedules.lowering import PIPELINE
from tvm_pipeline_tvm.kernel_sets import GpuRule, Legalization, RelaxKernels


class OwnRelaxKernels(RelaxKernels):
    """Schedules of our own for CPU cores, and for convolutions and pools on GPUs."""

    key = "2"
    tir_pipeline = PIPELINE

    def layouts(self, target: Target, tolerance: float = 0.0) -> Sequence[Any]:
        return [BlockedLayout(cores_of(target), tolerance)]

    def legalizations(self, target: Target) -> Mapping[str, Legalization]:
        return legalizations(cores_of(target))

    def scheduled(self, function: tirx.PrimFunc, target: Target) -> tuple[tirx.PrimFunc, str]:
        return scheduled(function, cores_of(target))

    def is_winograd(self, rule: str) -> bool:
        return rule == conv2d_winograd.NAME

    def gpu_rules(self) -> Sequence[GpuRule]:
        return by_convolution, by_window


kernels = OwnRelaxKernels()
