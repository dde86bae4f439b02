"""Measure what switching, breaking and watching a running pipeline costs, and check that no frame is lost or wrong.

    python benchmarks/live.py                 # all five parts, about 25 minutes
    python benchmarks/live.py --only switches # one of gaps, switches, failures, watching, calm
    python benchmarks/live.py --engines tvm,openvino,onnxruntime   # 200 switches and 60 failures between these
    python benchmarks/live.py --short         # a little of each, for CI

1. gaps: the longest time between two results around a switch, over the frame period of the slower of the two plans.
   Required: 1.5 at most. Beside it, the same of as many results at random moments without a switch: other programs and
   guests of the machine make gaps too, and replicas give their results in pairs; only what is more is the switch's.
2. switches: 1000 at random moments. Required: no frame lost, repeated, out of order, or different in a bit.
3. failures: 200 at random moments: a stage raises, a device is gone for a while, a stage hangs past its watchdog.
   Required: every run goes on, and no frame is lost.
4. watching and adaptation, each on against off, in turns (off on on off). Required: less than 1 % of throughput.
5. calm: switches without a cause in ten minutes. Required: none.

2 and 3 use a small picture, for many rounds. The exit status is 1 if a frame is lost or wrong, or a run does not go on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
from rich.console import Console
from rich.table import Table
from rig import USUAL_SIDE, Fault, Rig, Run, kept_full, make_rig, make_rig_of_engines, make_tiny_rig, random_plan

from tvm_pipeline import planning
from tvm_pipeline.core.plan import describe
from tvm_pipeline.runtime import Adaptation, LivePipeline
from tvm_pipeline_video.watch import LiveWatch, WatchServer

SMALL_SIDE = 64
AROUND = 8  # results of the new plan that still count to the switch
CALM = 24  # results between a switch and the next moment that is looked at
KINDS = ("raises", "vanishes", "hangs")
WATCHDOG_S = 1.0
IN_A_RUN = 5  # failures, before the next pipeline
CONSOLE = Console(width=120)


def show(title: str, columns: tuple[str, ...], *rows: tuple[object, ...]) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    CONSOLE.print(table)


def is_right(run: Run) -> bool:
    """Return whether the run went on to its end and every frame was right; print what was not."""
    for mistake in [*run.mistakes[:3], *([f"it ended: {run.failure}"] if run.failure else [])]:
        CONSOLE.print(f"[red]{mistake}")
    return not (run.lost or run.mistakes or run.failure)


# 1. Gaps


def gaps(rig: Rig, count: int, draw: random.Random) -> bool:
    live = LivePipeline(rig.compiled, rig.problem, random_plan(rig.problem, draw))
    calm: list[tuple[int, int]] = []  # of results: where the stretch without a switch begins, and a moment in it
    switches: list[tuple[int, int]] = []  # the first result after the call, and that of the new plan
    with kept_full(live, rig) as run:
        for _ in range(count):
            begin = len(run.done_s) + AROUND if not switches else switches[-1][1] + AROUND
            run.wait(begin + draw.randrange(CALM))
            moment = len(run.done_s)
            run.wait(moment + CALM + draw.randrange(AROUND))
            calm.append((begin, moment))
            time.sleep(draw.random() / 50)
            plan = random_plan(rig.problem, draw)
            while plan.stages == live.plan.stages:
                plan = random_plan(rig.problem, draw)
            before = len(run.done_s)
            live.switch(plan, "for the benchmark")
            switches.append((before, live.events[-1].frame))
            if run.failure:
                break
        begin = switches[-1][1] + AROUND
        run.wait(begin + 2 * CALM)
    done = np.array(run.done_s)
    ends = [before for before, _ in switches] + [len(done)]
    starts = [begin for begin, _ in calm] + [begin]
    periods = [(done[end - 1] - done[start]) / (end - 1 - start) for start, end in zip(starts, ends, strict=True)]

    def longest(first: int, last: int) -> float:
        return float(np.diff(done[first - 1 : last + 1]).max())

    figures: dict[str, list[float]] = {"a switch": [], "no switch": []}
    for index, ((before, base), (_, moment)) in enumerate(zip(switches, calm, strict=True)):
        length = min(base + AROUND - before, before - 1 - moment)
        figures["a switch"].append(longest(before, base + AROUND) / max(periods[index : index + 2]))
        figures["no switch"].append(longest(moment, moment + length) / periods[index])
    show(
        f"1. Longest gap between results over the frame period (of the slower plan): {len(switches)} of each",
        ("around", "median", "p90", "worst", "at most 1.5"),
        *(
            (name, *(f"{np.quantile(f, q):.2f}" for q in (0.5, 0.9, 1)), f"{np.mean(np.array(f) <= 1.5):.0%}")
            for name, f in figures.items()
        ),
    )
    return is_right(run)


# 2. Switches


def switches(rig: Rig, count: int, draw: random.Random) -> bool:
    live = LivePipeline(rig.compiled, rig.problem, random_plan(rig.problem, draw))
    with kept_full(live, rig) as run:
        while live.version < count and not run.failure:
            live.switch(random_plan(rig.problem, draw), "for the benchmark")
            time.sleep(draw.random() / 50)
    right = is_right(run)
    columns = ("switches", "frames", "lost", "repeated, out of order or wrong")
    show("2. Switches at random moments", columns, (live.version, run.entered, run.lost, len(run.mistakes)))
    return right


# 3. Failures


def failures(rig: Rig, count: int, draw: random.Random) -> bool:
    met: Counter[str] = Counter()
    frames = lost = mistakes = runs = 0
    right = True
    while met.total() < count and right:
        plan = random_plan(rig.problem, draw)
        live = LivePipeline(rig.compiled, rig.problem, plan, watchdog_s=WATCHDOG_S, cool_down_s=0.05)
        with kept_full(live, rig) as run:
            for _ in range(min(IN_A_RUN, count - met.total())):
                time.sleep(draw.random() / 10)
                # Another device must be there to go on with; that is as much as is promised.
                wait_for(lambda: len(live.problem.platform.devices) > 1 or bool(run.failure), 10)  # noqa: B023
                kind = draw.choice(KINDS)
                fault = Fault(kind, 2 * WATCHDOG_S if kind == "hangs" else draw.uniform(0.02, 0.2))
                device = draw.choice(live.plan.devices)
                before = failures_of(live)
                rig.compiled.faults[device] = fault
                met[kind] += wait_for(lambda: failures_of(live) > before or bool(run.failure), 5)  # noqa: B023
                run.wait(len(run.done_s) + AROUND)
                rig.compiled.faults.clear()
        right = is_right(run)
        frames, lost, mistakes, runs = frames + run.entered, lost + run.lost, mistakes + len(run.mistakes), runs + 1
    columns = (*KINDS, "runs", "frames", "lost", "repeated, out of order or wrong")
    row = (*(met[kind] for kind in KINDS), runs, frames, lost, mistakes)
    show("3. Failures at random moments", columns, row)
    return right


def failures_of(live: LivePipeline) -> int:
    return sum(event.kind == "failure" for event in list(live.events))


def wait_for(true: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.perf_counter() + limit_s
    while not true():
        if time.perf_counter() > end_s:
            return False
        time.sleep(1e-3)
    return True


# 4. Watching and adaptation


def scrape(orders: Connection) -> None:
    """Ask once a second for metrics and state, as Prometheus and a page would."""
    url = None
    while True:
        if orders.poll(1.0 if url else None):
            url = orders.recv()
        if url:
            for path in ("metrics", "state"):
                urllib.request.urlopen(url + path).read()


@contextmanager
def scraped(live: LivePipeline, orders: Connection) -> Iterator[None]:
    with WatchServer(LiveWatch(live)) as server:
        orders.send(server.url)
        try:
            yield
        finally:
            orders.send(None)
            time.sleep(0.05)


def rate(run: Run, seconds: float) -> float:
    """Return results a second, from one result to another."""
    first = last = len(run.done_s)
    while last < first + 3:
        time.sleep(seconds)
        last = len(run.done_s)
    return (last - 1 - first) / (run.done_s[last - 1] - run.done_s[first])


def ratios(off: Callable[[], float], on: Callable[[], float], rounds: int) -> list[float]:
    """Return on over off, from `rounds` of off, on, on, off, in which an even drift cancels out."""
    found = []
    for _ in range(rounds):
        before, first, second, after = off(), on(), on(), off()
        found.append((first + second) / (before + after))
    return found


def watching(rig: Rig, rounds: int, seconds: float, orders: Connection) -> bool:
    plan = planning.plan(rig.problem).plan
    right = True

    def alone(live: LivePipeline) -> float:
        nonlocal right
        with kept_full(live, rig) as run:
            run.wait(AROUND)
            fps = rate(run, seconds)
        right = right and is_right(run)
        return fps

    live = LivePipeline(rig.compiled, rig.problem, plan)
    with kept_full(live, rig) as run:
        run.wait(CALM)

        def watched() -> float:
            with scraped(live, orders):
                return rate(run, seconds)

        rows = {"watched": ratios(lambda: rate(run, seconds), watched, rounds)}
    right = is_right(run)
    rows["adaptation"] = ratios(
        lambda: alone(LivePipeline(rig.compiled, rig.problem, plan)),
        lambda: alone(LivePipeline(rig.compiled, rig.problem, plan, adaptation=Adaptation())),
        rounds,
    )
    show(
        f"4. Throughput, on over off: {rounds} rounds of off, on, on, off, {seconds:g} s each ({describe(plan)})",
        ("what", "median", "quartiles", "least", "required"),
        *((name, f"{statistics.median(r):.4f}", *spread(r), f"{min(r):.3f}", "> 0.99") for name, r in rows.items()),
    )
    return right


def spread(figures: list[float]) -> tuple[str]:
    low, high = np.quantile(figures, [0.25, 0.75])
    return (f"{low:.3f} to {high:.3f}",)


# 5. Calm


def calm(rig: Rig, minutes: float) -> bool:
    plan = planning.plan(rig.problem).plan
    live = LivePipeline(rig.compiled, rig.problem, plan, adaptation=Adaptation())
    with kept_full(live, rig) as run:
        wait_for(lambda: run.failure is not None, minutes * 60)
    changes = [event for event in live.events if event.kind == "switch"]
    columns = ("minutes", "frames", "switches", "load average", "required")
    load = f"{os.getloadavg()[0]:.1f}"
    show("5. Adaptation, undisturbed", columns, (f"{minutes:g}", run.entered, len(changes), load, "no switch"))
    for event in changes:
        CONSOLE.print(f"{event.time_s:.1f} s: {event.reason}: {event.plan}")
    return is_right(run)


def main() -> None:
    parts = ("gaps", "switches", "failures", "watching", "calm")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=parts, help="one part")
    parser.add_argument("--short", action="store_true", help="a little of each, with a tiny network, for CI")
    parser.add_argument("--engines", help="devices of these engines on each core; parts 2 and 3 alone")
    arguments = parser.parse_args()
    few, draw = arguments.short, random.Random(0)
    if arguments.engines:
        rig = make_rig_of_engines(32 if few else SMALL_SIDE, arguments.engines)
        right = [switches(rig, 10 if few else 200, draw), failures(rig, 2 if few else 60, draw)]
        sys.exit(not all(right))
    chosen = [arguments.only] if arguments.only else parts

    orders, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=scrape, args=(theirs,), daemon=True).start()
    small = make_tiny_rig() if few else make_rig(SMALL_SIDE) if {"switches", "failures"} & {*chosen} else None
    usual = small if few else make_rig(USUAL_SIDE) if {"gaps", "watching", "calm"} & {*chosen} else None
    todo: dict[str, Callable[[], bool]] = {
        "gaps": lambda: gaps(usual, 2 if few else 100, draw),
        "switches": lambda: switches(small, 10 if few else 1000, draw),
        "failures": lambda: failures(small, 2 if few else 200, draw),
        "watching": lambda: watching(usual, *((1, 0.2) if few else (40, 3.0)), orders),
        "calm": lambda: calm(usual, 0.01 if few else 10.0),
    }
    right = [todo[part]() for part in chosen]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
