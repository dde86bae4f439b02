"""A Relay module: measured, planned, cut by a pass, built by plain relay.build; and run as a pipeline.

python examples/relay_passes.py
"""

import numpy as np
import tvm
from tvm import relay
from tvm.contrib import graph_executor
from tvm.relay import testing

import tvm_pipeline as tp
from tvm_pipeline_tvm.relay_passes import ExtractOperatorGraph, PartitionPipeline

mod, params = testing.mlp.get_workload(1)  # takes a picture of 28 x 28 and gives ten probabilities
frames = [np.random.default_rng(seed).standard_normal((1, 1, 28, 28)).astype("float32") for seed in range(8)]

# Compiled for each device, measured, planned: two stages here, any number without `stages`.
pipe = tp.compile(mod, params, stages=2, verify_s=0.2)
print(pipe)
plan, target = pipe.bundle.plan, pipe.bundle.platform.devices[0].target

# TVM's optimisations first: then the module's operators are those of the plan.
with tvm.transform.PassContext(opt_level=3):
    optimized, _ = relay.optimize(mod, target, params=params)
partitioned = PartitionPipeline(plan)(ExtractOperatorGraph(plan.graph)(optimized))
for symbol in partitioned.get_global_vars():
    attributes = partitioned[symbol].attrs
    print(symbol.name_hint, "on", attributes["device"] if attributes and "device" in attributes else "-")


def outputs(module, **options):
    """The outputs of all frames by plain relay.build, one stage after the other on one core."""
    with tvm.transform.PassContext(opt_level=3):
        library = relay.build(module, target, **options)
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    made = []
    for frame in frames:
        executor.run(data=frame)
        made.append(executor.get_output(0).numpy())
    return made


whole, stages, pipelined = outputs(mod, params=params), outputs(partitioned), list(pipe.map(frames))
print("stages equal bit for bit:", all(map(np.array_equal, whole, stages)))
# The pipeline has kernels of tvm-pipeline, and so has the module in one stage. Their softmax is rounded otherwise.
unsplit = list(tp.compile(mod, params, stages=1, verify_s=0).map(frames))
print("pipeline equal bit for bit:", all(map(np.array_equal, unsplit, pipelined)))
print("pipeline close to plain TVM:", all(map(np.allclose, whole, pipelined)))
