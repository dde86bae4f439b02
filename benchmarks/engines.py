"""Engines that compete for each stage, interleaved with TVM alone, OpenVINO and onnxruntime: one file, the same cores.

    python benchmarks/engines.py                               # the networks of peers.py, all cores
    python benchmarks/engines.py --cores 1                     # one core
    python benchmarks/engines.py --models squeezenet mobilenet
    python benchmarks/engines.py --only cuts                   # ten networks in two stages by two engines
    python benchmarks/engines.py --only overhead               # what a stage takes beyond the engine's own call
    python benchmarks/engines.py --short                       # a small network for each of the three, for CI

Ours is the plan that `compile --engines tvm,openvino,onnxruntime` chooses and verifies, TVM alone that of
`--engines tvm`. OpenVINO and onnxruntime run in separate processes, each in its best setting, as in peers.py,
which says what a ratio is. Both are those of this environment. The exit status is 1 where outputs differ by
more than 1e-3 of the largest value, also behind a cut, or where a stage that was cut fails.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from networks import HAS_RELAY, MODELS, load_lively
from peer_engines import SETTINGS
from peers import (
    CONSOLE,
    LIMIT,
    NETWORKS,
    Ours,
    Peer,
    Race,
    chosen_plan,
    host_platform,
    network_file,
    save_inputs,
    summary,
)
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import Device, Pipeline, Plan, Prediction, Stage, settle_platform
from tvm_pipeline.backends.contract import StageRunner
from tvm_pipeline.backends.ports import Array, Port, frame_of_noise, noise
from tvm_pipeline.core.plan import describe
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.frontends import load
from tvm_pipeline.runtime.comparison import in_turn
from tvm_pipeline.runtime.verification import VERIFY_S
from tvm_pipeline.workflow.engines import with_engines
from tvm_pipeline.workflow.steps import REPEATS, compile_source

ENGINES = ("tvm", "openvino", "onnxruntime")
SMALLER = ("squeezenet", "mobilenet", "resnet-18", "resnet-50", "densenet-121")  # of 64 pixels, where Relay is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="as in peers.py; by default its networks, for cuts ten")
    parser.add_argument(
        "--cores", type=int, default=len(os.sched_getaffinity(0)), help="the last so many of those here"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--short", action="store_true", help="one small network, briefly: proves that it works")
    parser.add_argument("--only", choices=("race", "cuts", "overhead"), help="this part; the first one without")
    options = parser.parse_args()
    right = True
    if options.short:
        options.models, options.rounds, options.seconds, options.cores = ["branching"], 2, 0.05, 1
    if options.short or options.only == "cuts":
        full = [f"{name}@64" if HAS_RELAY and name in SMALLER else name for name in MODELS]
        right = cuts(options.models or full, 1 if options.short else 20)
    if options.short or options.only == "overhead":
        overhead(5 if options.short else 2000)
    if options.only in (None, "race"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
        races = []
        for name in options.models or NETWORKS:
            races.append(race(name, options))
            CONSOLE.print(races[-1].table())
        CONSOLE.print(summary(races))
        right = right and all(each.agrees for each in races)
    raise SystemExit(not right)


def race(name: str, options: argparse.Namespace) -> Race:
    """Choose both plans, then run them interleaved with the peers."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as opened:
        model, (_, host) = load_lively(name), host_platform()
        file = network_file(model, Path(temporary))
        if model.format != "onnx":
            model = load(file)
        frame = [noise(Port.of(tensor)) for tensor in model.inputs]
        save_inputs(file, frame)
        settings: list[Ours | Peer] = []
        for engine, engines in (("ours", "tvm,openvino,onnxruntime"), ("TVM alone", "tvm")):
            backend, platform = settle_platform(with_engines(host, engines))
            compiled = opened.enter_context(closing(backend.compile(model, platform.devices)))
            plan = chosen_plan(
                f"{name}, {engines}", compiled, platform, *((0.05, 4) if options.short else (VERIFY_S, REPEATS))
            )
            settings.append(opened.enter_context(closing(Ours(describe(plan), compiled, plan, platform, frame))))
            settings[-1].engine = engine
        for engine in ("OpenVINO", "onnxruntime"):
            for setting in SETTINGS[engine][: 1 if options.cores == 1 else None]:
                peer = Peer(engine, setting, options.cores, file, Path(sys.executable))
                settings.append(opened.enter_context(closing(peer)))
        turns = [[] for _ in settings]
        for round_ in range(options.rounds):
            for index in in_turn(range(len(settings)), round_):
                turns[index].append(settings[index].take_turn(options.seconds))
        return Race(name, settings, turns, exact=True)


def cuts(names: Sequence[str], count: int) -> bool:
    """Run networks in two stages on each pair of engines, and compare with the uncut network on the first of them."""
    pairs = list(combinations(ENGINES, 2))
    table = Table("network", *map(" | ".join, pairs), title="Cuts that ran, their largest difference over the value")
    right, draw = True, random.Random(5)
    for name in names:
        cells = []
        for pair in pairs:
            apart, failed = cut_between(name, pair, count, draw)
            largest = max(apart, default=0.0)
            right = right and not failed and largest <= LIMIT
            cells.append("; ".join([f"{len(apart)} of {count}, {largest:.1e}", *failed[:1]]))
        table.add_row(name, *cells)
        CONSOLE.print(table)
    return right


def cut_between(name: str, pair: tuple[str, str], count: int, draw: random.Random) -> tuple[list[float], list[str]]:
    """Return how far each cut is off, and why stages failed."""
    worst, failed = [], []
    with tempfile.TemporaryDirectory() as temporary:
        model = load_lively(name)
        source = model if model.format == "onnx" else network_file(model, Path(temporary))
        made = compile_source(source, engines=",".join(pair))
    with closing(made.compiled) as compiled:
        names = compiled.graph.operator_names
        single = [device for device in made.platform.devices if len(device.cores) == 1]
        by_engine = [[device for device in single if engine_of(device) == engine] for engine in pair]
        first, second = by_engine[0][0], by_engine[1][-1]
        frame = frame_of_noise(compiled.graph)

        def outputs(*stages: Stage) -> dict[str, Array]:
            plan = Plan(compiled.graph.name, "by hand", "throughput", stages, Prediction())
            with Pipeline(compiled, plan, made.platform) as pipeline:
                [result] = pipeline.map([frame])
                return {name: array.copy() for name, array in result.outputs.items()}

        expected = outputs(Stage((first.name,), tuple(names)))
        for _ in range(count):
            cut = draw.randrange(1, len(names))
            try:
                found = outputs(Stage((first.name,), tuple(names[:cut])), Stage((second.name,), tuple(names[cut:])))
            except PipelineError as error:
                failed.append(f"cut {cut}: {error}")
                continue
            pairs = [(found[name], array) for name, array in expected.items()]
            worst.append(max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs))
    return worst, failed


def engine_of(device: Device) -> str:
    return "tvm" if device.backend == "host" else device.backend


def overhead(runs: int) -> None:
    """Time a stage that does little, beside the engine's own call of the same request, in turns."""
    table = Table("engine", "stage, us", "its own call, us", "more, us", title="One core, medians")
    for engine in ("openvino", "onnxruntime"):
        with tempfile.TemporaryDirectory() as temporary:
            made = compile_source(write_picture_net(Path(temporary) / "net.onnx"), engines=engine)
        device = next(device for device in made.platform.devices if len(device.cores) == 1)
        with closing(made.compiled) as compiled, ThreadPoolExecutor(1) as bound:
            runner = compiled.stage(compiled.graph.operator_names, device)
            with closing(runner):
                stage_us, own_us = bound.submit(timed, runner, runs).result()
        table.add_row(engine, f"{stage_us:.1f}", f"{own_us:.1f}", f"{stage_us - own_us:.1f}")
    CONSOLE.print(table)


def timed(runner: StageRunner, runs: int) -> list[float]:
    """Return the median microseconds of a stage, and of the engine's own call."""
    runner.bind()
    inputs, outputs = [noise(port) for port in runner.inputs], [port.buffer() for port in runner.outputs]
    calls = partial(runner.run, inputs, outputs), own_call(runner, inputs, outputs)
    found = np.empty((runs, len(calls)))
    for row in found:
        for column, call in enumerate(calls):
            began = time.perf_counter()
            call()
            row[column] = time.perf_counter() - began
    return [float(median) * 1e6 for median in np.median(found, axis=0)]


def own_call(runner: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> Callable[[], object]:
    """Return what runs the request of a stage, whose tensors are bound already."""
    if hasattr(runner.made, "infer"):  # OpenVINO
        runner.run(inputs, outputs)
        return partial(runner.made.infer, share_inputs=True)
    binding = runner.made.io_binding()
    for port, array in zip(runner.inputs, inputs, strict=True):
        binding.bind_cpu_input(port.name, array)
    for port, array in zip(runner.outputs, outputs, strict=True):
        binding.bind_output(port.name, "cpu", 0, array.dtype, port.shape, array.ctypes.data)
    return partial(runner.made.run_with_iobinding, binding)


if __name__ == "__main__":
    main()
