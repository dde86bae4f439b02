"""Relax modules in a TVM script: passes that fuse, order, describe and cut a module.

    plan = tvm_pipeline.compile(mod).bundle.plan    # compiled, measured on each device, planned
    prepare = tvm.transform.Sequential([FuseKernels(target), MemoryOrder(), ExtractOperatorGraph(plan.graph)])
    stages = PartitionPipeline(plan)(prepare(mod))  # a function for each stage, and a main that calls them
    tvm.compile(stages, target, relax_pipeline=cpu_pipeline(target), tir_pipeline=TIR_PIPELINE)

These passes in this order give the operators of the plan: they are those of every compile of ours. `tvm_target` makes a
target of a device's text.

The last line takes `cpu_pipeline` and `TIR_PIPELINE` of `tvm_pipeline_kernels.relax`: our kernels, which also serve a
script that needs only the speed. TVM's default pipelines compile the stages as well, to slower code.

The docstring of each pass shows a module before and after it. This needs the extra `tvm`, in an environment without
Relay; an import elsewhere says what to install. `examples/relax_passes.py` is a whole program, and `docs/relax.md` says
what is supported and what is not.
"""

from tvm_pipeline_tvm.relax.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relax.kernel_passes import FuseKernels
from tvm_pipeline_tvm.relax.memory_order import MemoryOrder, planned_bytes
from tvm_pipeline_tvm.relax.partition_pipeline import PartitionPipeline
from tvm_pipeline_tvm.target_text import tvm_target

__all__ = [
    "ExtractOperatorGraph",
    "FuseKernels",
    "MemoryOrder",
    "PartitionPipeline",
    "operator_graph",
    "planned_bytes",
    "tvm_target",
]
