"""Find the best split of each instance of dnn-partitioning, and compare it with the published value.

    python benchmarks/dnn_partitioning.py                    # ../shared/suites/dnn-partitioning, where that exists
    python benchmarks/dnn_partitioning.py --folder FOLDER    # the throughput-inputs of a clone
    python benchmarks/dnn_partitioning.py --short            # the smallest instances, or one made here, for CI

The instances are those of Tarnawski et al. (NeurIPS 2020), https://github.com/msr-fiddle/dnn-partitioning. The values
beside ours are those that the dynamic program of that repository, commit b207b6a, computes; it does not finish
InceptionV3 within 45 s, and no value is stated of the training instances. Values are milliseconds for each sample, by
the cost model of the paper. `ideals` is the plan of that scheduler, from the costs that a Problem can express, in
the same model. Every split is judged again from its sets. Seconds are CPU seconds of one core, from the file to the
proven split, without compiling the loops. The exit status is 1 if a value of ours is larger than a published one.
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
from tvm_pipeline_papers.dnn_partitioning import Instance, best_split, read_instance

CONSOLE = Console(width=max(Console().width, 120))
SUITE = Path(__file__).parents[2] / "shared/suites/dnn-partitioning/throughput-inputs"
PUBLISHED_MS = {
    "LayerGraphs/bert24_inference": 17.7899,
    "LayerGraphs/gnmt_inference": 32.9107,
    "LayerGraphs/resnet50_inference": 33.7747,
    "OperatorGraphs/bert_l-3_inference": 27.9186,
    "OperatorGraphs/bert_l-6_inference": 29.5795,
    "OperatorGraphs/resnet50_inference": 124.3488,
}
SHORT = ("LayerGraphs/bert24_inference", "LayerGraphs/resnet50_inference")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=SUITE, help="JSON files, in folders or not")
    parser.add_argument("--short", action="store_true", help="the smallest instances, or one made here, for CI")
    args = parser.parse_args()
    files = {str(path.relative_to(args.folder).with_suffix("")): path for path in sorted(args.folder.rglob("*.json"))}
    temporary = tempfile.TemporaryDirectory()
    warming = chain(Path(temporary.name) / "chain.json")
    best_split(read_instance(warming))  # compiles the loops
    if args.short:
        files = {name: files[name] for name in SHORT if name in files} or {"chain": warming}
    if not files:
        sys.exit(
            f"no instances in {args.folder}: clone https://github.com/msr-fiddle/dnn-partitioning and give --folder"
        )
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
    if worse:
        sys.exit(f"worse than published, or than proven: {', '.join(worse)}")


if __name__ == "__main__":
    main()
