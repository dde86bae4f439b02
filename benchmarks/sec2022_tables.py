"""Tables I and III and Figures 10 and 11 of SEC 2022."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from math import isnan, nan

from edgetpu_model import as_tflite, frame_ms, graph_of, hub, published
from planner import ORDERS, keras, of_bytes, s, show, timed
from sec2022_instances import FRAMES, STRATEGIES, Keeper

from tvm_pipeline import merge_graphs, planning
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.simulate import simulate

SAID = published("sec2022-figures")


def table_1(short: bool) -> None:
    """Print both networks by the compiler's cuts and the exact ones, judged and simulated, with their errors."""
    rows = published("sec2022-table-1")["rows"][: 2 if short else None]
    errors: dict[str, list[float]] = {}
    lines = []
    for row in rows:
        graph = graph_of(row)
        problem = Problem(graph, hub(row["stages"]), unmeasured(graph), ORDERS[2], row["stages"])
        cells = [row["network"], row["stages"], f"{row['ms']:.1f}"]
        for what, scheduler in (("compiler", "even-parameters"), ("exact", "ideals")):
            stages = planning.plan(problem, scheduler).plan.stages
            fps = simulate(problem, stages, FRAMES).statistics.throughput_fps or nan
            for who, ms in (("judge", frame_ms(problem, stages)), ("simulator", 1e3 / fps)):
                errors.setdefault(f"{what}, {who}", []).append(ms / row["ms"] - 1)
                cells.append(f"{ms:.1f} {ms / row['ms'] - 1:+.0%}")
        lines.append(cells)
    show("Table I: ms a frame", ("network", "stages", "published", *errors), lines)
    means = {what: statistics.mean(map(abs, off)) for what, off in errors.items()}
    print(f"Mean error: {', '.join(f'{what} {mean:.1%}' for what, mean in means.items())}.\n")


def statistics_of(graph: OperatorGraph) -> tuple[int, int, int]:
    """Return the operators of a graph, its largest in-degree, and the edges of its longest path."""
    edges: list[int] = []
    for parents in graph.edges.before:
        edges.append(max((edges[parent] + 1 for parent in parents), default=0))
    return len(graph), max(map(len, graph.edges.before)), max(edges)


def table_3() -> None:
    """Print the size of each network's graph beside the paper's."""
    lines = []
    for row in published("sec2022-table-3")["rows"]:
        theirs, ours = (row["operators"], row["most_reads"], row["depth"]), statistics_of(keras(row["network"]))
        pairs = (f"{their} / {our}" for their, our in zip(theirs, ours, strict=True))
        lines.append((row["network"], *pairs, "equal" if theirs == ours else "different"))
    show("Table III: the paper / here", ("network", "V", "deg(V)", "depth, in edges", ""), lines)


def together(short: bool, limit_s: float, keeper: Keeper) -> None:
    """Print the simulated time of two models merged, by the paper's order, and how it falls with the stages."""
    said = SAID["co_deployment"]
    names = ("MobileNetV2", "Xception") if short else said["networks"]
    graphs = [as_tflite(keras(name)) for name in names]
    graph = merge_graphs(graphs, " + ".join(names))
    lines, first, last = [], nan, nan
    for stages in said["stages"][: 1 if short else None]:
        problem = Problem(
            graph, hub(stages), unmeasured(graph), "memory,dram,communication", stages, time_limit_s=limit_s
        )
        began = time.perf_counter()
        plan = keeper.plan(problem, "best")
        took_s = time.perf_counter() - began
        ms = {bus: _ms(replace(problem, platform=hub(stages, bus=bus)), plan) for bus in (True, False)}
        first = ms[True] if stages == said["stages"][0] else first
        in_proportion, fell = first * said["stages"][0] / stages, last - ms[True]
        last = ms[True]
        figures = (f"{(plan.predicted.memory_bytes or 0) / 1e6:.2f}", f"{(plan.predicted.dram_bytes or 0) / 1e6:.2f}")
        shares = " | ".join("+".join(str(n) for n in _shares(plan, names, stage)) for stage in range(stages))
        cells = (f"{ms[True]:.1f}", "" if isnan(fell) else f"{fell:.1f}", f"{in_proportion:.1f}", f"{ms[False]:.1f}")
        lines.append((stages, *figures, *cells, f"{plan.status} {plan.gap or 0:.1%}", s(took_s), shares))
    columns = (
        "stages",
        "memory, MB",
        "DRAM, MB",
        "hub, ms",
        "fell by",
        "if as 2 / stages",
        "own paths, ms",
        "status",
        "took",
    )
    title = f"Figure 11: {graph.name}, a frame of each; operators of each in the stages; the paper says: {said['said']}"
    show(title, (*columns, "operators"), lines)


def _shares(plan: Plan, names: tuple[str, ...], stage: int) -> list[int]:
    return [sum(name.startswith(f"{n}/") for name in plan.stages[stage].operators) for n in names]


def _ms(problem: Problem, plan: Plan) -> float:
    return 1e3 / (simulate(problem, plan.stages, FRAMES).statistics.throughput_fps or nan)


def solving(short: bool) -> None:
    """Print the seconds of the slowest of the three orders on the graphs of Table III, listing of downsets included."""
    said = SAID["solving"]
    counts = (2, 6) if short else range(2, 7)
    planning.plan(of_bytes(keras("ResNet50"), 2, ORDERS[0]), "ideals")  # compiles the loops
    lines, worst = [], 0.0
    for name in said["networks"][: 1 if short else None]:
        graph = keras(name)
        cells = []
        for stages in counts:
            slowest = max(timed(of_bytes(graph, stages, order), "ideals")[0] for order in ORDERS)
            worst = max(worst, slowest)
            cells.append(s(slowest))
        lines.append((name, len(graph), *cells))
    columns = ("network", "operators", *(f"{stages} stages" for stages in counts))
    title = f"Figure 10: seconds to solve and prove, the slowest of {', '.join(STRATEGIES.values())}"
    show(title, columns, lines)
    print(f"At most {s(worst)}; the paper, by CPLEX on another machine: within {said['at_most_s']} s.\n")
