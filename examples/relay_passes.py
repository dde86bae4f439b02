"""The passes in a TVM script: extract the operator graph, cut it in two, build it with plain relay.build.

python examples/relay_passes.py
"""

import numpy as np
import tvm
from tvm import relay
from tvm.contrib import graph_executor
from tvm.relay import testing

from tvm_pipeline import Plan, Prediction, Stage
from tvm_pipeline.tvm.relay.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline.tvm.relay.fold import FoldConstantFast
from tvm_pipeline.tvm.relay.partition_pipeline import PartitionPipeline

mod, params = testing.resnet.get_workload(num_layers=8, image_shape=(3, 28, 28))
mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
prepare = tvm.transform.Sequential(
    [
        relay.transform.SimplifyInference(),
        FoldConstantFast(),
        relay.transform.FuseOps(2),
        relay.transform.InferType(),
        ExtractOperatorGraph("resnet8"),
    ]
)
with tvm.transform.PassContext(opt_level=3):
    fused = prepare(mod)
graph = operator_graph(fused)
print(f"{len(graph)} operators, {sum(operator.macs for operator in graph.operators) / 1e6:.0f} million MACs")

# Half of the work on each side. A planner would measure first: see ten_lines.py.
done = np.cumsum([operator.macs for operator in graph.operators])
cut = int(np.searchsorted(done, done[-1] / 2)) + 1
names = tuple(operator.name for operator in graph.operators)
plan = Plan(
    graph="resnet8",
    scheduler="by-hand",
    objective="throughput",
    stages=(Stage(("cpu0",), names[:cut]), Stage(("cpu1",), names[cut:])),
    predicted=Prediction(throughput_fps=0.0, latency_s=0.0),
)
partitioned = PartitionPipeline(plan)(fused)
for symbol in partitioned.get_global_vars():
    attributes = partitioned[symbol].attrs
    print(symbol.name_hint, "on", attributes["device"] if attributes and "device" in attributes else "-")

frame = np.random.default_rng(0).standard_normal((1, 3, 28, 28)).astype("float32")
outputs = []
for module in (fused, partitioned):
    with tvm.transform.PassContext(opt_level=3):
        library = relay.build(module, "llvm")
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    executor.set_input("data", frame)
    executor.run()
    outputs.append(executor.get_output(0).numpy())
print("equal bit for bit:", bool((outputs[0] == outputs[1]).all()))
