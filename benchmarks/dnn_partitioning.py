"""Find the best split of each instance of dnn-partitioning, and compare it with the published value.

    python benchmarks/dnn_partitioning.py                    # ../shared/suites/dnn-partitioning, where that exists
    python benchmarks/dnn_partitioning.py --folder FOLDER    # a clone, or its throughput-inputs or latency-inputs
    python benchmarks/dnn_partitioning.py --only latency     # or throughput
    python benchmarks/dnn_partitioning.py --short            # the smallest instances, or one made here, for CI

The instances are those of Tarnawski et al. (NeurIPS 2020), https://github.com/msr-fiddle/dnn-partitioning. The values
beside ours are those that the dynamic program of that repository, commit b207b6a, computes; it does not finish
InceptionV3 within 45 s, and no value is stated of the training instances. Values are milliseconds for each sample, by
the cost model of the paper. `ideals` is the plan of that scheduler, from the costs that a Problem can express, in
the same model. Every split is judged again from its sets. Seconds are CPU seconds of one core, from the file to the
proven split, without compiling the loops.

The values of the second table are the milliseconds of one sample. We know no published values: no file of the
repository has one, and its program for them, an ILP, stops at a gap of 1 % or after an hour. Where the folder has no
latency-inputs, they are made of the throughput-inputs: the limits differ, and the costs of LayerGraphs are 1000 times
as high.

The exit status is 1 if a value of ours is larger than a published one, or than stated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tvm_pipeline import plan
from tvm_pipeline_papers.dnn_inference import Inference, read_inference
from tvm_pipeline_papers.dnn_latency import least_latency
from tvm_pipeline_papers.dnn_partitioning import Instance, best_split, read_instance

CONSOLE = Console(width=max(Console().width, 120))
SUITE = Path(__file__).parents[2] / "shared/suites/dnn-partitioning"
PUBLISHED_MS = {
    "LayerGraphs/bert24_inference": 17.7899,
    "LayerGraphs/gnmt_inference": 32.9107,
    "LayerGraphs/resnet50_inference": 33.7747,
    "OperatorGraphs/bert_l-3_inference": 27.9186,
    "OperatorGraphs/bert_l-6_inference": 29.5795,
    "OperatorGraphs/resnet50_inference": 124.3488,
}
SHORT = ("LayerGraphs/bert24_inference", "LayerGraphs/resnet50_inference")
# The accelerators of the latency-inputs, and the bytes of each.
LIMITS = {
    "LayerGraphs/bert24_inference": (5, 600 << 20),
    "LayerGraphs/gnmt_inference": (6, 600 << 20),
    "LayerGraphs/inceptionv3_inference": (12, 2 << 30),
    "LayerGraphs/resnet50_inference": (14, 2 << 30),
    "OperatorGraphs/bert_l-12_inference": (8, 2 << 30),
    "OperatorGraphs/bert_l-3_inference": (4, 600 << 20),
    "OperatorGraphs/bert_l-6_inference": (6, 600 << 20),
    "OperatorGraphs/resnet50_inference": (9, 600 << 20),
}


def chain(path: Path) -> Path:
    """Write an instance of four nodes, whose best split is two and two."""
    node = {"supportedOnFpga": 1, "cpuLatency": 30, "fpgaLatency": 3, "isBackwardNode": 0, "size": 1}
    nodes = [{**node, "id": number, "colorClass": number} for number in range(4)]
    edges = [{"sourceId": number, "destId": number + 1, "cost": 1} for number in range(3)]
    limits = {"maxSizePerFPGA": 4, "maxFPGAs": 2, "maxCPUs": 1}
    path.write_text(json.dumps({**limits, "nodes": nodes, "edges": edges}))
    return path


def judged_ms(instance: Instance, stages: list[tuple[str, tuple[str, ...]]]) -> float:
    return 1e3 * max(instance.load_s(device, operators) for device, operators in stages)


def files_of(folder: Path, inputs: str) -> dict[str, Path]:
    """Return the files by their names. The folder is a clone or in one; any other one has throughput-inputs."""
    inside = folder / inputs if (folder / inputs).is_dir() else folder
    of_latency = "latency-inputs" in inside.resolve().parts
    found = sorted(inside.rglob("*.json")) if of_latency == (inputs == "latency-inputs") else []
    return {str(path.relative_to(inside).with_suffix("")): path for path in found}


def latency_instance(path: Path, name: str) -> Inference:
    """Read an instance for latency, or make it of one for throughput."""
    instance = read_inference(path)
    if "latency-inputs" in path.resolve().parts or name not in LIMITS:
        return instance
    accelerators, memory_bytes = LIMITS[name]
    scale = 1e3 if name.startswith("LayerGraphs") else 1.0
    cost_ms = tuple(scale * cost for cost in instance.cost_ms)
    return replace(instance, accelerators=accelerators, memory_bytes=memory_bytes, cost_ms=cost_ms)


def compare_loads(files: dict[str, Path]) -> list[str]:
    """Print the largest loads, and return the instances where ours is larger than published, or than proven."""
    table = Table(title="The largest load of the best split, in ms a sample", title_justify="left")
    for column in ("instance", "operators", "published", "ours", "bound", "status", "CPU seconds", "ideals"):
        table.add_column(column, justify="left" if column in ("instance", "status") else "right")
    worse = []
    for name, path in files.items():
        begin = time.process_time()
        instance = read_instance(path)
        split = best_split(instance)
        seconds = time.process_time() - begin
        ours, bound, published = judged_ms(instance, list(split.stages)), 1e3 * split.load_s, PUBLISHED_MS.get(name)
        if ours > bound * (1 + 1e-9) or (published is not None and ours > published + 1e-4):
            worse.append(name)
        found = plan(replace(instance.problem, time_limit_s=10), "ideals").plan
        by_ideals = judged_ms(instance, [(stage.devices[0], stage.operators) for stage in found.stages])
        figures = (f"{published:.4f}" if published else "", f"{ours:.4f}", f"{bound:.4f}", "optimal", f"{seconds:.2f}")
        table.add_row(name, str(len(instance.problem.graph)), *figures, f"{by_ideals:.2f}")
    CONSOLE.print(table)
    return worse


def compare_latencies(files: dict[str, Path], title: str) -> list[str]:
    """Print the latencies and their bounds, and return the instances where a split takes longer than stated."""
    table = Table(title=title, title_justify="left")
    for column in ("instance", "nodes", "ours", "bound", "gap, %", "accelerators", "CPU seconds"):
        table.add_column(column, justify="left" if column == "instance" else "right")
    worse = []
    for name, path in files.items():
        begin = time.process_time()
        instance = latency_instance(path, name)
        split = least_latency(instance)
        seconds = time.process_time() - begin
        ours = instance.latency_ms(split.accelerators)
        if ours > split.latency_ms * (1 + 1e-9):
            worse.append(name)
        gap = 100 * (ours / split.bound_ms - 1) if split.bound_ms else 0.0
        used = f"{len(split.accelerators)} of {instance.accelerators}"
        figures = (f"{ours:.4f}", f"{split.bound_ms:.4f}", f"{gap:.2f}", used, f"{seconds:.2f}")
        table.add_row(name, str(len(instance.ids)), *figures)
    CONSOLE.print(table)
    return worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=SUITE, help="JSON files, in folders or not")
    parser.add_argument("--only", choices=("throughput", "latency"), help="one of the tables")
    parser.add_argument("--short", action="store_true", help="the smallest instances, or one made here, for CI")
    args = parser.parse_args()
    loads, latencies = files_of(args.folder, "throughput-inputs"), files_of(args.folder, "latency-inputs")
    title = "The least latency of one sample, in ms"
    if not latencies:
        latencies = {name: path for name, path in loads.items() if name in LIMITS}
        title += "; instances made of those for throughput"
    temporary = tempfile.TemporaryDirectory()
    warming = chain(Path(temporary.name) / "chain.json")
    best_split(read_instance(warming))  # compiles the loops
    least_latency(read_inference(warming))
    if args.short:
        loads = {name: loads[name] for name in SHORT if name in loads} or {"chain": warming}
        latencies = {name: latencies[name] for name in SHORT[:1] if name in latencies} or {"chain": warming}
    loads, latencies = loads if args.only != "latency" else {}, latencies if args.only != "throughput" else {}
    if not loads and not latencies:
        sys.exit(
            f"no instances in {args.folder}: clone https://github.com/msr-fiddle/dnn-partitioning and give --folder"
        )
    worse = compare_loads(loads) if loads else []
    worse += compare_latencies(latencies, title) if latencies else []
    if worse:
        sys.exit(f"worse than published, or than proven: {', '.join(worse)}")


if __name__ == "__main__":
    main()
