"""Relax modules in a TVM script: passes that fuse, order, describe and cut a module.

    prepare = tvm.transform.Sequential([FuseKernels(target), MemoryOrder(), ExtractOperatorGraph("net")])
    graph = operator_graph(prepare(mod))            # what a Profile and a Plan are of
    stages = PartitionPipeline(plan)(prepare(mod))  # a function for each stage, and a main that calls them
    tvm.compile(stages, target, relax_pipeline=cpu_pipeline(target), tir_pipeline=TIR_PIPELINE)

The last line takes `cpu_pipeline` and `TIR_PIPELINE` of `tvm_pipeline_kernels.relax`: our kernels, which also serve a
script that needs only the speed. TVM's default pipelines compile the stages as well, to slower code.

The docstring of each pass shows a module before and after it. This needs the extra `relax`, in an environment without
Relay; an import elsewhere says what to install. `examples/relax_passes.py` is a whole program, and `docs/relax.md` says
what is supported and what is not.
"""

from tvm_pipeline.tvm.relax.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline.tvm.relax.kernel_passes import FuseKernels
from tvm_pipeline.tvm.relax.memory_order import MemoryOrder, planned_bytes
from tvm_pipeline.tvm.relax.partition_pipeline import PartitionPipeline

__all__ = [
    "ExtractOperatorGraph",
    "FuseKernels",
    "MemoryOrder",
    "PartitionPipeline",
    "operator_graph",
    "planned_bytes",
]
