"""Figures 6, 8 and 9 of SEC 2022: simulated times and joules of the three strategies beside the compiler's cuts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from math import nan

from edgetpu_model import published
from planner import show
from sec2022_instances import COMPILER, LIBCORAL, STRATEGIES, Instance

from tvm_pipeline.cost.evaluate import evaluate

SAID = published("sec2022-figures")
ORDER = STRATEGIES[SAID["energy"]["order"]]
# Ratios closer to 1 than this differ by the turns on the bus alone.
SAME = 0.005


def speed(found: Sequence[Instance]) -> None:
    """Print 3 x 55 rows of speed-ups on the hub, their summary by stages, and what the paper states of single rows."""
    lines = []
    for each in found:
        times = each.times_ms
        ours = [f"{times[name]:.1f} {times[COMPILER] / times[name]:.3f}" for name in STRATEGIES.values()]
        lines.append((each.network, each.stages, f"{times[LIBCORAL]:.1f}", f"{times[COMPILER]:.1f}", *ours))
    title = "Figure 6, simulated on one USB hub: ms a frame and speed-up over the compiler's cuts (even parameters)"
    show(title, ("network", "stages", "libcoral, ms", "compiler, ms", *STRATEGIES.values()), lines)
    one = sum(len({each.plans[name].stages for name in _names()}) == 1 for each in found)
    values = sum(len({_bytes(each, name) for name in _names()}) == 1 for each in found)
    print(f"The three strategies have one plan in {one} of {len(found)} cases, and equal bytes in {values}.\n")
    hub = {id(each): each.times_ms for each in found}
    _summary("on one USB hub", found, hub)
    _summary("on one USB hub", found, hub, LIBCORAL)
    alone = {id(e): {name: e.ms(plan.stages, bus=False) for name, plan in e.plans.items()} for e in found}
    _summary("each on a path of its own, the same plans", found, alone)
    _summary("each on a path of its own, the same plans", found, alone, LIBCORAL)
    whole = {
        id(e): {name: e.ms(plan.stages) for name, plan in e.paper_plans.items()} | {COMPILER: e.times_ms[COMPILER]}
        for e in found
    }
    _summary("on one USB hub by the paper's whole formulation (edges, all readers in one stage)", found, whole)
    rows = []
    for row in SAID["speed_ups"]:
        for each in found:
            if (each.network, each.stages) == (row["network"], row["stages"]):
                name = STRATEGIES[row["order"]]
                on_hub = each.times_ms[COMPILER] / each.times_ms[name]
                rows.append(
                    (
                        f"{each.network}, {each.stages} stages, {name}",
                        f"{row['speed_up']:.2f}",
                        f"{on_hub:.2f}",
                        f"{alone[id(each)][COMPILER] / alone[id(each)][name]:.2f}",
                    )
                )
    if rows:
        show("Speed-ups that the paper states of single rows", ("row", "published", "hub", "own paths"), rows)


def _summary(
    where: str, found: Sequence[Instance], times: dict[int, dict[str, float]], baseline: str = COMPILER
) -> None:
    """Print worst, median and best speed-up by number of stages, beside the most that the paper states."""
    ratios = {
        name: {
            stages: [times[id(e)][baseline] / times[id(e)][name] for e in found if e.stages == stages]
            for stages in sorted({each.stages for each in found})
        }
        for name in _names()
    }
    lines, every = [], []
    for stages in ratios[ORDER]:
        here = [ratio for name in _names() for ratio in ratios[name][stages]]
        every += here
        best = (f"{max(ratios[name][stages]):.3f}" for name in _names())
        lines.append((stages, len(here), *_spread(here), *best, SAID["most_speed_up"].get(str(stages), "-")))
    lines.append(("all", len(every), *_spread(every), "", "", "", "4.07"))
    columns = ("stages", "rows", "worst", "median", "best", "slower", "same", "faster")
    names = (f"best, {name}" for name in _names())
    cuts = "the compiler's cuts" if baseline == COMPILER else "libcoral's partitioner by parameter count"
    show(f"Figure 6 {where}: speed-ups over {cuts}", (*columns, *names, "best, published"), lines)


def _bytes(each: Instance, name: str) -> tuple[int | None, ...]:
    predicted = each.plans[name].predicted
    return predicted.memory_bytes, predicted.dram_bytes, predicted.communication_bytes


def _names() -> tuple[str, ...]:
    return tuple(STRATEGIES.values())


def _spread(ratios: Sequence[float]) -> tuple[str, ...]:
    figures = (min(ratios), statistics.median(ratios), max(ratios))
    slower, faster = sum(r < 1 - SAME for r in ratios), sum(r > 1 + SAME for r in ratios)
    return (*(f"{ratio:.3f}" for ratio in figures), str(slower), str(len(ratios) - slower - faster), str(faster))


def energy(found: Sequence[Instance], busy_w: float, idle_w: float) -> None:
    """Print watts and joules a frame of the compiler's cuts and of the paper's strategy, and its one stated row."""
    lines, gains = [], []
    for each in found:
        (their_w, their_j), (our_w, our_j) = (joules(each, name, busy_w, idle_w) for name in (COMPILER, ORDER))
        gains.append(1 - our_j / their_j)
        cells = [f"{watts:.2f}" for watts in (their_w, our_w)] + [f"{1e3 * j:.1f}" for j in (their_j, our_j)]
        lines.append((each.network, each.stages, *cells, f"{-gains[-1]:+.1%}", _stated(each)))
    columns = ("network", "stages", "compiler, W", f"{ORDER}, W", "compiler, mJ", f"{ORDER}, mJ", "change", "published")
    show(
        f"Figures 8 and 9, simulated: {busy_w:g} W of an Edge TPU that works, {idle_w:g} W of one that waits; the host "
        "is excluded",
        columns,
        lines,
    )
    print(f"Joules saved: {min(gains):+.1%} to {max(gains):+.1%}, median {statistics.median(gains):+.1%}.")
    row = SAID["energy"]
    for each in found:
        if (each.network, each.stages) == (row["network"], row["stages"]):
            watts = row["compiler_j"] / each.times_ms[COMPILER] * 1e3
            print(f"The published {1e3 * row['compiler_j']:.1f} mJ in the simulated time are {watts:.2f} W in all.")
    print()


def joules(each: Instance, name: str, busy_w: float, idle_w: float) -> tuple[float, float]:
    """Return the watts of all devices while frames come as fast as they can, and the joules of a frame.

    A device that computes, moves tensors or fetches parameters draws `busy_w`; one that waits for a frame or for its
    turn on the bus draws `idle_w`.
    """
    problem, plan = each.problem(), each.plans[name]
    devices = tuple(replace(device, active_w=busy_w - idle_w) for device in problem.platform.devices)
    stated = replace(problem, platform=replace(problem.platform, devices=devices))
    working_j = evaluate(stated, plan.stages).predicted.energy_j or nan
    period_s = each.times_ms[name] / 1e3
    total_j = working_j + idle_w * each.stages * period_s
    return total_j / period_s, total_j


def _stated(each: Instance) -> str:
    row = SAID["energy"]
    if (each.network, each.stages) != (row["network"], row["stages"]):
        return ""
    return (
        f"{1e3 * row['compiler_j']:.1f} -> {1e3 * row['ours_j']:.1f} mJ ({row['ours_j'] / row['compiler_j'] - 1:+.1%})"
    )
