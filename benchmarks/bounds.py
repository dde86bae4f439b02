"""Measure the gap that `best` states where the downsets of a graph are too many to list.

    python benchmarks/bounds.py                 # all parts, some 25 minutes
    python benchmarks/bounds.py --only nasnets  # one of nasnets, large, gap-over-time
    python benchmarks/bounds.py --short         # a little of each, for CI

1. nasnets: NASNet-A fused and fine-grained, NASNetMobile and NASNetLarge in 4, 6 and 8 stages on as many modelled Edge
   TPUs over PCIe, 30 s each: the plan, its gap by the bound, and the gap by the mean load per stage alone.
2. large: a random graph of 100 000 operators on 16 equal devices and on 16 unequal ones, with a limit of 10 s.
3. gap-over-time: the gap with limits of 1, 3, 10 and 30 s, for NASNet and for networks of RandWire WS(64) by seed, on 4
   and 8 modelled Edge TPUs; and, for information, the fine-grained NASNet on 8 unequal devices.

RandWire comes with an operator for each node, as the paper's small regime for ImageNet, and with all its operators for
CIFAR. The loops are compiled before. The seconds are of one core; on a machine with other work a gap is wider.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks.planner and tests.support

from benchmarks.planner import FIGURES, ROOT, coral, figure, run_parts, s, show, unequal
from tests.support import generators, memory_networks
from tvm_pipeline import planning
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.planning.local.bounds import lower_bound

NETWORKS = {
    "NASNet-A, fused": partial(generators.nasnet, fused=True),
    "NASNet-A, fine": generators.nasnet,
    "NASNetMobile": partial(read_graph, ROOT / "profiles/tflite/NASNetMobile.json"),
    "NASNetLarge": partial(read_graph, ROOT / "profiles/tflite/NASNetLarge.json"),
}

SHORT = {"NASNet-A, one cell, fused": partial(generators.nasnet, 1, fused=True)}

# By name; the last figure is the seed.
RANDWIRES = {
    **{
        f"RandWire {seed}": partial(lambda seed: generators.randwire(random.Random(seed), 64, stages=3), seed)
        for seed in range(3)
    },
    **{f"RandWire CIFAR {seed}": partial(memory_networks.randwire_network, seed, nodes=64) for seed in range(2)},
}
LIMITS_S = (1.0, 3.0, 10.0, 30.0)
SHORT_S = 0.3


def percent(part: float | None) -> str:
    return "unknown" if part is None else f"{part:.1%}"


def period_ms(fps: float) -> str:
    return f"{1e3 / fps:.3f} ms"


def planned(problem: Problem) -> tuple[Plan, float]:
    started = time.perf_counter()
    plan = planning.plan(problem).plan
    return plan, time.perf_counter() - started


def fps(figures: tuple[float, ...] | None) -> float:
    assert figures is not None
    return figures[0]


def nasnets(short: bool) -> None:
    rows, gaps = [], []
    for name, make in (SHORT if short else NETWORKS).items():
        graph = make()
        for count in (4,) if short else (4, 6, 8):
            limit_s = SHORT_S if short else 30.0
            problem = Problem(graph, coral(count), unmeasured(graph), stages=count, time_limit_s=limit_s)
            plan, taken_s = planned(problem)
            started = time.perf_counter()
            (most_fps,) = lower_bound(problem)
            bound_s = time.perf_counter() - started
            (by_load_fps,) = lower_bound(problem, 0.0)
            value = fps(plan.value)
            gaps.append(plan.gap or 0.0)
            row = (period_ms(value), period_ms(most_fps), percent(plan.gap), percent(1 - value / by_load_fps))
            rows.append((name, count, plan.scheduler, *row, s(bound_s), s(taken_s)))
    columns = ("network", "stages", "plan by", "slowest stage", "bound", "gap", "by mean load", "bound in", "in all")
    show("1. Slowest stages and their gaps, in 30 s", columns, rows)
    show("", FIGURES, [figure("widest gap", max(gaps), percent, 1.0 if short else 0.10)])


def large(short: bool) -> None:
    operators = 60 if short else 100_000
    rows, required = [], []
    for what in ("equal",) if short else ("equal", "unequal"):
        rng = random.Random(1)
        graph = generators.random_dag(rng, operators)
        if what == "equal":
            device, *_ = coral(1).devices
            devices = tuple(replace(device, name=f"tpu{index}") for index in range(16))
            problem = Problem(graph, replace(coral(1), devices=devices), unmeasured(graph))
        else:
            problem = unequal(rng, graph, 16)
        plan, taken_s = planned(replace(problem, time_limit_s=SHORT_S if short else 10.0))
        rows.append((what, operators, plan.scheduler, len(plan.stages), s(taken_s), percent(plan.gap)))
        required.append(figure(f"16 {what} devices: seconds", taken_s, s, 15.0))
    columns = ("devices", "operators", "plan by", "stages", "planned in", "gap")
    show("2. A random graph on 16 devices, with a limit of 10 s", columns, rows)
    show("", FIGURES, required)


def gap_over_time(short: bool) -> None:
    limits_s = (SHORT_S,) if short else LIMITS_S
    rows, last = [], []
    for name, make in (SHORT if short else {**NETWORKS, **RANDWIRES}).items():
        graph = make()
        for count in (4,) if short else (4, 8):
            problem = Problem(graph, coral(count), unmeasured(graph), stages=count)
            plans = [planned(replace(problem, time_limit_s=limit_s))[0] for limit_s in limits_s]
            last.append(plans[-1].gap or 0.0)
            rows.append((name, count, period_ms(fps(plans[-1].value)), *(percent(plan.gap) for plan in plans)))
    if not short:
        problem = unequal(random.Random(1), generators.nasnet(), 8)
        plans = [planned(replace(problem, time_limit_s=limit_s))[0] for limit_s in limits_s]
        rows.append(("NASNet-A, fine", "8 unequal", period_ms(fps(plans[-1].value)), *(percent(p.gap) for p in plans)))
    columns = ("network", "devices", "slowest stage", *(f"gap in {limit_s:g} s" for limit_s in limits_s))
    show("3. Gaps by the time limit", columns, rows)
    show("", FIGURES, [figure("widest gap on equal devices", max(last), percent, 1.0 if short else 0.05)])


PARTS = {"nasnets": nasnets, "large": large, "gap-over-time": gap_over_time}


def compile_loops(short: bool) -> None:
    graph = generators.nasnet(1)
    for stages in () if short else (None, 2):
        planning.plan(Problem(graph, coral(2), unmeasured(graph), stages=stages, time_limit_s=0.1))


if __name__ == "__main__":
    run_parts(__doc__, PARTS, compile_loops)
