"""The passes in a script for today's TVM: the same network by TVM's own pipeline and by ours, then cut in two.

It needs tvm-pipeline with the extra `relax`, in an environment without Relay.

python examples/relax_passes.py
"""

import os
import time

os.environ.setdefault("TVM_NUM_THREADS", "1")  # one core each, so that seconds of one thread can be compared

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from tvm_pipeline import Plan, Prediction, Stage
from tvm_pipeline.relax import (
    ExtractOperatorGraph,
    FuseKernels,
    MemoryOrder,
    PartitionPipeline,
    operator_graph,
)
from tvm_pipeline_kernels.relax import TIR_PIPELINE, cpu_pipeline


class Block(nn.Module):
    """Two convolutions, and what they are given added to what they make."""

    def __init__(self, channels):
        self.first = nn.Conv2D(channels, channels, 3, padding=1)
        self.second = nn.Conv2D(channels, channels, 3, padding=1)

    def forward(self, x):
        return nn.op.relu(nn.op.add(x, self.second(nn.op.relu(self.first(x)))))


class Network(nn.Module):
    def __init__(self):
        self.stem = nn.Conv2D(3, 64, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([Block(64) for _ in range(3)])
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = nn.op.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(nn.op.sum(x, [2, 3]))


# TVM's frontends for programs give weights as parameters; bound as constants they can be laid out for vectors.
draw = np.random.default_rng(0)
mod, parameters = Network().export_tvm(spec={"forward": {"x": nn.spec.Tensor((1, 3, 56, 56), "float32")}})
weights = {name: draw.standard_normal([int(n) for n in weight.shape]) / 20 for name, weight in parameters}
weights = {name: tvm.runtime.tensor(weight.astype("float32")) for name, weight in weights.items()}
mod = relax.transform.BindParams("forward", weights)(mod)
mod = tvm.IRModule({"main": mod["forward"].with_attr("global_symbol", "main")})

target = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
ours = {"relax_pipeline": cpu_pipeline(target), "tir_pipeline": TIR_PIPELINE}
frame = tvm.runtime.tensor(draw.standard_normal((1, 3, 56, 56)).astype("float32"))


def machine(module, **options):
    return relax.VirtualMachine(tvm.compile(module, target, **options), tvm.cpu())


def seconds(vm):
    start = time.thread_time()
    vm["main"](frame)
    return time.thread_time() - start


# Only the speed: the module goes to tvm.compile as it is.
stock, fast = machine(mod), machine(mod, **ours)
difference = np.abs(stock["main"](frame).numpy() - fast["main"](frame).numpy()).max()
in_turns = [(seconds(stock), seconds(fast)) for _ in range(5)]
slow_s, fast_s = map(min, zip(*in_turns, strict=True))
print(f"TVM's default pipeline takes {slow_s / fast_s:.1f} times as long; values differ by {difference:.1e} at most")

# The operators, and half of their work in each stage. A planner would measure first: see ten_lines.py.
prepare = tvm.transform.Sequential([FuseKernels(target), MemoryOrder(), ExtractOperatorGraph("blocks")])
fused = prepare(mod)
graph = operator_graph(fused)
print(f"{len(graph)} operators, {sum(operator.macs for operator in graph.operators) / 1e6:.0f} million MACs")
done = np.cumsum([operator.macs for operator in graph.operators])
cut = int(np.searchsorted(done, done[-1] / 2)) + 1
names = tuple(operator.name for operator in graph.operators)
plan = Plan(
    graph="blocks",
    scheduler="by-hand",
    objective="throughput",
    stages=(Stage(("cpu0",), names[:cut]), Stage(("cpu1",), names[cut:])),
    predicted=Prediction(throughput_fps=0.0, latency_s=0.0),
)
partitioned = PartitionPipeline(plan)(fused)
for symbol in ("stage_0", "stage_1"):
    attributes = partitioned[symbol].attrs
    print(symbol, "on", attributes["device"], "gives", ", ".join(attributes["outputs"]))

# A stage is a function of the compiled module: it takes the tensors of its attribute `inputs`.
vm = machine(partitioned, **ours)
tensors = {graph.inputs[0].name: frame}
for symbol in ("stage_0", "stage_1"):
    attributes = partitioned[symbol].attrs
    made = vm[symbol](*(tensors[name] for name in attributes["inputs"]))
    made = [made] if isinstance(made, tvm.runtime.Tensor) else made
    tensors.update(zip(attributes["outputs"], made, strict=True))
whole = machine(fused, **ours)["main"](frame).numpy()
print("equal bit for bit:", bool((tensors[graph.outputs[0]].numpy() == whole).all()))
