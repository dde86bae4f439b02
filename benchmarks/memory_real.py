"""Measure by how much the order of least memory shrinks TFLite's arena and the storage of Relay stages, bit-exactly.

    python benchmarks/memory_real.py           # all parts, some minutes; NASNetMobile needs TensorFlow, once
    python benchmarks/memory_real.py --only tflite
    python benchmarks/memory_real.py --short   # the smallest of each, for CI

1. tflite: the arena of TFLite's interpreter, read from the addresses of its tensors, with the operators in the file's
   order and in that of `tvm_pipeline_edgetpu.ordering`; outputs on TFLite's own kernels and on XNNPACK's. Required of
   NASNetMobile, in int8 and in float: smaller, bit-exact. Its weights are random (`int8_models.py`).
2. relay: networks of `memory_networks.py` with real convolutions of random weights, few channels so that they build in
   seconds; the arena of the whole network as one stage, in the listed order and in that of least memory. Required of
   NASNet's and RandWire's: smaller, equal. Beside it what TVM's own graph executor plans, without and with the pass
   MemoryOrder.

3. shared: the arena of the whole network as one stage with what slices do by themselves, beside one in which each
   tensor has bytes of its own, so that every concatenation is a copy: in the listed order and in that of least memory.
   Outputs must be equal bit for bit. Beside it how many concatenations of how many are in place; the others copy.

Time is that of a frame in the new order over that in the old one: they take turns, the median of the rounds with the
smallest and the largest. The exit status is 1 if an output differs, or a required saving is missing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from graph_networks import DENSENET, SWIFTNET, profile_network, relay_network
from int8_models import MOBILENET, int8_model, random_model
from networks import load
from planner import s, show

from tvm_pipeline.backends.contract import Port
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support import memory_networks as networks

COLUMNS = ("network", "operators", "usual", "ordered", "ratio", "equal", "found in", "time")


def in_turns(one: Callable[[], Any], other: Callable[[], Any], rounds: int) -> str:
    """Return seconds of the second over those of the first: median, smallest and largest of the rounds."""
    ratios = []
    for round_ in range(rounds + 1):
        seconds = {}
        for run in (one, other) if round_ % 2 else (other, one):
            begin = time.perf_counter()
            run()
            seconds[run] = time.perf_counter() - begin
        ratios.append(seconds[other] / seconds[one])
    kept = ratios[1:]  # the first round warms up
    return f"{statistics.median(kept):.3f} ({min(kept):.2f}-{max(kept):.2f})"


def ratio(before: int, after: int) -> str:
    return f"{before / after:.3f}" if after else "-"


# TFLite


def interpreter(content: bytes, kernels: Any) -> Any:
    """Return an interpreter with an input of noise."""
    from ai_edge_litert.interpreter import Interpreter

    made = Interpreter(model_content=content, num_threads=1, experimental_op_resolver_type=kernels)
    made.allocate_tensors()
    for detail in made.get_input_details():
        made.set_tensor(detail["index"], noise(Port("", tuple(detail["shape"]), np.dtype(detail["dtype"]).name)))
    return made


def tflite_row(path: Path, rounds: int) -> tuple[list[str], bool, bool]:
    """Return the row, whether outputs are equal, and whether the arena is smaller."""
    from ai_edge_litert.interpreter import OpResolverType

    from tvm_pipeline_edgetpu.model import read_model
    from tvm_pipeline_edgetpu.ordering import arena_bytes, memory_ordered

    content = path.read_bytes()
    memory_ordered(content)  # loads what the search needs
    begin = time.perf_counter()
    ordered = memory_ordered(content)
    seconds = time.perf_counter() - begin
    equal, times = [], []
    for kernels in (OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, OpResolverType.BUILTIN):
        made = [interpreter(file, kernels) for file in (content, ordered)]
        times.append(in_turns(made[0].invoke, made[1].invoke, rounds))
        outputs = [[m.get_tensor(detail["index"]) for detail in m.get_output_details()] for m in made]
        equal.append(all(np.array_equal(one, other) for one, other in zip(*outputs, strict=True)))
    before, after = arena_bytes(content), arena_bytes(ordered)
    cells = [
        f"{len(read_model(path).graph)}",
        f"{before:,}",
        f"{after:,}",
        ratio(before, after),
        " ".join(map(str, equal)),
    ]
    return [path.stem, *cells, s(seconds), *times], all(equal), after < before


# Relay


def relay_row(graph: OperatorGraph, rounds: int) -> tuple[list[str], bool, bool]:
    """Return the row, whether outputs are equal, and whether the arena is smaller."""
    from tvm_pipeline.core.platform import Device
    from tvm_pipeline_tvm.host.detection import host_target
    from tvm_pipeline_tvm.host.host import bind
    from tvm_pipeline_tvm.relay.compiled import RelayModel

    model = relay_network(graph)
    device = Device("cpu0", "host", (0,), host_target())
    models = [RelayModel.compile(model, [device.target], bind, order) for order in ("listed", "memory")]
    compiled = models[0]
    operators = compiled.graph.operator_names
    bind(device)
    runs, arrays = [], []
    for compiled in models:
        compiled.cut(operators, device)  # loads what the search needs
        begin = time.perf_counter()
        before, after = compiled.activation_bytes(operators, device)
        seconds = time.perf_counter() - begin
        stage = compiled.stage(operators, device)
        outputs = [port.buffer() for port in stage.outputs]
        runs.append(partial(stage.run, [noise(port) for port in stage.inputs], outputs))
        arrays.append(outputs)
    times = in_turns(*runs, rounds)
    equal = all(np.array_equal(one, other) for one, other in zip(*arrays, strict=True))
    cells = [f"{len(operators)}", f"{before:,}", f"{after:,}", ratio(before, after), str(equal), s(seconds), times]
    planned = executor_bytes(model, device.target)
    return [graph.name, *cells, f"{planned[0]:,}", f"{planned[1]:,}", ratio(*planned)], equal, after < before


def executor_bytes(model: Model, target: str) -> tuple[int, int]:
    """Return the bytes that TVM's graph executor plans for the optimised network, and after MemoryOrder."""
    from tvm_pipeline_tvm.relay.fold import fast_context
    from tvm_pipeline_tvm.relay.importer import import_model
    from tvm_pipeline_tvm.relay.memory_order import MemoryOrder, planned_bytes

    from tvm import relay  # isort: skip

    mod, params = import_model(model)
    with fast_context():
        mod, params = relay.optimize(mod, target, params=params)
        ordered = MemoryOrder(params)(mod)
    return planned_bytes(relay.transform.InferType()(mod)), planned_bytes(ordered)


SHARED: dict[str, Callable[[], Model]] = {
    "SwiftNet": partial(profile_network, SWIFTNET / "swiftnet.json"),
    **{f"SwiftNet, cell {c.upper()}": partial(profile_network, SWIFTNET / f"swiftnet-cell-{c}.json") for c in "abc"},
    "DenseNet121": partial(profile_network, DENSENET),
    "InceptionV3": partial(load, "inception_v3"),
    "SqueezeNet": partial(load, "squeezenet"),
}


def shared_row(model: Model, rounds: int) -> tuple[list[str], bool, float]:
    """Return the row, whether outputs are equal, and the gain in the order of least memory."""
    from tvm_pipeline.core.platform import Device
    from tvm_pipeline_tvm.host.detection import host_target
    from tvm_pipeline_tvm.host.host import bind
    from tvm_pipeline_tvm.relay.compiled import RelayModel

    device = Device("cpu0", "host", (0,), host_target())
    listed = RelayModel.compile(model, [device.target], bind)
    ordered = RelayModel.compile(model, [device.target], bind, "memory")
    operators = listed.graph.operator_names
    bind(device)
    both = (listed, ordered)
    plans = [(one, one.plan_slice(operators, device, share=share)) for one in both for share in (False, True)]
    runs, arrays = [], []
    for compiled, plan in plans:
        stage = compiled.runnable_plan(plan, device)
        outputs = [port.buffer() for port in stage.outputs]
        runs.append(partial(stage.run, [noise(port) for port in stage.inputs], outputs))
        runs[-1]()
        arrays.append(outputs)
    times = [in_turns(runs[0], runs[1], rounds), in_turns(runs[0], runs[3], rounds)]
    equal = all(np.array_equal(one, other) for made in arrays[1:] for one, other in zip(arrays[0], made, strict=True))
    apart, together, apart_ordered, together_ordered = (plan.activation_bytes for _, plan in plans)
    cells = [f"{len(operators)}", f"{apart:,}", f"{together:,}", ratio(apart, together)]
    cells += [f"{apart_ordered:,}", f"{together_ordered:,}", ratio(apart_ordered, together_ordered)]
    in_place, copied = plans[1][1].concatenations
    return [*cells, f"{in_place} of {in_place + copied}", str(equal), *times], equal, apart_ordered / together_ordered


RELAY: dict[str, tuple[Callable[[], OperatorGraph], bool]] = {
    "RandWire stage": (partial(networks.randwire, seed=0, channels=32, size=16), True),
    "RandWire stage, seed 1": (partial(networks.randwire, seed=1, channels=32, size=16), True),
    "RandWire network": (partial(networks.randwire_network, seed=0, channels=16), True),
    "NASNet-A cell": (partial(networks.cell, networks.NASNET, 16, 28), False),
    "NASNet-A network": (partial(networks.cell_network, networks.NASNET, (1, 1, 1), 16, 64, 16), True),
    "DARTS cell": (partial(networks.cell, networks.DARTS, 16, 28), False),
    "PNASNet cell": (partial(networks.cell, networks.PNASNET, 16, 28), False),
}
SHORT = {"DARTS cell": (partial(networks.cell, networks.DARTS, 4, 14), True)}


def report_shared(short: bool, rounds: int) -> list[str]:
    """Print what sharing saves; return the networks whose outputs differ."""
    made = {name: partial(relay_network, make()) for name, (make, _) in RELAY.items()}
    chosen = {"SwiftNet, cell C": SHARED["SwiftNet, cell C"]} if short else {**made, **SHARED}
    rows, failed, gains = [], [], []
    for name, make in chosen.items():
        row, equal, gain = shared_row(make(), rounds)
        rows.append([name, *row])
        failed += [] if equal else [name]
        gains += [] if row[7].endswith(" of 0") else [gain]
    columns = ("network", "operators", "listed, apart", "shared", "ratio", "least, apart", "shared", "ratio")
    columns += ("concatenations in place", "equal", "time, listed", "time, least")
    show("What sharing bytes saves: the arena of a Relay network as one stage, bytes", columns, rows)
    if gains:
        print(f"geometric mean of those with concatenations, least memory: {statistics.geometric_mean(gains):.3f}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tflite", "relay", "shared"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--short", action="store_true", help="the smallest of each, for CI")
    arguments = parser.parse_args()
    rounds = 3 if arguments.short else arguments.rounds
    failed = []
    if arguments.only in (None, "tflite"):
        required = {} if arguments.short else {random_model("nasnet_mobile", kind): True for kind in ("int8", "float")}
        others = [MOBILENET] if arguments.short else [MOBILENET, int8_model("inception_v3")]
        rows = []
        for path, must_shrink in (required | dict.fromkeys(others, False)).items():
            row, equal, smaller = tflite_row(path, rounds)
            rows.append(row)
            failed += [path.stem] if not equal or (must_shrink and not smaller) else []
        show(
            "TFLite's arena, bytes; equal and time on TFLite's kernels and on XNNPACK's",
            (*COLUMNS, "time, XNNPACK"),
            rows,
        )
    if arguments.only in (None, "relay"):
        rows = []
        for name, (make, must_shrink) in (SHORT if arguments.short else RELAY).items():
            row, equal, smaller = relay_row(replace(make(), name=name.replace(" ", "_")), rounds)
            rows.append([name, *row[1:]])
            failed += [name] if not equal or (must_shrink and not smaller) else []
        planner = ("TVM's plan", "MemoryOrder", "ratio")
        show("A Relay network as one stage: its arena, bytes", (*COLUMNS, *planner), rows)
    if arguments.only in (None, "shared"):
        failed += report_shared(arguments.short, rounds)
    if failed:
        sys.exit(f"not as it must be: {', '.join(failed)}")


if __name__ == "__main__":
    main()
