"""Winograd's algorithm beside direct convolutions, on one core and one thread.

    taskset -c 1 python benchmarks/winograd.py                                  # layers, in CPU time
    taskset -c 1 python benchmarks/winograd.py --target "llvm -mcpu=x86-64-v3"  # the same by AVX2
    taskset -c 1 python benchmarks/winograd.py --short                          # one small layer, for CI

Each layer is computed with the direct convolution, and with every form of Winograd's algorithm that tuning tries, each
with caches full of other data before it: the fastest of each. GFLOPS count the products of a direct convolution, so
Winograd's may exceed the peak of the core. "apart" is the largest difference from a direct convolution in float64, over
the largest output. The form that the static rule takes has a star. It runs with Relay; tolerance.py has whole networks.

The exit status is 1 where a layer is further off than LIMIT says.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
from peer_engines import apart
from rich.console import Console

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.report import TextTable
from tvm_pipeline_kernels.choices import (
    Choice,
    is_winograd,
    possible_choices,
    static_choice,
    winograd_choices,
)
from tvm_pipeline_kernels.relay.tuning.emitter import compile_candidates
from tvm_pipeline_kernels.relay.tuning.tasks import optimized, tasks_of
from tvm_pipeline_kernels.tuning.candidates import Candidate, Stopwatch, Task
from tvm_pipeline_kernels.tuning.targets import cores_of
from tvm_pipeline_kernels.winograd import Winograd
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relay.fold import fast_build

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

LAYERS = (
    *((16, 64, 55), (32, 128, 27), (48, 192, 13), (64, 256, 13), (32, 32, 80), (64, 64, 80), (128, 128, 40)),
    *((256, 256, 20), (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7), (64, 64, 224), (512, 512, 28)),
)  # channels read and written, and the height and width
LIMIT = 1e-5  # of the largest output of a layer
CONSOLE = Console(width=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=host_target(), help="of the code; this processor's without it")
    parser.add_argument("--short", action="store_true", help="one small layer in three forms, for CI")
    options = parser.parse_args()
    tvm.get_global_func("runtime.config_threadpool")(-2, 1, [str(max(os.sched_getaffinity(0)))])
    load = f"{options.target}, one core, one thread, load average {os.getloadavg()[0]:.1f}"
    sizes = ((16, 16, 8),) if options.short else LAYERS
    layers = [layer(*size, options.target, 3 if options.short else None) for size in sizes]
    columns = ("layer", "form", "CPU us", "GFLOPS", "direct / this", "apart")
    CONSOLE.print(TextTable(f"Layers, {load}", columns, tuple(row for rows, _, _ in layers for row in rows)))
    gains = [gain for _, _, gain in layers]
    mean = np.exp(np.mean(np.log(gains)))
    CONSOLE.print(f"the static rule over direct convolutions: {mean:.2f} (geometric mean), least {min(gains):.2f}")
    raise SystemExit(not all(right for _, right, _ in layers))


def layer(
    inputs: int, outputs: int, extent: int, described: str, most: int | None = None
) -> tuple[list[tuple[str, ...]], bool, float]:
    """Return rows of a layer's forms, `most` of them, whether all values are near enough, and what the rule gains."""
    draw, target = np.random.default_rng(0), tvm.target.Target(described)
    weights = draw.standard_normal((outputs, inputs, 3, 3)).astype("float32")
    data = draw.standard_normal((1, inputs, extent, extent)).astype("float32")
    x = relay.var("data", shape=data.shape)
    options = {"channels": outputs, "kernel_size": (3, 3), "padding": (1, 1)}
    body = relay.nn.relu(relay.nn.conv2d(x, relay.const(weights), **options))
    mod = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x], body)))
    [task] = tasks_of(optimized(mod, target))
    cores = cores_of(described)
    choices = [possible_choices(task.workload, cores)[0], *winograd_choices(task.workload, cores)][:most]
    ruled = static_choice(task.workload, cores, winograd=True)
    seconds = _seconds(task, choices, target)
    expected = _direct(data, weights)
    rows, right = [], True
    for choice, took_s in zip(choices, seconds, strict=True):
        built = fast_build(mod, target, choices={task.workload: choice}, tolerance=1.0)
        executor = graph_executor.GraphModule(built["default"](tvm.cpu()))
        executor.set_input("data", data)
        executor.run()
        off = apart([executor.get_output(0).numpy()], [expected])
        right = right and off <= LIMIT
        shown = (_form(Winograd(*choice)) if is_winograd(choice) else "direct") + " *" * (choice == ruled)
        figures = f"{1e6 * took_s:.0f}", f"{2e-9 * task.macs / took_s:.0f}", f"{seconds[0] / took_s:.2f}", f"{off:.1e}"
        rows.append((f"{inputs} to {outputs} @ {extent} x {extent}", shown, *figures))
    gain = seconds[0] / seconds[choices.index(ruled)] if ruled in choices else 1.0
    return rows, right, gain


def _form(form: Winograd) -> str:
    return f"F({form.winograd}, 3), {form.chunks} x {form.columns}, bands of {form.rows}"


def _seconds(task: Task, choices: list[Choice], target: tvm.target.Target) -> list[float]:
    candidates = [Candidate(task.workload, choice, task.functions) for choice in choices]
    compile_candidates(candidates, target)
    watch = Stopwatch(tvm.nd.array)
    for _ in range(20):
        for candidate in candidates:
            watch.time(candidate)
    return [candidate.seconds for candidate in candidates]


def _direct(data: Array, weights: Array) -> Array:
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.maximum(np.einsum("nchwij,ocij->nohw", windows, weights.astype("float64"), optimize=True), 0)


if __name__ == "__main__":
    main()
