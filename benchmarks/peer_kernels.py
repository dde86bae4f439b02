"""Parts of peers.py about kernels: our schedules beside TOPI's, and each operator beside what the core can do."""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from networks import load_lively
from peer_engines import apart
from rich.console import Console

from tvm_pipeline import Device
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.graph import Operator
from tvm_pipeline.core.model import Model
from tvm_pipeline.report import TextTable
from tvm_pipeline.runtime.comparison import in_turn
from tvm_pipeline_tvm.host.detection import host_target, missing_features
from tvm_pipeline_tvm.host.host import bind
from tvm_pipeline_tvm.kernel_sets import RelayKernels
from tvm_pipeline_tvm.relay import build, fold
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import Library, load_library

from tvm.contrib.cc import get_cc  # isort: skip
from tvm.target.x86 import get_simd_32bit_lanes  # isort: skip
from tvm import target as tvm_target  # isort: skip

LIMIT = 1e-5  # of the largest value of an output: another order of the same sums
TARGETS = ("llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64-v4")
BLOCK_S = 0.05  # of a turn, at least
PASSES = 30  # of a model, to time its operators
SHOWN = 12  # operators


def one_core() -> int:
    return max(os.sched_getaffinity(0))


# Our schedules beside TOPI's


def schedules(console: Console, options: argparse.Namespace) -> bool:
    """Compare libraries with our schedules and with TOPI's alone; return whether all outputs are within LIMIT."""
    targets = list(dict.fromkeys((host_target(),) if options.short else (*TARGETS, host_target())))
    rows, right = [], True
    for target in targets:
        missing = missing_features(target)
        if missing:
            console.print(f"{target} is left out: this processor has no {', '.join(missing)}")
            continue
        gains, builds = [], []
        if not options.short:
            _library(load_lively("branching"), target, own=True)  # whatever is done once in a process is done
        for name in options.models:
            found = _schedules(load_lively(name), target, options.rounds)
            low, gain, high = np.quantile(found.ratios, (0.25, 0.5, 0.75))
            gains.append(gain)
            builds.append(found.build_s[1] / found.build_s[0])
            right = right and found.apart <= LIMIT
            times = (f"{1e3 * np.median(seconds):.2f}" for seconds in found.seconds)
            compared = f"{gain:.3f} ({low:.3f}-{high:.3f})", f"{found.apart:.1e}" if found.apart else "equal"
            seconds = (f"{value:.1f}" for value in found.build_s)
            rows.append((name, target, *times, *compared, *seconds, f"{builds[-1]:.2f}"))
            console.print("  ", *rows[-1], style="dim", highlight=False)
        means = (f"{np.exp(np.mean(np.log(values))):.3f}" for values in (gains, builds))
        rows.append(("geometric mean", target, "", "", next(means), "", "", "", next(means)))
    columns = ("network", "target", "TOPI's, CPU ms", "ours", "TOPI's / ours (quartiles)", "bits, or apart")
    title = f"One core, one thread (load average {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')})"
    console.print(TextTable(title, (*columns, "build, CPU s", "ours", "ratio"), tuple(rows)))
    return right


@dataclass
class Compared:
    """What two libraries of a network did, TOPI's first: CPU seconds of a frame in each round, and of the build.

    Attributes:
        apart: the largest difference of their outputs over the largest value; 0 where all bits are equal.
    """

    apart: float
    seconds: tuple[list[float], list[float]]
    build_s: list[float]

    @property
    def ratios(self) -> list[float]:
        return [stock / own for stock, own in zip(*self.seconds, strict=True)]


def _schedules(model: Model, target: str, rounds: int) -> Compared:
    (stock, stock_s), (own, own_s) = (_library(model, target, own=own) for own in (False, True))
    with ThreadPoolExecutor(1) as thread:  # binding is for good
        difference, seconds = thread.submit(_in_turns, [_runner(stock, target), _runner(own, target)], rounds).result()
    return Compared(difference, seconds, [stock_s, own_s])


def _library(model: Model, target: str, *, own: bool) -> tuple[Library, float]:
    """Return a library of a model, and the CPU seconds that compiling it took, the linker's included."""
    mod, params = import_model(model)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as without:
        if not own:
            for room in (build, fold):
                without.enter_context(patch.object(room, "relay_kernels", RelayKernels))
            for name in ("pad_channels", "channels_first"):
                without.enter_context(patch.object(build, name, lambda mod, *_: mod))
        begin_s = sum(os.times()[:4])
        build.compile_module(model.name, mod, params, target, Path(folder))
        took_s = sum(os.times()[:4]) - begin_s
        return load_library(Path(folder)), took_s


@dataclass
class _Frames:
    """A whole model in the thread that binds it, on noise."""

    stage: Any
    inputs: list[Array] = field(init=False)
    outputs: list[Array] = field(init=False)

    def bind(self) -> None:
        self.stage.bind()
        self.inputs = [noise(port) for port in self.stage.inputs]
        self.outputs = [port.buffer() for port in self.stage.outputs]
        self.run()

    def run(self) -> None:
        self.stage.run(self.inputs, self.outputs)

    def cpu_s(self) -> float:
        """Return CPU seconds of a frame, over frames that take BLOCK_S together."""
        begin_s, count, took_s = time.thread_time(), 0, 0.0
        while took_s < BLOCK_S:
            self.run()
            count += 1
            took_s = time.thread_time() - begin_s
        return took_s / count


def _runner(library: Library, target: str) -> _Frames:
    model = RelayModel("model", [library], bind)
    names = model.graph.operator_names
    return _Frames(model.stage(names, Device("core", "host", (one_core(),), target)))


def _in_turns(frames: list[_Frames], rounds: int) -> tuple[float, tuple[list[float], list[float]]]:
    for each in frames:
        each.bind()
    difference = apart(frames[1].outputs, frames[0].outputs)
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds):
        for index in in_turn((0, 1), round_):
            seconds[index].append(frames[index].cpu_s())
    return difference, seconds


# Operators


def operators(console: Console, options: argparse.Namespace) -> bool:
    """Print where each network's time goes, and what of it the multiply-adds of the core do not explain."""
    for name in options.models:
        target = host_target()
        device = Device("core", "host", (one_core(),), target)
        model = RelayModel.compile(load_lively(name), [target], bind)
        with ThreadPoolExecutor(1) as thread:  # binding is for good
            seconds, peak = thread.submit(_timed, model, device).result()
        console.print(_operators_table(name, model, seconds, peak))
    return True


def _timed(model: RelayModel, device: Device) -> tuple[Array, float]:
    """Return CPU seconds of each operator, and the core's peak in floating-point operations a second."""
    bind(device)
    measure = peak_of_core(device.target)
    before = measure()
    # The profiler's clock is wall time, which programs that share the core would spoil.
    with patch("time.perf_counter", time.thread_time):
        seconds = model.time_operators(device, PASSES)
    return np.median(seconds, axis=0), max(before, measure())


def _operators_table(name: str, model: RelayModel, seconds: Array, peak: float) -> TextTable:
    graph = model.graph
    shapes = {tensor.name: tensor.shape for tensor in graph.inputs}
    size = {tensor.name: tensor.bytes for tensor in graph.inputs}
    alike: dict[Any, list[tuple[Operator, float, int]]] = defaultdict(list)
    for operator, took_s in zip(graph.operators, seconds, strict=True):
        shapes |= {tensor.name: tensor.shape for tensor in operator.outputs}
        size |= {tensor.name: tensor.bytes for tensor in operator.outputs}
        read = tuple(_shown(shapes[tensor]) for tensor in operator.inputs)
        moved = sum(size[tensor] for tensor in operator.inputs) + operator.output_bytes + operator.param_bytes
        written = tuple(_shown(tensor.shape) for tensor in operator.outputs)
        key = operator.kind, read if len(read) < 4 else (*read[:1], "..."), written, operator.param_bytes
        alike[key].append((operator, took_s, moved))
    rows = []
    for (kind, read, written, _), found in alike.items():
        took_s, flops = sum(each for _, each, _ in found), sum(2 * operator.macs for operator, _, _ in found)
        lost_s = took_s - flops / peak
        shown = f"{flops / took_s / 1e9:.0f}", f"{sum(moved for *_, moved in found) / took_s / 1e9:.1f}"
        share = f"{took_s / seconds.sum():.1%}", f"{1e3 * lost_s:.3f}", f"{lost_s / seconds.sum():.1%}"
        shape = f"{' '.join(read)} -> {' '.join(written)}"
        rows.append((lost_s, (kind, shape, str(len(found)), f"{1e3 * took_s:.3f}", *shown, *share)))
    rows.sort(key=lambda row: -row[0])
    columns = ("operator", "shapes", "times", "CPU ms", "GFLOPS", "GB/s", "of the model", "lost, ms", "lost, of it")
    title = (
        f"{name}: {1e3 * seconds.sum():.2f} ms of one core, peak {peak / 1e9:.0f} GFLOPS; lost is what the peak does "
        f"not explain (load average {os.getloadavg()[0]:.1f})"
    )
    return TextTable(title, columns, tuple(row for _, row in rows[:SHOWN]))


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape[1:] or shape))


_PEAK = """
typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
float run(long rounds, float factor) {
    vector sums[12];
    for (int i = 0; i < 12; i++) sums[i] = (vector){} + (float)i; /* equal ones would be computed once */
    for (long round = 0; round < rounds; round++)
        for (int i = 0; i < 12; i++) sums[i] = sums[i] * factor + factor;
    float total = 0;
    for (int i = 0; i < 12; i++) total += sums[i][0];
    return total;
}
"""


def peak_of_core(target: str) -> Callable[[], float]:
    """Return what measures the floating-point operations a second of independent multiply-adds in registers."""
    with tvm_target.Target(target):
        lanes = get_simd_32bit_lanes()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "peak.c", Path(folder) / "peak.so"
        source.write_text(_PEAK)
        options = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", f"-DVECTOR_BYTES={4 * lanes}")
        subprocess.run([get_cc(), *options, "-x", "c", source, "-o", library], check=True)
        run = ctypes.CDLL(str(library)).run
    run.argtypes, run.restype = (ctypes.c_long, ctypes.c_float), ctypes.c_float
    rounds = 2_000_000

    def measured() -> float:
        best_s = float("inf")
        for _ in range(7):
            begin_s = time.thread_time()
            run(rounds, 0.5)
            best_s = min(best_s, time.thread_time() - begin_s)
        return rounds * 12 * lanes * 2 / best_s

    return measured
