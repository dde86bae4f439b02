"""Relay modules in a TVM script: passes that describe and cut a module.

    pipe = tvm_pipeline.compile(mod, params)              # compiled, measured on each device, planned
    optimized, _ = relay.optimize(mod, target, params=params)
    fused = ExtractOperatorGraph(pipe.bundle.plan.graph)(optimized)  # operators as the planner names them
    stages = PartitionPipeline(pipe.bundle.plan)(fused)   # a function for each stage, and a main that calls them
    library = relay.build(stages, target)

The order matters: TVM's own optimisations come first, as in every compile of ours, so that the operators of the module
are those of the plan. `relay.optimize` needs `PassContext(opt_level=3)`.

The docstring of each pass shows a module before and after it. This needs the extra `relay`. Whole program:
`examples/relay_passes.py`.
"""

from tvm_pipeline_tvm.relay.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relay.fold import FoldConstantFast
from tvm_pipeline_tvm.relay.memory_order import MemoryOrder, planned_bytes
from tvm_pipeline_tvm.relay.partition_pipeline import PartitionPipeline

__all__ = [
    "ExtractOperatorGraph",
    "FoldConstantFast",
    "MemoryOrder",
    "PartitionPipeline",
    "operator_graph",
    "planned_bytes",
]
