"""Measure how the planner's time grows with the operators, with the stages, and with devices that all differ.

    python benchmarks/planner_growth.py           # some minutes; writes docs/planner_growth.png
    python benchmarks/planner_growth.py --short   # small sizes; the plot goes to a temporary folder

Each time is one call, the listing of the downsets included, and each plan is proven optimal. A line of slope 1 stands
beside, to show where time is proportional; where a curve of the second panel passes four seconds it ends.
Next: `planner.py`, the figures at single sizes.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from planner import ROOT, coral, equal_devices, of_bytes, s, show, timed, unequal

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support import generators

Points = dict[int, float]

# A curve ends behind the first point above this: it may grow exponentially.
MOST_S = 4.0


@dataclass
class Panel:
    """Curves of seconds against one thing that grows."""

    title: str
    across: str
    curves: dict[str, Points]


def of_throughput(graph: OperatorGraph, stages: int) -> Problem:
    """Plan on as many Edge TPUs over PCIe as there are stages."""
    model = coral(1).devices[0].model
    devices = tuple(replace(device, model=model) for device in equal_devices(stages).devices)
    return Problem(graph, Platform("equal", devices), unmeasured(graph), stages=stages)


def measured(problem: Problem) -> float:
    seconds, plan = timed(problem, "ideals")
    if plan.status != "optimal":
        raise SystemExit(f"{problem.graph.name}, {problem.objective}, {problem.stages} stages: not proven optimal")
    return seconds


OBJECTIVES: dict[str, Callable[[OperatorGraph, int], Problem]] = {
    "memory, communication": lambda graph, k: of_bytes(graph, k, "memory,communication"),
    "dram, memory, communication": lambda graph, k: of_bytes(graph, k, "dram,memory,communication"),
    "throughput": of_throughput,
}


def by_operators(sizes: list[int]) -> Panel:
    curves: dict[str, Points] = defaultdict(dict)
    for size in sizes:
        for shape, graph in (
            ("transformer", generators.transformer_of(size)),
            ("chain", generators.chain(random.Random(0), size)),
        ):
            for name, make in OBJECTIVES.items():
                curves[f"{shape}: {name}"][size] = measured(make(graph, 6))
    return Panel("6 equal devices", "operators (of a transformer the nearest number)", curves)


def by_stages(counts: list[int], operators: int) -> Panel:
    graph = generators.transformer_of(operators)
    curves: dict[str, Points] = {}
    for name, make in OBJECTIVES.items():
        points = curves[name] = {}
        for k in counts:
            points[k] = measured(make(graph, k))
            if points[k] > MOST_S:
                break
    return Panel(f"transformer of {len(graph)} operators", "stages, on equal devices", curves)


def by_devices(counts: list[int], operators: int) -> Panel:
    curves: dict[str, Points] = defaultdict(dict)
    graph = generators.chain(random.Random(0), operators)
    for count in counts:
        problem = unequal(random.Random(count), graph, count)
        seconds, plan = timed(problem, "ideals")
        curves["throughput, once each"][count] = seconds
        limited = replace(problem, objective="energy", min_throughput_fps=0.5 * (plan.value or (0.0,))[0])
        curves["energy, half of the best throughput"][count] = measured(limited)
        curves["latency, again and again"][count] = measured(replace(problem, objective="latency"))
    return Panel(f"chain of {operators} operators", "devices, all different", curves)


def draw(panels: list[Panel], path: Path) -> None:
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.5), dpi=72, layout="constrained")
    for panel, axis in zip(panels, axes, strict=True):
        for index, (name, points) in enumerate(panel.curves.items()):
            style = "--" if name.startswith("chain") else "-"
            color = f"C{index % len(OBJECTIVES)}"
            axis.loglog(list(points), list(points.values()), style, color=color, marker="o", markersize=4, label=name)
        positions = sorted({position for points in panel.curves.values() for position in points})
        least = min(min(points.values()) for points in panel.curves.values())
        linear = [least / 2 * position / positions[0] for position in (positions[0], positions[-1])]
        axis.loglog([positions[0], positions[-1]], linear, ":", color="gray", label="slope 1")
        if positions[-1] < 100:
            axis.set_xticks(positions, map(str, positions))
            axis.minorticks_off()
        axis.set(title=panel.title, xlabel=panel.across, ylabel="seconds to the proven optimum")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left")
    path.parent.mkdir(exist_ok=True)
    # No date and no version, so that the file changes with its figures alone.
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="small sizes, and the plot to a temporary folder")
    args = parser.parse_args()
    if args.short:
        panels = [by_operators([30, 60]), by_stages([2, 3], 30), by_devices([1, 2], 20)]
    else:
        small = generators.transformer_of(100)
        for make in OBJECTIVES.values():
            measured(make(small, 4))
        by_devices([3], 30)  # all compiled loops are loaded now
        sizes = [100, 300, 1000, 3000, 10_000, 25_000, 50_000]
        panels = [
            by_operators(sizes),
            by_stages([2, 3, 4, 6, 8, 12, 16, 24, 32], 10_000),
            by_devices(list(range(1, 9)), 800),
        ]
    for panel in panels:
        positions = sorted({position for points in panel.curves.values() for position in points})
        rows = [
            (name, *(s(points[position]) if position in points else "" for position in positions))
            for name, points in panel.curves.items()
        ]
        show(f"{panel.title}: seconds by {panel.across}", (panel.across, *map(str, positions)), rows)
    if args.short:
        with tempfile.TemporaryDirectory() as folder:
            draw(panels, Path(folder) / "planner_growth.png")
        return
    path = ROOT / "docs" / "planner_growth.png"
    draw(panels, path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
