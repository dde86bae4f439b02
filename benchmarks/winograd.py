"""Winograd's algorithm beside direct convolutions, on one core and one thread, in CPU time.

    taskset -c 1 python benchmarks/winograd.py                                  # layers of the resnets
    taskset -c 1 python benchmarks/winograd.py --models resnet-18 resnet-50     # networks, after `tune --winograd`
    taskset -c 1 python benchmarks/winograd.py --short                          # one small layer, for CI

layers    Each layer with what the static rule chooses, and with every form of Winograd's algorithm that tuning tries,
          each with caches full of other data before it: the fastest of each. GFLOPS count the products of a direct
          convolution, so Winograd's may exceed the peak of the core. "apart" is the largest difference from a direct
          convolution in float64, over the largest output.
networks  Each network is tuned first, for --seconds; what was measured before is not measured again. Then the library
          of the static rule and the one with what was found run in turns. Outputs are compared on a frame of noise.

The exit status is 1 where Winograd's algorithm is further off than its tolerance says, or a network by more than 1e-4.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import numpy as np
from networks import load_lively
from peer_engines import apart
from rich.console import Console

from tvm_pipeline import Device
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.report import TextTable
from tvm_pipeline.tvm.relay.build import build_library
from tvm_pipeline.tvm.relay.compiled import RelayModel
from tvm_pipeline.tvm.relay.fold import fast_build
from tvm_pipeline.tvm.relay.library import Library
from tvm_pipeline_host.detection import host_target
from tvm_pipeline_kernels.relay.schedules.choices import Choice, is_winograd, possible_choices, winograd_choices
from tvm_pipeline_kernels.relay.tuning.candidates import Candidate, Stopwatch, compile_candidates
from tvm_pipeline_kernels.relay.tuning.race import race
from tvm_pipeline_kernels.relay.tuning.tasks import Task, optimized, tasks_of
from tvm_pipeline_kernels.relay.tuning.tuner import tune
from tvm_pipeline_kernels.winograd import TOLERANCE, Winograd

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip
from tvm.target.x86 import get_simd_32bit_lanes  # isort: skip

LAYERS = ((64, 56), (128, 28), (256, 14), (512, 7))
LIMIT = 1e-4  # of the largest output of a network
CONSOLE = Console(width=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], help="networks, in place of layers")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the search for each network")
    parser.add_argument("--short", action="store_true", help="one small layer in three forms, for CI")
    options = parser.parse_args()
    tvm.get_global_func("runtime.config_threadpool")(-2, 1, [str(max(os.sched_getaffinity(0)))])
    load = f"one core, one thread, load average {os.getloadavg()[0]:.1f}"
    if options.models:
        rows, right = zip(*(network(name, options.seconds) for name in options.models), strict=True)
        columns = ("network", "direct, CPU ms", "Winograd's, CPU ms", "ratio (least-largest)", "convolutions", "apart")
        CONSOLE.print(TextTable(f"Networks, {load}", columns, rows))
        raise SystemExit(not all(right))
    found = [layer(16, 8, 3)] if options.short else [layer(*shape) for shape in LAYERS]
    columns = ("layer", "form", "CPU us", "GFLOPS", "direct / this", "apart")
    CONSOLE.print(TextTable(f"Layers, {load}", columns, tuple(row for rows, _ in found for row in rows)))
    raise SystemExit(not all(right for _, right in found))


def layer(channels: int, extent: int, most: int | None = None) -> tuple[list[tuple[str, ...]], bool]:
    """Return rows of a layer's forms, `most` of them, and whether all values are as near as they must be."""
    draw, target = np.random.default_rng(0), tvm.target.Target(host_target())
    weights = draw.standard_normal((channels, channels, 3, 3)).astype("float32")
    data = draw.standard_normal((1, channels, extent, extent)).astype("float32")
    x = relay.var("data", shape=data.shape)
    options = {"channels": channels, "kernel_size": (3, 3), "padding": (1, 1)}
    body = relay.nn.relu(relay.nn.conv2d(x, relay.const(weights), **options))
    mod = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x], body)))
    [task] = tasks_of(optimized(mod, target))
    with target:
        lanes = get_simd_32bit_lanes()
    choices = [possible_choices(task.workload, lanes)[0], *winograd_choices(task.workload, lanes)][:most]
    seconds = _seconds(task, choices, target)
    expected = _direct(data, weights)
    rows, right = [], True
    for choice, took_s in zip(choices, seconds, strict=True):
        executor = graph_executor.GraphModule(
            fast_build(mod, target, choices={task.workload: choice})["default"](tvm.cpu())
        )
        executor.set_input("data", data)
        executor.run()
        off = apart([executor.get_output(0).numpy()], [expected])
        right = right and (not is_winograd(choice) or off <= TOLERANCE[choice[0]])
        shown = _form(Winograd(*choice)) if is_winograd(choice) else "direct"
        figures = f"{1e6 * took_s:.0f}", f"{2e-9 * task.macs / took_s:.0f}", f"{seconds[0] / took_s:.2f}", f"{off:.1e}"
        rows.append((f"{channels} @ {extent} x {extent}", shown, *figures))
    return rows, right


def _form(form: Winograd) -> str:
    return f"F({form.winograd}, 3), {form.chunks} x {form.columns}, bands of {form.rows}"


def _seconds(task: Task, choices: list[Choice], target: tvm.target.Target) -> list[float]:
    candidates = [Candidate(task.workload, choice, task.functions) for choice in choices]
    compile_candidates(candidates, target)
    watch = Stopwatch()
    for _ in range(20):
        for candidate in candidates:
            watch.time(candidate)
    return [candidate.seconds for candidate in candidates]


def _direct(data: Array, weights: Array) -> Array:
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.maximum(np.einsum("nchwij,ocij->nohw", windows, weights.astype("float64"), optimize=True), 0)


def network(name: str, seconds: float) -> tuple[tuple[str, ...], bool]:
    """Return the row of a network, and whether its outputs are as near as they must be."""
    model, target = replace(load_lively(name), winograd=True), host_target()
    tune(model, target, seconds)
    libraries = build_library(model, target, choices={}), build_library(model, target)
    direct, fast = race(model.name, *libraries)
    ratios = direct.whole / fast.whole
    expected, found = map(_outputs, libraries)
    off, tuning = apart(found, expected), libraries[1].tuning
    times = (f"{1e3 * np.median(times.whole):.2f}" for times in (direct, fast))
    gained = f"{np.median(ratios):.3f} ({ratios.min():.3f}-{ratios.max():.3f})"
    chosen = f"{tuning.convolutions} distinct, {tuning.tuned} tuned, {tuning.winograd} Winograd's"
    return (name, *times, gained, chosen, f"{off:.1e}"), off <= LIMIT


def _outputs(library: Library) -> list[Array]:
    model = RelayModel("model", [library], lambda _: None)
    names = [operator.name for operator in model.graph.operators]
    stage = model.stage(names, Device("core", "host", target=library.target))
    outputs = [port.buffer() for port in stage.outputs]
    stage.run([noise(port) for port in stage.inputs], outputs)
    return outputs


if __name__ == "__main__":
    main()
