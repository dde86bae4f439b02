"""A target in the TVM that is installed: its cores, or its GPU, and how records name it and what measures for it."""

from __future__ import annotations

from tvm_pipeline.backends.cores import processor
from tvm_pipeline_kernels.gpu_tiles import Gpu
from tvm_pipeline_kernels.tiles import Cores
from tvm_pipeline_tvm.devices.targets import compiler_target, has_own_memory
from tvm_pipeline_tvm.installed_ir import installed_ir
from tvm_pipeline_tvm.target_text import tvm_target


def cores_of(target: str) -> Cores | Gpu:
    """Return the vectors of a target's cores, or its GPU, as the schedules of the installed IR know them."""
    if has_own_memory(target):
        from tvm_pipeline_kernels.relax import gpu_rules  # Relay keeps other records for GPUs

        return gpu_rules.gpu_of_target(tvm_target(compiler_target(target)))
    if installed_ir() == "relax":
        from tvm_pipeline_kernels.relax.schedules import cores

        return cores.cores_of(tvm_target(target))
    from tvm_pipeline_kernels.relay.schedules.choice_context import current_cores

    with tvm_target(target):
        return current_cores()


def written(target: str) -> str:
    """Return the target as TVM writes it, without the index of a device."""
    return str(tvm_target(compiler_target(target)))


def measures_here(target: str) -> str:
    """Return the name of what measures for a target on this machine: the processor, or the device of the target.

    Raises:
        PlatformError: the device cannot be used here.
    """
    if not has_own_memory(target):
        return processor()
    from tvm_pipeline_tvm.relax.device_bench import device_name

    return device_name(target)
