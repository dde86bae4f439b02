"""Compare the simulator with `evaluate` on hundreds of random plans, and with the real runtime of this machine.

    python benchmarks/simulation.py                # both parts: about ten minutes
    python benchmarks/simulation.py --only plans   # or runtime
    python benchmarks/simulation.py --short        # a little of both, for CI

1. plans: random cuts on random devices, saturated. Where no bus is shared and replicas are equal, the simulated
   throughput must be what `evaluate` says within 1%, else this exits with 1. Where devices share a bus `evaluate` gives
   a bound, for it counts no waiting for turns: printed is how far below it the simulated runs stay.
2. runtime: every candidate of the planner as it really runs, interleaved, saturated and at a fixed rate of 70% of what
   is predicted; beside it what was predicted and what was simulated, from the same profile. For a frame under load the
   evaluator has no figure but that of a lone frame. The simulator is asked to err no more than the evaluator does. As
   the machine may be busy with other things, its load average and the spread of the rounds stand beside, and `replay`:
   the simulator again, each round given what the stages took in that very round, which leaves only its own error.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from typing import Any

from edgetpu_plans import coral
from planner import PUBLISHED, keras, run_parts, show, unequal

from tvm_pipeline import planning
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Stage, describe
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.simulate import SATURATED, fixed_rate, simulate

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support import generators

MOST_OFF = 0.01
LOAD = 0.7
# Enough that equal replicas, whose frames come out several at once, do not blur the rate at both ends of the run.
FRAMES = 2000

# 1. Random plans

Case = tuple[Problem, tuple[Stage, ...]]


def cut_at_random(rng: random.Random, problem: Problem, groups: Sequence[tuple[str, ...]]) -> Case:
    """Return as many stages as there are groups of devices, cut anywhere in the graph's order."""
    names = problem.graph.operator_names
    cuts = sorted(rng.sample(range(1, len(names)), len(groups) - 1))
    bounds = zip((0, *cuts), (*cuts, len(names)), strict=True)
    return problem, tuple(Stage(g, tuple(names[a:b])) for g, (a, b) in zip(groups, bounds, strict=True))


def modelled(rng: random.Random, kind: str, *, replicated: bool) -> Case:
    """Return a network of SEC 2022 on up to eight Edge TPUs, one a stage or in groups of any size."""
    graph = keras(rng.choice(PUBLISHED))
    problem = Problem(graph, coral(kind, 8), unmeasured(graph))
    left = [device.name for device in problem.platform.devices][: rng.randint(2, 8)]
    groups = []
    while left:
        size = rng.randint(1, len(left)) if replicated else 1
        groups.append(tuple(left[:size]))
        left = left[size:]
    return cut_at_random(rng, problem, groups)


def measured(rng: random.Random, make: Callable[..., OperatorGraph]) -> Case:
    """Return a random graph on unequal devices with links that slow each other down; some serve several stages."""
    problem = unequal(rng, make(rng, 60), rng.randint(1, 6))
    slowed = {n: replace(d, busy_factor=rng.uniform(1, 1.6)) for n, d in problem.profile.devices.items()}
    problem = replace(problem, profile=replace(problem.profile, devices=slowed))
    names = [device.name for device in problem.platform.devices]
    return cut_at_random(rng, problem, [(rng.choice(names),) for _ in range(rng.randint(1, 8))])


# Name -> whether the two must agree, and how a case is drawn.
FAMILIES: dict[str, tuple[bool, Callable[[random.Random], Case]]] = {
    "PCIe, one device a stage": (True, lambda rng: modelled(rng, "coral-pcie", replicated=False)),
    "PCIe, equal replicas": (True, lambda rng: modelled(rng, "coral-pcie", replicated=True)),
    "chains, unequal devices": (True, lambda rng: measured(rng, generators.chain)),
    "DAGs, unequal devices": (True, lambda rng: measured(rng, generators.random_dag)),
    "USB hub, one device a stage": (False, lambda rng: modelled(rng, "coral-usb", replicated=False)),
    "USB hub, equal replicas": (False, lambda rng: modelled(rng, "coral-usb", replicated=True)),
}


def plans(short: bool) -> bool:
    """Print the differences in each family; return whether all plans agree that must."""
    count, rows, agree = (1 if short else 100), [], True
    for family, (must, draw) in FAMILIES.items():
        off = []
        for seed in range(count):
            problem, stages = draw(random.Random(f"{family} {seed}"))
            off.append(steady_fps(problem, stages) / (evaluate(problem, stages).predicted.throughput_fps or nan) - 1)
        worst = max(map(abs, off))
        agree = agree and (worst <= MOST_OFF or not must)
        required = f"{MOST_OFF:.0%}{'' if worst <= MOST_OFF else ' *'}" if must else ""
        spread = [sorted(off)[round(share * (count - 1))] for share in (0, 0.1, 0.5, 0.9, 1)]
        slower = sum(each < -MOST_OFF for each in off)
        rows.append((family, count, *(f"{share:+.2%}" for share in spread), slower, required))
    columns = ("family", "plans", "least", "10%", "median", "90%", "most", "slower by > 1%", "required, at most")
    show("1. Simulated over evaluated throughput, less one: random plans, saturated", columns, rows)
    return agree


def steady_fps(problem: Problem, stages: tuple[Stage, ...]) -> float:
    return simulate(problem, stages, FRAMES).statistics.throughput_fps or nan


# 2. The real runtime


@dataclass(frozen=True)
class Figures:
    """The figures of a run: frames a second saturated, and median seconds inside, saturated and at the fixed rate.

    `replayed_fps` is what the simulator makes of the seconds that the stages took in the saturated run; NaN where a
    device serves several: they interrupt each other, so the seconds of one hold some of the other's.
    """

    saturated_fps: float
    saturated_s: float
    paced_s: float
    replayed_fps: float


def run_once(compiled: Any, platform: Any, plan: Plan, rate_fps: float, seconds: float) -> Figures:
    """Run the plan as it is: saturated for so many seconds, and then as long at the fixed rate."""
    from tvm_pipeline.runtime import Pipeline

    frame = frame_of_noise(compiled.graph)

    def paced(rate: float | None) -> Iterator[dict[str, Any]]:
        began, count = time.perf_counter(), 0
        while count < 24 or time.perf_counter() < began + seconds:
            if rate is not None:
                time.sleep(max(0.0, began + count / rate - time.perf_counter()))
            yield frame
            count += 1

    found = []
    for rate in (None, rate_fps):
        with Pipeline(compiled, plan, platform) as pipeline:
            for _ in pipeline.map(paced(rate)):
                pass
            found.append(pipeline.statistics())
    full, at_rate = found
    once = len(plan.devices) == sum(len(stage.devices) for stage in plan.stages)
    return Figures(
        full.throughput_fps or nan,
        full.latency_p50_s or nan,
        at_rate.latency_p50_s or nan,
        steady_fps(*as_it_ran(plan, full)) if once else nan,
    )


def as_it_ran(plan: Plan, run: RunStatistics) -> Case:
    """Return the plan with one operator a stage, whose seconds on a device are the median of the run."""
    count = len(plan.stages)
    tensors = [Tensor(f"t{index}", (1,)) for index in range(count + 1)]
    operators = tuple(Operator(f"s{i}", "stage", (f"t{i}",), (tensors[i + 1],)) for i in range(count))
    graph = OperatorGraph("stages", (tensors[0],), operators, (tensors[-1].name,))
    taken = {(each.device, each.stage): each.compute_s + each.transfer_s for each in run.stages}
    profile = {
        name: DeviceProfile.in_order(graph, tuple(taken.get((name, i)) for i in range(count))) for name in plan.devices
    }
    platform = Platform("as it ran", tuple(Device(name) for name in plan.devices))
    problem = Problem(graph, platform, Profile(graph.name, graph.fingerprint, profile))
    return problem, tuple(Stage(stage.devices, (f"s{index}",)) for index, stage in enumerate(plan.stages))


def runtime(short: bool) -> bool:
    """Print predicted, simulated and measured figures of every candidate; machines are noisy, so it asserts nothing."""
    from networks import load

    from tvm_pipeline import detect_platform, profile_model, settle_platform

    models, seconds, rounds = (["branching"], 0.1, 1) if short else (["squeezenet", "resnet-18"], 3.0, 5)
    backend, platform = settle_platform(detect_platform())
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    within = []
    for name in models:
        compiled = backend.compile(load(name), platform.devices)
        problem = Problem(compiled.graph, platform, profile_model(backend, compiled, platform, 8 if short else 24))
        candidates = planning.plan(problem).candidates[: 2 if short else None]
        loads = [os.getloadavg()[0]]
        rates = [LOAD * (plan.predicted.throughput_fps or nan) for plan in candidates]
        runs: list[list[Figures]] = [[] for _ in candidates]
        for turn in range(rounds):
            for position in range(len(candidates)):
                index = (position + turn) % len(candidates)
                runs[index].append(run_once(compiled, platform, candidates[index], rates[index], seconds))
        loads.append(os.getloadavg()[0])
        rows = []
        for plan, rate, found in zip(candidates, rates, runs, strict=True):
            full = simulate(problem, plan.stages, FRAMES, SATURATED).statistics
            paced = simulate(problem, plan.stages, FRAMES, fixed_rate(rate)).statistics
            saturated = [run.saturated_fps for run in found]
            cells: list[str] = []
            for what, predicted, simulated, real in (
                ("throughput", plan.predicted.throughput_fps, full.throughput_fps, saturated),
                ("seconds, saturated", None, full.latency_p50_s, [run.saturated_s for run in found]),
                ("seconds, at 70%", plan.predicted.latency_s, paced.latency_p50_s, [run.paced_s for run in found]),
            ):
                middle = statistics.median(real)
                scale = 1 if what == "throughput" else 1e3
                cells.append(f"{middle * scale:.1f} ±{spread(real):.0%}")
                for who, figure in (("evaluator", predicted), ("simulator", simulated)):
                    if figure is not None:
                        errors[what, who].append(figure / middle - 1)
                        cells.append(f"{figure / middle - 1:+.1%}")
                if what == "throughput":
                    allowed = abs(errors[what, "evaluator"][-1]) + MOST_OFF
                    within.append(abs(errors[what, "simulator"][-1]) <= allowed)
                    replayed = statistics.median(run.replayed_fps / run.saturated_fps - 1 for run in found)
                    cells.append("-" if isnan(replayed) else f"{replayed:+.1%}")
                    if not isnan(replayed):
                        errors[what, "replay"].append(replayed)
            rows.append((describe(plan).replace(" | ", "|"), *cells))
        columns = ("candidate", "fps", "eval", "sim", "replay", "full: ms", "sim", "70%: ms", "eval", "sim")
        title = f"2. {name}: measured (±quartile to quartile of {rounds} rounds); errors of `evaluate` and `simulate`"
        show(f"{title}; load average {loads[0]:.1f} before, {loads[1]:.1f} after", columns, rows)
    summary = [
        (what, who, f"{statistics.median(map(abs, off)):.1%}", f"{max(map(abs, off)):.1%}", len(off))
        for (what, who), off in errors.items()
    ]
    show("Errors against the real runtime", ("figure", "by", "median", "worst", "candidates"), summary)
    print(
        f"Simulated throughput errs at most {MOST_OFF:.0%} more than evaluated: {sum(within)} of {len(within)} times."
    )
    return True


def spread(figures: Sequence[float]) -> float:
    """Return interquartile range over median."""
    if len(figures) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
    return (high - low) / middle


PARTS = {"plans": plans, "runtime": runtime}


if __name__ == "__main__":
    sys.exit(not all(run_parts(__doc__, PARTS)))
