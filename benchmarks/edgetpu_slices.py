"""Measure whether slices of a .tflite for Edge TPUs are exact, how fast they are made, and how much larger they are.

    python benchmarks/edgetpu_slices.py           # four networks of 8 bits, 224 cuts, some minutes; needs TensorFlow
    python benchmarks/edgetpu_slices.py --short   # MobileNetV2 only, for CI

Random legal assignments of operators to two to eight stages: a random order in which the operators can run, cut at
random positions. Each slice reads, by name, the outputs of those before it, and every tensor that crosses a cut or
leaves the model is compared bit for bit with the whole file on the same kernels: TFLite's own and, apart, XNNPACK's,
which differ among themselves. The exit status is 1 if one differs. Required: none of at least 200 cuts, slicing in less
than 0.5 s, less than 0.5 % of overhead. ResNet50 and InceptionV3 have random weights (`int8_models.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from int8_models import NAMES, int8_model
from planner import CONSOLE, show

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.graphs import random_order
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline_edgetpu.model import TfliteModel, indices, read_model
from tvm_pipeline_edgetpu.slicer import slice_model

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]
Arrays = Mapping[str, np.ndarray]

KERNELS = {"TFLite": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, "XNNPACK": OpResolverType.BUILTIN}
STAGES = range(2, 9)


def random_stages(graph: OperatorGraph, draw: random.Random, count: int) -> list[Stage]:
    """Return a random legal assignment, also of operators that are not neighbours in the file."""
    order = random_order(draw, graph)
    cuts = [0, *sorted(draw.sample(range(1, len(order)), count - 1)), len(order)]
    return [Stage((f"tpu{index}",), tuple(order[a:b])) for index, (a, b) in enumerate(pairwise(cuts))]


def exposing(model: TfliteModel) -> bytes:
    """Return the file with every tensor among its outputs, since a delegate such as XNNPACK keeps no others."""
    parsed, subgraph = copy(model.parsed), copy(model.parsed.subgraphs[0])
    written = [index for operator in subgraph.operators for index in indices(operator.outputs)]
    subgraph.outputs = list(dict.fromkeys([*indices(subgraph.outputs), *written]))
    parsed.subgraphs = [subgraph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(parsed.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def run(content: bytes, feeds: Arrays, kernels: OpResolverType) -> dict[str, np.ndarray]:
    """Return the outputs of a file, by name."""
    interpreter = Interpreter(model_content=content, num_threads=1, experimental_op_resolver_type=kernels)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], feeds[detail["name"]])
    interpreter.invoke()
    return {detail["name"]: interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()}


def duplicated_bytes(model: TfliteModel, stages: list[Stage]) -> int:
    """Return the bytes of constants that several stages read, which are in the slice of each."""
    subgraph = model.parsed.subgraphs[0]
    reads = {
        described.name: {subgraph.tensors[index].buffer for index in indices(operator.inputs) if index != -1}
        for operator, described in zip(subgraph.operators, model.graph.operators, strict=True)
    }
    holders = Counter(
        buffer for stage in stages for buffer in {buffer for name in stage.operators for buffer in reads[name]}
    )
    sizes = {buffer: model.parsed.buffers[buffer].data for buffer in holders}
    return sum((count - 1) * len(sizes[buffer]) for buffer, count in holders.items() if sizes[buffer] is not None)


def is_scattered(graph: OperatorGraph, stage: Stage) -> bool:
    """Return whether operators of other stages are between those of this one in the file."""
    indices = [index for index, operator in enumerate(graph.operators) if operator.name in set(stage.operators)]
    return indices[-1] - indices[0] >= len(indices)


def noise(graph: OperatorGraph, frames: int) -> list[dict[str, np.ndarray]]:
    """Return inputs of the model: noise over the whole range of their types."""
    rng = np.random.default_rng(0)
    return [
        {t.name: rng.integers(0, 256, t.shape).astype(np.uint8).view(t.dtype) for t in graph.inputs}
        for _ in range(frames)
    ]


def differing(content: bytes, exposed: Arrays, feeds: Arrays, kernels: OpResolverType) -> int:
    """Return the outputs of the file that differ from those of the file with every tensor exposed."""
    return sum(not np.array_equal(value, exposed[name]) for name, value in run(content, feeds, kernels).items())


def measure(name: str, cuts: int, frames: int) -> Row:
    """Return all figures of one network: exactness over `cuts` random cuts, seconds, sizes."""
    file = int8_model(name)
    begin = time.perf_counter()
    model = read_model(file)
    read_s = time.perf_counter() - begin
    content, draw, feeds = file.read_bytes(), random.Random(0), noise(model.graph, frames)
    exposed = exposing(model)
    whole = {kind: [run(exposed, feed, how) for feed in feeds] for kind, how in KERNELS.items()}
    differ = {kind: differing(content, whole[kind][0], feeds[0], how) for kind, how in KERNELS.items()}
    seconds, growths, apart, inputs, scattered, compared = [], [], [], [], 0, 0
    for case in range(cuts):
        stages = random_stages(model.graph, draw, STAGES[case % len(STAGES)])
        begin = time.perf_counter()
        slices = slice_model(model, stages)
        seconds.append(time.perf_counter() - begin)
        growth = sum(len(part.content) for part in slices) - len(content)
        growths.append(growth / len(content))
        apart.append((growth - duplicated_bytes(model, stages)) / len(content))
        inputs.append(max(len(part.inputs) for part in slices))
        scattered += any(is_scattered(model.graph, stage) for stage in stages)
        for kind, how in KERNELS.items():
            known = dict(feeds[case % frames])
            for part in slices:
                made = run(part.content, known, how)
                expected = whole[kind][case % frames]
                differ[kind] += sum(not np.array_equal(value, expected[name]) for name, value in made.items())
                compared += len(made)
                known |= made
    return {
        "model": name,
        "operators": len(model.graph),
        "cuts": cuts,
        "scattered": scattered,
        "most_inputs": max(inputs),
        "tensors_compared": compared,
        "tensors_that_differ": differ,
        "constant_tensors": sum(int(value.min() == value.max()) for value in whole["TFLite"][0].values()),
        "read_s": read_s,
        "slice_median_s": statistics.median(seconds),
        "slice_worst_s": max(seconds),
        "overhead_median": statistics.median(growths),
        "overhead_worst": max(growths),
        "overhead_worst_without_shared": max(apart),
    }


EXACTNESS: Columns = {
    "model": lambda r: r["model"],
    "operators": lambda r: str(r["operators"]),
    "cuts": lambda r: str(r["cuts"]),
    "out of file order": lambda r: str(r["scattered"]),
    "most inputs": lambda r: str(r["most_inputs"]),
    "tensors compared": lambda r: str(r["tensors_compared"]),
    "differ, TFLite": lambda r: str(r["tensors_that_differ"]["TFLite"]),
    "XNNPACK": lambda r: str(r["tensors_that_differ"]["XNNPACK"]),
    "of one value": lambda r: str(r["constant_tensors"]),
}
COSTS: Columns = {
    "model": lambda r: r["model"],
    "read (ms)": lambda r: f"{1e3 * r['read_s']:.0f}",
    "cut, median (ms)": lambda r: f"{1e3 * r['slice_median_s']:.0f}",
    "worst": lambda r: f"{1e3 * r['slice_worst_s']:.0f}",
    "overhead, median": lambda r: f"{r['overhead_median']:+.3%}",
    "most": lambda r: f"{r['overhead_worst']:+.3%}",
    "most, without shared constants": lambda r: f"{r['overhead_worst_without_shared']:+.3%}",
}


def cells(columns: Columns, rows: list[Row]) -> list[list[str]]:
    return [[cell(row) for cell in columns.values()] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--cuts", type=int, default=56, help="of each model")
    parser.add_argument("--short", action="store_true", help="a few cuts of MobileNetV2, for CI")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()
    models, cuts, frames = (["mobilenet_v2"], 7, 1) if arguments.short else (arguments.models, arguments.cuts, 3)
    rows = [measure(name, cuts, frames) for name in models]
    show("Cuts against the whole file, bit for bit, on the same kernels", list(EXACTNESS), cells(EXACTNESS, rows))
    show("What cutting costs; required: < 500 ms, < 0.5 %", list(COSTS), cells(COSTS, rows))
    different = sum(sum(row["tensors_that_differ"].values()) for row in rows)
    CONSOLE.print(f"{sum(row['cuts'] for row in rows)} cuts, {different} tensors that differ")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
