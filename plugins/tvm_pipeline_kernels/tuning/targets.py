"""A target of CPU cores in the TVM that is installed: its cores, and how records name it."""

from __future__ import annotations

from tvm_pipeline_kernels.tiles import Cores
from tvm_pipeline_tvm.installed_ir import installed_ir
from tvm_pipeline_tvm.target_text import tvm_target


def cores_of(target: str) -> Cores:
    """Return the vectors of a target's cores, as the schedules of the installed IR know them."""
    if installed_ir() == "relax":
        from tvm_pipeline_kernels.relax.schedules import cores

        return cores.cores_of(tvm_target(target))
    from tvm_pipeline_kernels.relay.schedules.choice_context import current_cores

    with tvm_target(target):
        return current_cores()


def written(target: str) -> str:
    """Return the target as TVM writes it."""
    return str(tvm_target(target))
