"""Check the exact planner against every plan there is, on small random DAGs, for every objective.

    python benchmarks/planner_agreement.py                 # 2000 DAGs, some minutes
    python benchmarks/planner_agreement.py --problems 40   # fewer
    python benchmarks/planner_agreement.py --short         # 16 of them, for CI
    python benchmarks/planner_agreement.py --first 17 --problems 1

Of each DAG all plans are written down and judged by `evaluate`, once; the best of them is what `ideals` and `cp-sat`
must find, for all six objectives, without a limit and with one (a throughput for latency and energy, a latency for
throughput), and with all readers of an operator in one stage. Half of the machines have an idle power. Every fourth DAG
is planned with replicas (`hybrid`) and in its own order (`chain`), too. A limit is the very figure of one of the plans,
which is to stay allowed.

Where a search says that it could not prove its plan best (buses, or unequal transfers to replicas, beside a limit), its
bound must enclose the best, and it counts as `enclosed`. The exit code is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.brute_force import every_cut, every_plan, figure, serving_once, verdict
from tests.support.graphs import (
    LEXICOGRAPHIC,
    TIMED,
    Traits,
    random_dag,
    random_platform,
    random_profile,
    small_sizes,
    with_idle_power,
)
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.device_costs import counts_period
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline.planning import SCHEDULERS

# The same sum in another order; CP-SAT rounds to 1e-10 of a frame.
ROUNDING = 1e-7
SHORT = 8  # problems: each combination of what `checked` makes of a seed comes once
OUTCOMES = ("same optimum", "both infeasible", "enclosed", "mismatch")


@dataclass(frozen=True)
class Judged:
    """A plan, what `evaluate` says of it, and what decides which schedulers choose from it."""

    stages: tuple[Stage, ...]
    predicted: Prediction
    comes_again: frozenset[str]
    is_replicated: bool
    in_order: bool


def judged_plans(problem: Problem, *, replicas: bool) -> list[Judged]:
    """Return every plan of the problem that `evaluate` allows; devices may serve several stages."""
    order = problem.graph.operator_names
    found = []
    for stages in every_plan(problem, problem.stages, again=True, replicas=replicas):
        predicted = verdict(problem, stages)
        if predicted is not None:
            used = Counter(name for stage in stages for name in stage.devices)
            found.append(
                Judged(
                    stages,
                    predicted,
                    frozenset(name for name, count in used.items() if count > 1),
                    any(len(stage.devices) > 1 for stage in stages),
                    [name for stage in stages for name in stage.operators] == order,
                )
            )
    return found


def is_in_space(problem: Problem, scheduler: str, plan: Judged) -> bool:
    """Return whether `plan` is in the space of `scheduler`, as its docstring says."""
    devices = problem.platform.devices
    limited = serving_once(problem)
    once_each = problem.objective == "throughput"
    if scheduler == "cp-sat":
        widest = max(map(len, disjoint_sets(devices)))
        if problem.stages is None and len(plan.stages) > 2 * widest:
            return False
    elif counts_period(problem):
        once_each = True
    if plan.comes_again and (once_each or plan.comes_again & limited):
        return False
    return (scheduler == "hybrid" or not plan.is_replicated) and (scheduler != "chain" or plan.in_order)


def keeps_limits(problem: Problem, predicted: Prediction) -> bool:
    floor_fps, most_s = problem.min_throughput_fps, problem.max_latency_s
    fast = floor_fps is None or (predicted.throughput_fps or 0.0) >= floor_fps * (1 - 1e-9)
    return fast and (most_s is None or (predicted.latency_s or 0.0) <= most_s * (1 + 1e-9))


def compared(problem: Problem, scheduler: str, optimum: float | tuple[float, ...] | None, may_miss: bool) -> str:
    """Return one of OUTCOMES; a mismatch says what was found."""
    try:
        plan = SCHEDULERS[scheduler].run(problem)
    except NoPlanError:
        if optimum is None:
            return "both infeasible"
        return "enclosed" if may_miss else f"no plan, but {optimum} is possible"
    except Exception as error:  # whatever it is, it is a defect; the others are still to be counted
        return f"{type(error).__name__}: {error}"
    if optimum is None:
        return f"a plan of {plan.value}, but none is legal"
    if plan.predicted != evaluate(problem, plan.stages).predicted:
        return f"predicts {plan.predicted}, which is not the judge's word"
    value = figure(problem, plan.predicted)
    if plan.status == "optimal":
        same = value == optimum if isinstance(value, tuple) else math.isclose(value, optimum, rel_tol=ROUNDING)
        return "same optimum" if same else f"{value} is not the optimum {optimum}"
    return "enclosed" if may_miss and encloses(problem, plan, optimum) else f"{value} unproven, optimum {optimum}"


def encloses(problem: Problem, plan: Plan, optimum: float) -> bool:
    if plan.bound is None:
        return False
    bound = -plan.bound[0] if problem.objective == "throughput" else plan.bound[0]
    slack = ROUNDING * abs(optimum)
    return bound - slack <= optimum <= figure(problem, plan.predicted) + slack


Outcome = tuple[str, str, str, str]


def seconds_and_joules(rng: random.Random, more: bool, idle: random.Random | None) -> Iterator[Outcome]:
    """Yield (objective, limits, scheduler, outcome) of all searches of one random problem."""
    traits = Traits(modelled=rng.random() < 0.5, buses=rng.random() < 0.25)
    graph = random_dag(rng, rng.randint(2, 4 if more else 5))
    platform = random_platform(rng, graph, rng.randint(1, 3), traits)
    profile = random_profile(rng, graph, platform, traits)
    if idle is not None:
        platform, profile = with_idle_power(idle, platform, profile)
    stages = rng.randint(1, min(len(graph), len(platform.devices))) if rng.random() < 0.4 else None
    # The searches count parameters; what becomes of plans whose activations do not fit is tested elsewhere.
    together = rng.random() < 0.3
    plain = Problem(graph, platform, profile, "throughput", stages, children_together=together, activations=False)
    plans = judged_plans(plain, replicas=more)
    limit = rng.choice(plans).predicted if plans else Prediction(10.0, 0.1)
    for objective in TIMED:
        free = replace(plain, objective=objective)
        limited = {"max_latency_s": limit.latency_s}
        if objective != "throughput":
            limited = {"min_throughput_fps": limit.throughput_fps}
        for problem in (free, replace(free, **limited)):
            limits = "limited" if problem is not free else ""
            allowed = [plan for plan in plans if keeps_limits(problem, plan.predicted)]
            for scheduler in ("ideals", "cp-sat", *(("chain", "hybrid") if more else ())):
                figures = [figure(problem, p.predicted) for p in allowed if is_in_space(problem, scheduler, p)]
                unproven = scheduler == "hybrid" or (traits.buses and scheduler != "cp-sat")
                yield objective, limits, scheduler, compared(problem, scheduler, min(figures, default=None), unproven)


def bytes_(rng: random.Random) -> Iterator[Outcome]:
    """Yield the same for the three orders of bytes, on equal devices, with readers of an operator together or not."""
    graph = small_sizes(rng, random_dag(rng, rng.randint(2, 7)))
    param_bytes = sum(operator.param_bytes for operator in graph.operators)
    count = rng.randint(1, min(4, len(graph)))
    cache = rng.randint(1, max(1, param_bytes * 2 // 3))
    platform = Platform("box", tuple(Device(f"dev{index}", cache_bytes=cache) for index in range(count)))
    names = [device.name for device in platform.devices]
    # The devices are equal, so stage b is on the b-th.
    plans = [
        tuple(Stage((name,), group) for name, group in zip(names, groups, strict=True))
        for groups in every_cut(graph, count)
        if len(groups) == count
    ]
    for together in (False, True):
        free = Problem(graph, platform, unmeasured(graph), LEXICOGRAPHIC[0], count, together)
        figures = [predicted for stages in plans if (predicted := verdict(free, stages)) is not None]
        for objective in LEXICOGRAPHIC:
            problem = replace(free, objective=objective)
            optimum = min((figure(problem, predicted) for predicted in figures), default=None)
            for scheduler in ("ideals", "cp-sat"):
                outcome = compared(problem, scheduler, optimum, may_miss=False)
                yield objective, "children" if together else "", scheduler, outcome


def checked(seed: int) -> tuple[int, list[Outcome]]:
    rng = random.Random(seed)
    return seed, [*seconds_and_joules(rng, seed % 4 == 0, random.Random(seed) if seed % 8 < 4 else None), *bytes_(rng)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=2000, help="random DAGs")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="their seeds count from here")
    parser.add_argument("--short", action="store_true", help=f"{SHORT} problems, for CI")
    args = parser.parse_args()
    console = Console(width=max(Console().width, 120))
    seeds = range(args.first, args.first + (SHORT if args.short else args.problems))
    counts: Counter[tuple[str, str, str, str]] = Counter()
    mismatches = []
    began = time.perf_counter()
    with ProcessPoolExecutor(1 if args.short else None, mp_context=multiprocessing.get_context("spawn")) as pool:
        for seed, outcomes in track(pool.map(checked, seeds, chunksize=5), total=len(seeds), console=console):
            for objective, limits, scheduler, outcome in outcomes:
                known = outcome if outcome in OUTCOMES else "mismatch"
                counts[objective, limits, scheduler, known] += 1
                if known != outcome:
                    mismatches.append(f"seed {seed}, {objective} {limits}, {scheduler}: {outcome}")
    table = Table(title=f"{len(seeds)} random DAGs against every plan there is", title_justify="left")
    for column in ("objective", "limits", "scheduler", *OUTCOMES):
        table.add_column(column, justify="right" if column in OUTCOMES else "left")
    for key in dict.fromkeys(key[:3] for key in counts):
        table.add_row(*key, *(str(counts[(*key, outcome)]) for outcome in OUTCOMES))
    table.add_section()
    totals = [sum(count for key, count in counts.items() if key[3] == outcome) for outcome in OUTCOMES]
    table.add_row("all", "", "", *map(str, totals))
    console.print(table)
    console.print(f"{len(mismatches)} mismatches (required: 0) in {time.perf_counter() - began:.0f} s")
    for line in mismatches:
        console.print(line, markup=False)
    sys.exit(bool(mismatches))


if __name__ == "__main__":
    main()
