"""The engines that peers.py compares with this project, each in a process of its own.

`serve` is what such a process runs. It opens the network, writes its outputs, and answers on a line of stdout. Then it
takes a turn for each line of stdin, which holds its seconds, and answers with a Turn as JSON. This file imports nothing
of this project, since the libraries of the engines and TVM's are better kept apart. All engines compute in float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

ALONE_FRAMES = 3  # at least, in each turn, for the latency
ALONE_SHARE = 0.2  # of the seconds of a turn

# The settings of each engine, beside one thread: what its makers advise for latency and for throughput.
SETTINGS = {
    "OpenVINO": ("latency", "throughput"),
    "onnxruntime": ("all cores", "replicas"),
    "TFLite": ("all cores", "replicas"),
    "MNN": ("all cores", "replicas"),
    "IREE": ("all cores", "replicas"),
    "ExecuTorch": ("all cores",),  # the threads of its wheel are one pool, which only all cores can have
}


@dataclass(frozen=True)
class Turn:
    """What an engine did in its turn.

    Attributes:
        fps: frames a second while it was kept full.
        cpu_s: of all threads of its process, for each of these frames.
        latency_s: the median of frames that were alone.
    """

    fps: float
    cpu_s: float
    latency_s: float


class Engine(Protocol):
    """A network that is ready to run on inputs that it holds."""

    def alone(self) -> None:
        """Run one frame and wait for its result."""

    def full(self, seconds: float) -> int:
        """Keep the engine full for so many seconds; return how many frames came out, all that went in."""


def take_turn(engine: Engine, seconds: float) -> Turn:
    """Run frames alone, then as many as go through in `seconds`."""
    engine.alone()  # caches are another engine's
    alone: list[float] = []
    while len(alone) < ALONE_FRAMES or sum(alone) < ALONE_SHARE * seconds:
        begin_s = time.perf_counter()
        engine.alone()
        alone.append(time.perf_counter() - begin_s)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    frames = engine.full(seconds)
    took_s, took_cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    return Turn(frames / took_s, took_cpu_s / frames, median(alone))


def apart(found: list[Any], expected: list[Any]) -> float:
    """Return the largest difference over the largest value, of the worst output."""
    pairs = [(one.astype("float64"), other.astype("float64")) for one, other in zip(found, expected, strict=True)]
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)


def repeated(run: Any, seconds: float) -> int:
    """Call `run` for so many seconds, at least once; return how often."""
    end_s, count = time.perf_counter() + seconds, 0
    while not count or time.perf_counter() < end_s:
        run()
        count += 1
    return count


class OpenVino:
    """OpenVINO by its hint for latency or throughput; it chooses streams and requests itself."""

    def __init__(self, setting: str, threads: int, network: str, inputs: list[Any]) -> None:
        import openvino as ov

        options = {
            "PERFORMANCE_HINT": setting.upper(),
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",  # else bfloat16 where the processor has it
        }
        core = ov.Core()
        model = core.compile_model(core.read_model(network), "CPU", options)
        requests = model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        self._queue = ov.AsyncInferQueue(model, requests)
        for request in self._queue:
            for index, array in enumerate(inputs):
                request.set_input_tensor(index, ov.Tensor(array))
        self._first = self._queue[0]
        self._is_one = requests == 1
        self.outputs = len(model.outputs)
        self.version = ov.get_version().partition("-")[0]

    def alone(self) -> None:
        self._first.infer()

    def full(self, seconds: float) -> int:
        if self._is_one:
            return repeated(self.alone, seconds)
        count = repeated(self._queue.start_async, seconds)
        self._queue.wait_all()
        return count

    def results(self) -> list[Any]:
        self.alone()
        return [self._first.get_output_tensor(index).data for index in range(self.outputs)]


class Threaded:
    """An engine without a queue of its own: replicas are threads of one core each, which run at once."""

    def __init__(self, setting: str, threads: int) -> None:
        self._replicas = threads if setting == "replicas" else 1
        self._threads = 1 if setting == "replicas" else threads
        self._pool = ThreadPoolExecutor(self._replicas)

    def run(self, replica: int) -> Any:
        raise NotImplementedError

    def alone(self) -> None:
        self.run(0)

    def full(self, seconds: float) -> int:
        if self._replicas == 1:
            return repeated(self.alone, seconds)
        running = [
            self._pool.submit(repeated, lambda replica=replica: self.run(replica), seconds)
            for replica in range(self._replicas)
        ]
        return sum(each.result() for each in running)


class OnnxRuntime(Threaded):
    """onnxruntime with one session, which its replicas share."""

    def __init__(self, setting: str, threads: int, network: str, inputs: list[Any]) -> None:
        import onnxruntime

        super().__init__(setting, threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.log_severity_level = 3  # errors
        self._session = onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
        names = [each.name for each in self._session.get_inputs()]
        self._feed = dict(zip(names, inputs, strict=True))
        self.version = onnxruntime.__version__

    def run(self, replica: int) -> Any:
        return self._session.run(None, self._feed)

    def results(self) -> list[Any]:
        return list(self.run(0))


class TFLite(Threaded):
    """TFLite with XNNPACK, an interpreter for each replica."""

    def __init__(self, setting: str, threads: int, network: str, inputs: list[Any]) -> None:
        from ai_edge_litert.interpreter import Interpreter

        super().__init__(setting, threads)
        self._interpreters = [Interpreter(network, num_threads=self._threads) for _ in range(self._replicas)]
        for interpreter in self._interpreters:
            interpreter.allocate_tensors()
            for described, array in zip(interpreter.get_input_details(), inputs, strict=True):
                interpreter.set_tensor(described["index"], array)
        self.version = ""

    def run(self, replica: int) -> Any:
        self._interpreters[replica].invoke()

    def results(self) -> list[Any]:
        self.run(0)
        interpreter = self._interpreters[0]
        return [interpreter.get_tensor(described["index"]) for described in interpreter.get_output_details()]


class Mnn(Threaded):
    """MNN, an interpreter for each replica; precision "high" is float32 on all processors.

    `MNN.tools` installs a package by pip and reports conversions to its makers, so its library is called without it.
    """

    def __init__(self, setting: str, threads: int, network: str, inputs: list[Any]) -> None:
        import _tools
        import MNN

        super().__init__(setting, threads)
        converted = f"{network}.{os.getpid()}.mnn"
        _tools.mnnconvert(["", "-f", "ONNX", "--modelFile", network, "--MNNModel", converted, "--bizCode", "peers"])
        options = {"backend": "CPU", "precision": "high", "numThread": self._threads}
        self._interpreters = [MNN.Interpreter(converted) for _ in range(self._replicas)]
        self._sessions = [interpreter.createSession(options) for interpreter in self._interpreters]
        names, self._outputs = onnx_ports(network)
        for interpreter, session in zip(self._interpreters, self._sessions, strict=True):
            for name, array in zip(names, inputs, strict=True):
                held = MNN.Tensor(array.shape, MNN.Halide_Type_Float, array, MNN.Tensor_DimensionType_Caffe)
                interpreter.getSessionInput(session, name).copyFrom(held)
        self.version = MNN.version()

    def run(self, replica: int) -> Any:
        self._interpreters[replica].runSession(self._sessions[replica])

    def results(self) -> list[Any]:
        import MNN

        self.run(0)
        found = []
        for name in self._outputs:
            tensor = self._interpreters[0].getSessionOutput(self._sessions[0], name)
            shape = tensor.getShape()
            held = MNN.Tensor(shape, MNN.Halide_Type_Float, np.zeros(shape, np.float32), MNN.Tensor_DimensionType_Caffe)
            tensor.copyToHostTensor(held)
            found.append(np.array(held.getNumpyData()).reshape(shape))
        return found


class Iree(Threaded):
    """IREE, compiled for this processor; one thread runs on its caller, several are IREE's workers.

    Its convolutions take three times as long in the order NCHW of the networks, so they are turned.
    """

    def __init__(self, setting: str, threads: int, network: str, inputs: list[Any]) -> None:
        import iree.compiler.tools as tools
        import iree.runtime as runtime
        from iree.runtime.version import VERSION

        super().__init__(setting, threads)
        imported = f"{network}.{os.getpid()}.mlir"
        importer = os.path.join(os.path.dirname(sys.executable), "iree-import-onnx")
        subprocess.run([importer, network, "-o", imported, "--opset-version", "17"], check=True)
        turned = "builtin.module(util.func(iree-preprocessing-convert-conv-to-channels-last))"
        options = ["--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3"]
        options.append(f"--iree-preprocessing-pass-pipeline={turned}")
        code = tools.compile_file(imported, target_backends=["llvm-cpu"], extra_args=options)
        runtime.flags.parse_flags(f"--task_topology_group_count={self._threads}")
        self._functions, self._inputs = [], []
        for _ in range(self._replicas):
            config = runtime.Config("local-sync" if self._threads == 1 else "local-task")
            context = runtime.SystemContext(config=config)
            module = runtime.VmModule.copy_buffer(context.instance, code)
            context.add_vm_module(module)
            name = next(name for name in module.function_names if not name.endswith("$async"))
            self._functions.append(context.modules[module.name][name])
            self._inputs.append([runtime.asdevicearray(config.device, array) for array in inputs])
        self.version = VERSION

    def run(self, replica: int) -> Any:
        return self._functions[replica](*self._inputs[replica])

    def results(self) -> list[Any]:
        found = self.run(0)
        return [np.asarray(each) for each in (found if isinstance(found, (list, tuple)) else [found])]


class ExecuTorch(Threaded):
    """ExecuTorch with XNNPACK, from the network as a module of PyTorch."""

    def __init__(self, setting: str, threads: int, network: str, inputs: list[Any]) -> None:
        import types

        import torch

        # onnx2torch imports it for NMS and RoiAlign alone, and no wheel of it fits this PyTorch.
        sys.modules["torchvision"] = sys.modules["torchvision.ops"] = absent = types.ModuleType("torchvision")
        absent.ops, absent.roi_align = absent, None
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from executorch.runtime import Runtime
        from executorch.version import __version__
        from onnx2torch import convert

        super().__init__(setting, threads)
        self._inputs = [torch.from_numpy(array) for array in inputs]
        exported = torch.export.export(convert(network).eval(), tuple(self._inputs))
        lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        self._program = Runtime.get().load_program(lowered.to_executorch().buffer)
        self._method = self._program.load_method("forward")
        self.version = __version__

    def run(self, replica: int) -> Any:
        return self._method.execute(self._inputs)

    def results(self) -> list[Any]:
        return [each.numpy() for each in self.run(0)]


def onnx_ports(network: str) -> tuple[list[str], list[str]]:
    """Return the names of a network's inputs and outputs."""
    import onnx

    graph = onnx.load(network, load_external_data=False).graph
    held = {tensor.name for tensor in graph.initializer}
    return [each.name for each in graph.input if each.name not in held], [each.name for each in graph.output]


ENGINES = {
    "OpenVINO": OpenVino,
    "onnxruntime": OnnxRuntime,
    "TFLite": TFLite,
    "MNN": Mnn,
    "IREE": Iree,
    "ExecuTorch": ExecuTorch,
}


def serve(name: str, setting: str, threads: str, network: str, inputs_file: str, outputs_file: str) -> None:
    """Run a network on one of ENGINES until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    with np.load(inputs_file) as saved:
        inputs = [saved[key] for key in saved.files]
    engine = ENGINES[name](setting, int(threads), network, inputs)
    np.savez(outputs_file, *engine.results())
    print(json.dumps(engine.version), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(take_turn(engine, float(line)))), file=answers, flush=True)
