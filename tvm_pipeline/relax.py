"""Relax modules in a TVM script: our kernels for `tvm.compile`, and passes that cut and order a module.

Only the speed, with nothing else of tvm-pipeline, of a module that any frontend of TVM made:

    import onnx, tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx
    from tvm_pipeline.relax import TIR_PIPELINE, cpu_pipeline

    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})
    mod = from_onnx(onnx.load("net.onnx"))
    executable = tvm.compile(mod, target, relax_pipeline=cpu_pipeline(target), tir_pipeline=TIR_PIPELINE)
    vm = relax.VirtualMachine(executable, tvm.cpu())

The same in steps, between which other passes may stand:

    prepare = tvm.transform.Sequential([FuseKernels(target), MemoryOrder(), ExtractOperatorGraph("net")])
    graph = operator_graph(prepare(mod))            # what a Profile and a Plan are of
    stages = PartitionPipeline(plan)(prepare(mod))  # a function for each stage, and a main that calls them
    tvm.compile(stages, target, relax_pipeline=cpu_pipeline(target), tir_pipeline=TIR_PIPELINE)

The docstring of each pass shows a module before and after it. This needs the extra `relax`, in an environment without
Relay; an import elsewhere says what to install. `examples/relax_passes.py` is a whole program, and `docs/relax.md` says
what is supported and what is not.
"""

from tvm_pipeline.tvm.relax.cpu_pipeline import cpu_pipeline
from tvm_pipeline.tvm.relax.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline.tvm.relax.kernel_passes import FuseKernels
from tvm_pipeline.tvm.relax.memory_order import MemoryOrder, planned_bytes
from tvm_pipeline.tvm.relax.partition_pipeline import PartitionPipeline
from tvm_pipeline.tvm.relax.schedules.lowering import PIPELINE as TIR_PIPELINE

__all__ = [
    "TIR_PIPELINE",
    "ExtractOperatorGraph",
    "FuseKernels",
    "MemoryOrder",
    "PartitionPipeline",
    "cpu_pipeline",
    "operator_graph",
    "planned_bytes",
]
