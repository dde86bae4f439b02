"""Plans for the 11 networks of SEC 2022 on 2 to 6 Edge TPUs, against the baselines, in the calibrated simulator.

    python benchmarks/edgetpu_plans.py          # all of them: about three minutes
    python benchmarks/edgetpu_plans.py --short  # two networks on 2 and 3 devices, for CI

On a USB hub, whose devices share a bus, and on PCIe, where each has lanes of its own (`profiles/platforms`, cut down to
k devices). Every plan is simulated, saturated; a speed-up is over one device of the same kind, and may pass k, for more
devices cache more parameters. `k stages` is a pipeline with a stage on every device, as the baselines are: even
parameters (what edgetpu_compiler does, as far as it says), libcoral's parameter count, and libcoral's profiling
partitioner with its defect mended; `-` where that aborts. `free` may replicate stages and leave devices out.

Ours must never be below a baseline in the simulator, and a free plan never below k stages: where one is, this exits
with 1. `evaluate` counts what a frame needs of a bus as if turns never fell badly, but devices fall into step: who
waits for a frame begins together with who made it, and of the two the one whose parameters come first keeps the other
from the bus, frame after frame. So on a bus the planner is asked several times (`candidates`), and the simulator
chooses. What `evaluate` alone would have chosen stands in the summary, and so does the choice under jitter.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

from planner import PUBLISHED, keras, show

from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.graph import OperatorGraph
from tvm_pipeline.plan import Plan, Problem, Stage
from tvm_pipeline.platform import Platform, read_platform
from tvm_pipeline.profile import unmeasured
from tvm_pipeline.scheduling import Decision, solve
from tvm_pipeline.simulate import simulate

PLATFORMS = Path(__file__).parents[1] / "profiles/platforms"
KINDS = ("coral-usb", "coral-pcie")
BASELINES = ("even-parameters", "coral-parameters", "coral-profiling")
FRAMES = 300
JITTER = 0.05
# How much slower than it is parameters are said to come, so that plans which leave the bus some slack are found.
HANDICAPS = (1.15, 1.3, 1.5, 2.0)
# Plans that are equally fast may differ by the rounding of sums.
ROUNDING = 1e-9


def coral(kind: str, devices: int) -> Platform:
    platform = read_platform(PLATFORMS / f"{kind}-8.toml")
    return replace(platform, devices=platform.devices[:devices])


def candidates(problem: Problem, decision: Decision) -> Iterator[Plan]:
    """The planner's answer; where devices share a bus also what it would say if the bus weighed more.

    Parameters that come more slowly make plans that fetch fewer; the least seconds and the least bytes that are fetched
    in all are the ends of that scale.
    """
    yield from decision.candidates
    if not any(device.bus for device in problem.platform.devices):
        return
    scheduler = "best" if problem.stages is None else "ideals"
    for factor in HANDICAPS:
        slower = replace(problem, platform=handicapped(problem.platform, factor))
        yield from solve(slower, scheduler).candidates
    stages = problem.stages or len(problem.platform.devices)
    for objective in ("latency", "dram,memory,communication"):
        yield solve(replace(problem, objective=objective, stages=stages), "ideals").plan


def handicapped(platform: Platform, factor: float) -> Platform:
    """The platform with parameters that are not cached coming `factor` times as slowly, to each device by itself."""
    return replace(
        platform,
        devices=tuple(
            replace(d, bus="", model=replace(d.model, refill_bytes_per_s=d.model.refill_bytes_per_s / factor))
            for d in platform.devices
        ),
    )


@dataclass(frozen=True)
class Found:
    """Frames a second in the simulator: of ours, of what `evaluate` alone would choose, and of each baseline.

    `jittered` is of the same plans, except `evaluated`, with stages that take more or less time from frame to frame.
    """

    kind: str
    network: str
    devices: int
    single: float
    ours: float
    free: float
    free_plan: str
    evaluated: float
    baselines: dict[str, float]
    jittered: dict[str, float]

    def over(self, baseline: str) -> float:
        return self.ours / self.baselines.get(baseline, nan)

    @property
    def least_over(self) -> float:
        """What must not be below 1: ours over the best baseline, and the free plan over ours."""
        return min(self.ours / max(self.baselines.values()), self.free / self.ours)


def fps(problem: Problem, stages: tuple[Stage, ...], jitter: float = 0.0) -> float:
    return simulate(problem, stages, FRAMES, jitter=jitter).statistics.throughput_fps or nan


def fastest(problem: Problem, plans: Iterable[Plan]) -> tuple[tuple[Stage, ...], float]:
    """The stages that the simulator likes best, and their frames a second; of equals those that come first."""
    rates = {stages: fps(problem, stages) for stages in dict.fromkeys(plan.stages for plan in plans)}
    best = max(rates.values())
    return next((stages, rate) for stages, rate in rates.items() if rate >= best * (1 - ROUNDING))


def compare(graph: OperatorGraph, kind: str, devices: int) -> Found:
    free = Problem(graph, coral(kind, devices), unmeasured(graph))
    problem = replace(free, stages=devices)
    planned = solve(problem, "ideals")
    our_stages, ours = fastest(problem, candidates(problem, planned))
    pipeline = replace(planned.plan, stages=our_stages)
    free_stages, free_fps = fastest(free, (*candidates(free, solve(free)), pipeline))
    baselines: dict[str, tuple[Stage, ...]] = {}
    for name in BASELINES:
        try:
            baselines[name] = solve(problem, name).plan.stages
        except InfeasibleError:
            continue  # its own rule ends it
    whole = (Stage(("tpu0",), tuple(operator.name for operator in graph.operators)),)
    return Found(
        kind,
        graph.name,
        devices,
        single=fps(free, whole),
        ours=ours,
        free=free_fps,
        free_plan="|".join(str(len(stage.devices)) for stage in free_stages),
        evaluated=fps(problem, planned.plan.stages),
        baselines={name: fps(problem, stages) for name, stages in baselines.items()},
        jittered={name: fps(problem, stages, JITTER) for name, stages in {"ours": our_stages, **baselines}.items()},
    )


def times(ratio: float) -> str:
    return "-" if ratio != ratio else f"{ratio:.2f}"


def speed_ups(row: Found) -> str:
    return f"{row.ours / row.single:.1f} / {row.free / row.single:.1f}"


def tell(kind: str, found: list[Found]) -> None:
    rows = [
        (
            row.network,
            row.devices,
            f"{1e3 / row.single:.1f}",
            times(row.ours / row.single),
            *(times(row.over(name)) for name in BASELINES),
            times(row.free / row.single),
            row.free_plan,
        )
        for row in found
    ]
    columns = ("network", "k", "one device, ms", "k stages", "over even", "coral p.", "profiling", "free", "replicas")
    show(f"{kind}, simulated: speed-up of k stages over one device and each baseline; of a free plan", columns, rows)
    counts = sorted({row.devices for row in found})
    networks = list(dict.fromkeys(row.network for row in found))
    at = {(row.network, row.devices): row for row in found}
    cells = [(name, *(speed_ups(at[name, k]) for k in counts)) for name in networks]
    show(f"{kind}: speed-up over one device, k stages / free", ("network", *(f"k={k}" for k in counts)), cells)


def summarise(kind: str, found: list[Found]) -> None:
    rows = []
    for name in BASELINES:
        ratios = sorted(row.over(name) for row in found if name in row.baselines)
        middle, aborts = ratios[len(ratios) // 2], len(found) - len(ratios)
        rows.append((f"k stages over {name}", *map(times, (ratios[0], middle, ratios[-1])), len(ratios), aborts))
    alone = sorted(row.evaluated / max(row.baselines.values()) for row in found)
    shaken = sorted(row.jittered["ours"] / max(fps for n, fps in row.jittered.items() if n != "ours") for row in found)
    for what, ratios in (
        ("k stages over the best baseline", sorted(row.ours / max(row.baselines.values()) for row in found)),
        ("the same, chosen by `evaluate` alone", alone),
        (f"the same, chosen as above, run with {JITTER:.0%} jitter", shaken),
        ("free over k stages", sorted(row.free / row.ours for row in found)),
    ):
        rows.append((what, *(f"{r:.3f}" for r in (ratios[0], ratios[len(ratios) // 2], ratios[-1])), len(ratios), ""))
    show(f"{kind}: summary", ("ratio of frames a second", "least", "median", "most", "plans", "aborts"), rows)
    print(
        f"Below the best baseline: {sum(ratio < 1 - ROUNDING for ratio in alone)} of {len(found)} plans by `evaluate` "
        f"alone; by more than 1% with jitter, of those that the simulator chose: {sum(r < 0.99 for r in shaken)}.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two networks on 2 and 3 devices, for CI")
    options = parser.parse_args()
    names, counts = (("ResNet50", "DenseNet201"), (2, 3)) if options.short else (PUBLISHED, range(2, 7))
    found: dict[str, list[Found]] = defaultdict(list)
    for kind in KINDS:
        for name in names:
            found[kind] += (compare(keras(name), kind, k) for k in counts)
        tell(kind, found[kind])
        summarise(kind, found[kind])
    every = [row for rows in found.values() for row in rows]
    slower = [row for row in every if row.least_over < 1 - ROUNDING]
    for row in slower:
        print(f"BELOW A BASELINE: {row.network} on {row.devices} devices of {row.kind}: {row.least_over:.4f} of it")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
