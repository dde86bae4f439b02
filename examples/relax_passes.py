"""A Relax module: compiled by our kernels; measured, planned, cut by a pass; and run as a pipeline.

It needs tvm-pipeline with the extra `tvm`, in an environment without Relay.

python examples/relax_passes.py
"""

import os
import time

os.environ.setdefault("TVM_NUM_THREADS", "1")  # one core each, so that seconds of one thread can be compared

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import tvm_pipeline as tp
from tvm_pipeline_kernels.relax import TIR_PIPELINE, cpu_pipeline
from tvm_pipeline_tvm.relax_passes import ExtractOperatorGraph, FuseKernels, MemoryOrder, PartitionPipeline, tvm_target


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
        self.blocks = nn.ModuleList([Block(64) for _ in range(2)])
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = nn.op.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(nn.op.sum(x, [2, 3]))


# TVM's frontends for programs give weights as parameters; bound as constants they can be laid out for vectors.
draw = np.random.default_rng(0)
mod, parameters = Network().export_tvm(spec={"forward": {"x": nn.spec.Tensor((1, 3, 40, 40), "float32")}})
weights = {name: draw.standard_normal([int(n) for n in weight.shape]) / 20 for name, weight in parameters}
weights = {name: tvm.runtime.tensor(weight.astype("float32")) for name, weight in weights.items()}
mod = relax.transform.BindParams("forward", weights)(mod)
mod = tvm.IRModule({"main": mod["forward"].with_attr("global_symbol", "main")})

# Only the speed: the module goes to tvm.compile as it is.
target = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
frames = [draw.standard_normal((1, 3, 40, 40)).astype("float32") for _ in range(8)]
frame = tvm.runtime.tensor(frames[0])


def machine(module, target, ours=True):
    options = {"relax_pipeline": cpu_pipeline(target), "tir_pipeline": TIR_PIPELINE} if ours else {}
    return relax.VirtualMachine(tvm.compile(module, target, **options), tvm.cpu())


def seconds(vm):
    start = time.thread_time()
    vm["main"](frame)
    return time.thread_time() - start


stock, fast = machine(mod, target, ours=False), machine(mod, target)
difference = np.abs(stock["main"](frame).numpy() - fast["main"](frame).numpy()).max()
in_turns = [(seconds(stock), seconds(fast)) for _ in range(5)]
slow_s, fast_s = map(min, zip(*in_turns, strict=True))
print(f"TVM's default pipeline takes {slow_s / fast_s:.1f} times as long; values differ by {difference:.1e} at most")

# Compiled for each device, measured, planned: two stages here, any number without `stages`.
pipe = tp.compile(mod, stages=2, verify_s=0.5)
print(pipe)
plan, target = pipe.bundle.plan, tvm_target(pipe.bundle.platform.devices[0].target)

# These passes in this order give the operators of the plan.
prepare = tvm.transform.Sequential([FuseKernels(target), MemoryOrder(), ExtractOperatorGraph(plan.graph)])
partitioned = PartitionPipeline(plan)(prepare(mod))
for symbol in ("stage_0", "stage_1"):
    attributes = partitioned[symbol].attrs
    print(symbol, "on", attributes["device"], "gives", ", ".join(attributes["outputs"]))


def outputs(module):
    """The outputs of all frames by plain tvm.compile, one stage after the other on one core."""
    vm = machine(module, target)
    return [vm["main"](tvm.runtime.tensor(frame)).numpy() for frame in frames]


whole, stages, pipelined = outputs(mod), outputs(partitioned), list(pipe.map(frames))
print("stages equal bit for bit:", all(map(np.array_equal, whole, stages)))
print("pipeline equal bit for bit:", all(map(np.array_equal, whole, pipelined)))
