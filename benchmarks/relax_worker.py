"""One network in one environment, with Relay or with Relax, as a process that relax.py starts and asks.

    python benchmarks/relax_worker.py ours|stock|xnnpack|compile NETWORK CORE

ours     the library that the host backend compiles, whole, on one core
stock    what `tvm.compile` makes of the network by itself (Relax alone)
xnnpack  TFLite's interpreter with its default engine
compile  answers how long the host backend takes to compile the network, in an empty cache

It answers on a line of stdout when it is ready. Each line of stdin then asks for a turn of so many seconds, and the
answer is the CPU seconds of a frame.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import frontends
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device


def main() -> None:
    kind, network, core = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    os.sched_setaffinity(0, [int(core)])
    model = frontends.load(network)
    if kind == "compile":
        print(json.dumps(seconds_to_compile(model)), file=answers, flush=True)
        return
    starts = {
        "ours": lambda: ours(model, int(core)),
        "stock": lambda: stock(network),
        "xnnpack": lambda: xnnpack(network),
    }
    run = starts[kind]()
    run()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(cpu_seconds(run, float(line))), file=answers, flush=True)


def cpu_seconds(run: Callable[[], object], seconds: float) -> float:
    """Return CPU seconds of a frame, over frames that take `seconds` together."""
    run()  # caches are another process's
    begin_s, count, took_s = time.process_time(), 0, 0.0
    while took_s < seconds:
        run()
        count += 1
        took_s = time.process_time() - begin_s
    return took_s / count


def one_core(core: int) -> Device:
    """Return a core of this machine as a device with the target of its kind."""
    found = find_backend("host").detect()[0]
    return Device("core", "host", (core,), found.target)


def ours(model: Model, core: int) -> Callable[[], object]:
    backend, device = find_backend("host"), one_core(core)
    compiled = backend.compile(model, [device])
    stage = compiled.stage(compiled.graph.operator_names, device)
    inputs, outputs = [noise(port) for port in stage.inputs], [port.buffer() for port in stage.outputs]
    stage.bind()
    return lambda: stage.run(inputs, outputs)


def stock(network: str) -> Callable[[], object]:
    """Return what TVM's own pipeline for CPUs makes of a network, in its virtual machine."""
    import onnx
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    target = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
    mod = from_onnx(onnx.load(network))
    with target:
        mod = tvm.transform.Sequential(
            [relax.transform.DecomposeOpsForInference(), relax.transform.CanonicalizeBindings()]
        )(mod)
    machine = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())
    (parameter,) = mod["main"].params
    shape = tuple(int(extent) for extent in parameter.ty.shape)
    frame = tvm.runtime.tensor(noise(Port("frame", shape, "float32")))
    return lambda: machine["main"](frame)


def xnnpack(network: str) -> Callable[[], object]:
    """Return what runs a .tflite file by XNNPACK, on one thread."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(network, num_threads=1)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        shape, dtype = tuple(map(int, detail["shape"])), np.dtype(detail["dtype"]).name
        interpreter.set_tensor(detail["index"], noise(Port(detail["name"], shape, dtype)))
    return interpreter.invoke


def seconds_to_compile(model: Model) -> dict[str, float]:
    """Return wall and CPU seconds, the linker's included, after a first small compile in the same process."""
    backend = find_backend("host")
    device = backend.detect()[0]
    with tempfile.TemporaryDirectory() as folder:
        small = frontends.load(write_picture_net(Path(folder) / "small.onnx", seed=1))
        os.environ["TVM_PIPELINE_CACHE"] = folder
        backend.compile(small, [device])
        begin_s, begin_cpu_s = time.perf_counter(), sum(os.times()[:4])
        backend.compile(model, [device])
        return {"wall_s": time.perf_counter() - begin_s, "cpu_s": float(np.subtract(sum(os.times()[:4]), begin_cpu_s))}


if __name__ == "__main__":
    main()
