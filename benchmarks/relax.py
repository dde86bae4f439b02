"""What Relax's side of this project does: exact slices, kernels beside Relay's, outputs beside onnxruntime's.

    python benchmarks/relax.py --relay .venv-relay/bin/python           # all parts, in an environment with [tvm]
    python benchmarks/relax.py --relay ... --only speed
    python benchmarks/relax.py --short                            # little of each, for CI: no Relay beside it

slices      random convex cuts in 2 to 4 stages against the unsplit model, bit for bit; the time to make a slice of a
            loaded model; the largest difference to onnxruntime, over the largest value of the output
alignment   the kernels of each network for five targets, and the operators that all of them share, which are the places
            where the network can be cut between any two of them; no code is made
overhead    what the loop over calls adds to each kernel: 100 calls of a kernel that nearly does nothing, in a slice and
            by themselves
speed       one core, beside TVM 0.19 with our kernels: each in a process of its own, in turns; a ratio is the median
            over rounds of what the two did in one round, and above 1 Relax with our kernels is the faster one
stock       the same beside Relax as it comes
xnnpack     the same beside TFLite's XNNPACK, for those of --models that are .tflite files (the MobileNetV2 of the tests
            without any)
compile     seconds to compile resnet-50 in an empty cache, in both environments in turns
prediction  predicted against measured throughput of the planner's candidates, in both environments

The networks are written once by the environment with Relay (export_networks.py), which `--relay` names. The exit status
is 1 if a slice differs in a bit, or an output by more than 1e-4 from onnxruntime's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from networks import EXPORTED
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import write_picture_net
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline import Device, frontends
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.report import TextTable
from tvm_pipeline.runtime.comparison import in_turn

HERE = Path(__file__).parent
SEVEN = ("squeezenet", "mobilenet", "resnet-18", "resnet-50", "densenet-121", "inception_v3", "centerface")
TEN = (*SEVEN, "light_inception_v1", "light_inception_v2", "light_shufflenet")
FIVE = ("squeezenet", "mobilenet", "resnet-18", "inception_v3", "centerface")
PARTS = ("slices", "alignment", "overhead", "speed", "stock", "xnnpack", "compile", "prediction")
TARGETS = {
    "AVX-512": "llvm -mcpu=x86-64-v4",
    "AVX2": "llvm -mcpu=x86-64-v3",
    "SSE": "llvm -mcpu=x86-64-v2",
    "AArch64": "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72",
    "CUDA": "cuda -arch=sm_87",
}
MOBILENET = HERE.parent / "tests" / "edgetpu" / "data" / "mobilenet_v2_int8.tflite"
LIMIT = 1e-4  # of the largest value of an output, against onnxruntime
CONSOLE = Console(width=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relay", type=Path, help="the python of an environment with Relay and this project")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", help="names that networks.py knows, or files[@shapes]")
    parser.add_argument("--cuts", type=int, default=20, help="of each network")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--short", action="store_true", help="one small network, briefly: proves that it works")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.short:
            options.models, options.rounds, options.seconds, options.cuts = ["small"], 1, 0.05, 4
            options.files = {"small": write_picture_net(Path(folder) / "small.onnx")}
        else:
            options.files = network_files(options.relay, options.models or TEN)
        right = [globals()[part](options) for part in options.only]
    raise SystemExit(not all(right))


def network_files(relay: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Return the ONNX file of each network; those of networks.py are written where they are not there."""
    known = {
        name: EXPORTED / f"{name}.onnx" for name in names if not name.partition("@")[0].endswith((".onnx", ".tflite"))
    }
    missing = [name for name, file in known.items() if not file.exists()]
    if missing:
        if relay is None:
            raise SystemExit(f"{', '.join(missing)} must be written by Relay's environment: say which with --relay")
        subprocess.run([relay, HERE / "export_networks.py", EXPORTED, *missing], check=True)
    return known | {name: Path(name) for name in names if name not in known}


def loaded(name: str, options: argparse.Namespace) -> Model:
    file, _, shapes = str(options.files[name]).partition("@")
    return frontends.load(file, frontends.parse_shapes(shapes) if shapes else None)


# Slices


def slices(options: argparse.Namespace) -> bool:
    """Cut each network at random; return whether all is equal, and near what onnxruntime computes."""
    backend = find_backend("host")
    device = one_core()
    rows, right = [], True
    for name in options.models or TEN:
        model = loaded(name, options)
        compiled = backend.compile(model, [device])
        frame = random_frame(compiled.graph.inputs)
        names = compiled.graph.operator_names
        whole = model_outputs(compiled, run_stages(compiled, [(names, device)], frame))
        apart = against_onnxruntime(model, frame, whole)
        draw, equal, made_s = Random(0), 0, []
        for _ in range(options.cuts):
            parts = random_stages(compiled.graph, draw, draw.randint(2, min(4, len(names))))
            made_s += [seconds_to_make(compiled, part, device) for part in parts]
            found = model_outputs(compiled, run_stages(compiled, [(part, device) for part in parts], frame))
            equal += all(map(np.array_equal, found, whole))
        right = right and equal == options.cuts and apart <= LIMIT
        rows.append(
            (
                name,
                str(len(names)),
                f"{equal} of {options.cuts}",
                f"{1e3 * statistics.median(made_s):.2f}",
                f"{1e3 * max(made_s):.2f}",
                f"{apart:.1e}",
            )
        )
        CONSOLE.print("  ", *rows[-1], style="dim", highlight=False)
    columns = ("network", "operators", "cuts equal bit for bit", "a slice, ms, median", "worst", "onnxruntime, apart")
    CONSOLE.print(TextTable("Random convex cuts in 2 to 4 stages", columns, tuple(rows)))
    return right


def seconds_to_make(compiled: CompiledModel, part: Sequence[str], device: Device) -> float:
    begin_s = time.perf_counter()
    compiled.stage(part, device)
    return time.perf_counter() - begin_s


def against_onnxruntime(model: Model, frame: Mapping[str, Array], found: Sequence[Array]) -> float:
    """Return the largest difference to onnxruntime over the largest value, of the worst output."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(model.content, settings, providers=["CPUExecutionProvider"])
    expected = session.run(None, dict(frame))
    return max(
        float(np.abs(one.reshape(other.shape).astype("f8") - other).max() / max(np.abs(other).max(), 1e-30))
        for one, other in zip(found, expected, strict=True)
    )


# Targets


def alignment(options: argparse.Namespace) -> bool:
    """Align the kernels of several targets; return whether those of every network line up."""
    from tvm_pipeline_tvm.alignment import align
    from tvm_pipeline_tvm.relax.gpu_schedules import gpu_fused
    from tvm_pipeline_tvm.relax.importer import import_model
    from tvm_pipeline_tvm.relax.kernel_passes import fused
    from tvm_pipeline_tvm.relax.kernel_walkers import flat_module
    from tvm_pipeline_tvm.relax.pad_channels import pad_channels
    from tvm_pipeline_tvm.relax.simplify import simplified
    from tvm_pipeline_tvm.target_text import tvm_target

    rows, right = [], True
    for name in options.models or TEN:
        model = loaded(name, options)
        mod = pad_channels(simplified(import_model(model)))
        flat = {
            label: flat_module((gpu_fused if label == "CUDA" else fused)(mod, tvm_target(target)))
            for label, target in TARGETS.items()
        }
        counts = [str(sum(not kernel.is_glue for kernel in each.kernels)) for each in flat.values()]
        try:
            graph, _ = align(
                name, model.inputs, [each.kernels for each in flat.values()], [each.heads for each in flat.values()]
            )
            shared = str(len(graph))
        except ModelError as error:
            right, shared = False, str(error)
        rows.append((name, *counts, shared))
    CONSOLE.print(TextTable("Kernels that compute, by target", ("network", *TARGETS, "shared by all"), tuple(rows)))
    return right


# The loop


def overhead(options: argparse.Namespace) -> bool:
    """Time a slice of many small kernels beside the same kernels called from C by TVM's own timer."""
    import tvm

    device, width, count = one_core(), 16, 100
    nodes = [onnx.helper.make_node("Softmax", [f"t{each}"], [f"t{each + 1}"]) for each in range(count)]
    ends = [onnx.helper.make_tensor_value_info(name, 1, (1, width)) for name in ("t0", f"t{count}")]
    graph = onnx.helper.make_graph(nodes, "softmaxes", ends[:1], ends[1:])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(proto, Path(folder) / "softmaxes.onnx")
        compiled = find_backend("host").compile(frontends.load(Path(folder) / "softmaxes.onnx"), [device])
    names = compiled.graph.operator_names
    runner = compiled.runnable_plan(compiled.plan_slice(names, device), device)
    inputs, outputs = [noise(port) for port in runner.inputs], [port.buffer() for port in runner.outputs]
    bound = compiled.stage(names, device)
    bound.bind()
    call = compiled.libraries[device.target].calls[0]
    _, tensors = runner.calls(inputs, outputs)[0]
    timer = compiled.libraries[device.target].module.time_evaluator(call.function, tvm.cpu(), number=10_000)
    found = []
    for _ in range(3 if options.short else 30):
        alone_s = timer(*tensors).mean
        begin_s = time.perf_counter()
        for _ in range(100):
            runner.run(inputs, outputs)
        found.append((time.perf_counter() - begin_s) / (100 * count) - alone_s)
    low, median, high = (1e6 * each for each in np.quantile(found, (0.25, 0.5, 0.75)))
    CONSOLE.print(
        f"{count} kernels of {1e6 * alone_s:.2f} us: the loop adds {median:.3f} us ({low:.3f}-{high:.3f}) to each",
        highlight=False,
    )
    return True


# Speed


class Worker:
    """A process of relax_worker.py that is ready to take turns."""

    def __init__(self, python: Path | str, kind: str, network: Path, core: int) -> None:
        self.kind = kind
        self._process = start(python, kind, network, core)
        answer(self._process, kind)

    def turn(self, seconds: float) -> float:
        print(seconds, file=self._process.stdin, flush=True)
        return float(answer(self._process, self.kind))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def start(python: Path | str, kind: str, network: Path, core: int) -> subprocess.Popen[str]:
    command = [str(python), str(HERE / "relax_worker.py"), kind, str(network), str(core)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str], what: str) -> Any:
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the process of {what} has ended; see above")
    return json.loads(line)


def one_core() -> Device:
    """Return a core of this machine as a device."""
    found = find_backend("host").detect()[0]
    return Device("core", "host", found.cores[:1], found.target)


def speed(options: argparse.Namespace) -> bool:
    """Race Relax with our kernels against Relay with ours."""
    if options.relay is None:
        CONSOLE.print("speed: no Relay to compare with; name its python with --relay")
        return True
    race("TVM 0.19, our kernels", options.relay, "ours", options)
    return True


def stock(options: argparse.Namespace) -> bool:
    """Race Relax with our kernels against Relax as it comes."""
    race("stock Relax", sys.executable, "stock", options)
    return True


def xnnpack(options: argparse.Namespace) -> bool:
    """Race Relax with our kernels against the engine that TFLite runs by default."""
    if options.short:
        CONSOLE.print("xnnpack: left out, since its networks are not small")
        return True
    names = [name for name in options.models or () if name.endswith(".tflite")] or [str(MOBILENET)]
    options.files |= {name: Path(name) for name in names}
    race("TFLite's XNNPACK", sys.executable, "xnnpack", options, names)
    return True


def race(
    label: str, python: Path | str, kind: str, options: argparse.Namespace, names: Sequence[str] | None = None
) -> None:
    core, rows, gains = max(os.sched_getaffinity(0)), [], []
    for name in names or options.models or SEVEN:
        with ExitStack() as opened:
            workers = [Worker(sys.executable, "ours", options.files[name], core)]
            opened.callback(workers[0].close)
            workers.append(Worker(python, kind, options.files[name], core))
            opened.callback(workers[1].close)
            turns: list[list[float]] = [[], []]
            for round_ in range(options.rounds):
                for index in in_turn([0, 1], round_):
                    turns[index].append(workers[index].turn(options.seconds))
        own, other = (np.array(each) for each in turns)
        low, median, high = np.quantile(other / own, (0.25, 0.5, 0.75))
        gains.append(median)
        rows.append(
            (
                Path(name).stem,
                *(f"{1e3 * np.median(each):.2f}" for each in turns),
                f"{median:.3f} ({low:.3f}-{high:.3f})",
            )
        )
        CONSOLE.print("  ", *rows[-1], style="dim", highlight=False)
    rows.append(("geometric mean", "", "", f"{np.exp(np.mean(np.log(gains))):.3f}, least {min(gains):.3f}"))
    columns = ("network", "CPU ms, Relax with our kernels", label, f"{label} / ours (quartiles)")
    CONSOLE.print(TextTable("One core, one thread; above 1 Relax with our kernels is faster", columns, tuple(rows)))


def compile(options: argparse.Namespace) -> bool:
    """Compile a network in both environments in turns."""
    name = options.models[0] if options.models else "resnet-50"
    core = max(os.sched_getaffinity(0))
    pythons = {"Relax": sys.executable, **({"Relay": options.relay} if options.relay else {})}
    found: dict[str, list[dict[str, float]]] = {label: [] for label in pythons}
    for round_ in range(min(options.rounds, 3)):
        for label in in_turn(list(pythons), round_):
            process = start(pythons[label], "compile", options.files[name], core)
            found[label].append(answer(process, label))
            process.wait()
    for label, times in found.items():
        wall, cpu = (statistics.median(each[key] for each in times) for key in ("wall_s", "cpu_s"))
        CONSOLE.print(f"{name} compiled by {label} on one core: {wall:.1f} s, {cpu:.1f} s of CPU", highlight=False)
    if len(found) == 2:
        each = [other["cpu_s"] / own["cpu_s"] for own, other in zip(found["Relax"], found["Relay"], strict=True)]
        CONSOLE.print(f"Relay / Relax: {statistics.median(each):.2f}", highlight=False)
    return True


def prediction(options: argparse.Namespace) -> bool:
    """Run prediction.py on the same files in both environments."""
    files = [str(options.files[name]) for name in (options.models or FIVE)]
    for label, python in {"Relax": sys.executable, "Relay": options.relay}.items():
        if python:
            CONSOLE.print(f"{label}:")
            turns = ("--seconds", str(2 * options.seconds), "--rounds", str(min(options.rounds, 3)))
            subprocess.run([python, HERE / "prediction.py", "--models", *files, *turns], check=True)
    return True


if __name__ == "__main__":
    main()
