"""Measure how fast the exact planner proves its optima, on how large graphs, and how far the baselines are from them.

    python benchmarks/planner.py                   # all four parts
    python benchmarks/planner.py --only baselines  # one of published, large, chains, baselines
    python benchmarks/planner.py --short           # a little of each, for CI

1. published: 11 networks of `profiles/keras` on 2 to 6 equal devices, in three orders of memory, overflow and
   communication, with and without the children of an operator in one stage: 330 instances, by `ideals` and by CP-SAT.
2. large: RandWire, NASNet, transformers of up to 50 000 operators; each graph in a process of its own, for the memory.
3. chains: 800 operators on unequal devices, each serving one stage or several.
4. baselines: how far each is from the proven optimum, in memory and in the slowest stage.

A time is one call of the planner with the graph loaded: it includes the evaluation of the plan, and the listing of
the downsets, which the planner would keep for the next call (`again`). The required value of a figure stands beside it;
an asterisk marks a measured value that exceeds it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tvm_pipeline import planning
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Link, Platform, read_platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline.planning.baselines.segments import Partition, even_cuts
from tvm_pipeline.planning.search.cuts import Cuts, ideals
from tvm_pipeline_papers.coral import profiling_partition
from tvm_pipeline_papers.fewest_bottleneck import fewest_bottleneck

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support import generators

ROOT = Path(__file__).parents[1]
# The 11 networks of SEC 2022 are the graphs of profiles/keras without these two.
OTHERS = ("MobileNetV2", "InceptionV3")
PUBLISHED = sorted({path.stem for path in (ROOT / "profiles/keras").glob("*.json")}.difference(OTHERS))
ORDERS: tuple[Objective, ...] = ("memory,communication", "memory,dram,communication", "dram,memory,communication")
CACHE_BYTES = 8 << 20
CONSOLE = Console(width=150)


def keras(name: str) -> OperatorGraph:
    return read_graph(ROOT / "profiles/keras" / f"{name}.json")


def coral(count: int) -> Platform:
    """Return the first `count` devices of the model of Edge TPUs on PCIe."""
    platform = read_platform(ROOT / "profiles/platforms/coral-pcie-8.toml")
    return replace(platform, devices=platform.devices[:count])


def equal_devices(count: int) -> Platform:
    return Platform("equal", tuple(Device(f"d{index}", cache_bytes=CACHE_BYTES) for index in range(count)))


def of_bytes(graph: OperatorGraph, stages: int, order: Objective, **options: Any) -> Problem:
    return Problem(graph, equal_devices(stages), unmeasured(graph), order, stages, **options)


def timed(problem: Problem, scheduler: str, *, again: bool = False) -> tuple[float, Plan]:
    """Time one solve, and return its seconds and the plan; the cached downsets are only kept for `again`."""
    if not again:
        ideals.cache_clear()
    begin = time.perf_counter()
    plan = planning.plan(problem, scheduler).plan
    return time.perf_counter() - begin, plan


def listed(graph: OperatorGraph) -> tuple[Cuts | None, float]:
    """Return the downsets of a graph, None if they are too many, and the seconds in which they were listed."""
    ideals.cache_clear()
    begin = time.perf_counter()
    cuts = ideals(graph)
    return cuts, time.perf_counter() - begin


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*map(str, row))
    CONSOLE.print(table)


def run_parts(
    description: str | None, parts: Mapping[str, Callable[[bool], Any]], before: Callable[[bool], object] = bool
) -> list[Any]:
    """Run the parts that the command line names, or all; return what they return. Each is told whether it is short.

    Args:
        before: what comes before the first of them, as compiling loops.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=parts, action="append", help="this part; may be given several times")
    parser.add_argument("--short", action="store_true", help="a little of each part, for CI")
    options = parser.parse_args()
    before(options.short)
    return [parts[name](options.short) for name in options.only or parts]


def figure(what: str, got: float, text: Callable[[float], str], most: float = math.inf) -> tuple[str, str, str]:
    """Return a row of FIGURES: the measured and the required value; an asterisk marks a requirement not met."""
    return what, f"{text(got)}{'' if got <= most else ' *'}", text(most) if most < math.inf else ""


FIGURES = ("figure", "measured", "required, at most")


def s(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def middle_and_worst(figures: Sequence[float], text: Callable[[float], str]) -> str:
    return f"{text(statistics.median(figures))} / {text(max(figures))}"


# 1. Published networks


def published(short: bool) -> None:
    names, counts, repeats = (("Xception",), (2,), 1) if short else (PUBLISHED, range(2, 7), 3)
    variants = list(itertools.product(ORDERS, (False, True)))
    for (order, together), scheduler in () if short else itertools.product(variants, ("ideals", "cp-sat")):
        planning.plan(of_bytes(keras("ResNet50"), 4, order, children_together=together), scheduler)
    rows, differ = [], []
    taken: dict[str, list[float]] = defaultdict(list)
    proven: Counter[str] = Counter()
    for name in names:
        graph, before = keras(name), {way: len(taken[way]) for way in ("ideals", "again", "cp-sat")}
        cuts, listing_s = listed(graph)
        for k, (order, together) in itertools.product(counts, variants):
            problem = of_bytes(graph, k, order, children_together=together)
            plans = {}
            for scheduler in (*["ideals"] * repeats, "cp-sat"):
                seconds, plans[scheduler] = timed(problem, scheduler)
                taken[scheduler].append(seconds)
                if scheduler == "ideals":
                    taken["again"].append(timed(problem, scheduler, again=True)[0])
            for scheduler, plan in plans.items():
                proven[scheduler] += plan.status == "optimal"
            if len({plan.value for plan in plans.values()}) > 1:
                differ.append(f"{name}, k={k}, {order}, children {together}: {[plan.value for plan in plans.values()]}")
        here = [taken[way][start:] for way, start in before.items()]
        figures = [middle_and_worst(seconds, s) for seconds in here]
        rows.append((name, len(graph), len(cuts) if cuts else "too many", s(listing_s), *figures))
    count = len(names) * len(counts) * len(variants)
    columns = ("network", "operators", "ideals", "listed in", "by ideals", "again", "by cp-sat")
    show(f"1. Published networks: median / worst of {count} instances, `ideals` {repeats} times each", columns, rows)
    fast, again, slow = taken["ideals"], taken["again"], taken["cp-sat"]
    show(
        "",
        FIGURES,
        [
            figure("ideals, median", statistics.median(fast), s, 5e-3),
            figure("ideals, worst (the published solver takes up to 60 s)", max(fast), s, 0.3),
            figure("ideals, a graph planned before: median", statistics.median(again), s),
            figure("ideals, a graph planned before: worst", max(again), s),
            figure("cp-sat, median", statistics.median(slow), s),
            figure("cp-sat, worst", max(slow), s, 3.0),
            *(figure(f"not proven optimal by {name}", count - proven[name], str, 0) for name in ("ideals", "cp-sat")),
            figure("optima that differ", len(differ), str, 0),
        ],
    )
    for line in differ:
        CONSOLE.print(line)


# 2. Large graphs

LARGE: dict[str, Callable[[], OperatorGraph]] = {
    "RandWire WS(32), 1 stage": lambda: generators.randwire(random.Random(3)),
    "RandWire WS(32), 3 stages": lambda: generators.randwire(random.Random(3), stages=3),
    "NASNet-A, fused": lambda: generators.nasnet(fused=True),
    "NASNet-A, fine": generators.nasnet,
    "transformer, 12 layers": lambda: generators.transformer(12),
    "transformer, 96 layers": lambda: generators.transformer(96),
    "transformer, 10 000": lambda: generators.transformer_of(10_000),
    "transformer, 50 000": lambda: generators.transformer_of(50_000),
}
SHORT = ("NASNet-A, fused",)
REQUIRED_S = {"transformer, 10 000": 5.0, "transformer, 50 000": 30.0}
SOLVES = {**{f"bytes, k={k}": k for k in (2, 4, 6)}, "fps, 6 stages": 6}


@dataclass(frozen=True)
class Large:
    """The results of one graph in a process of its own: the solves with their seconds, and its peak memory in bytes."""

    operators: int
    cuts: int | None
    listing_s: float
    solves: dict[str, tuple[float, Plan]]
    peak_bytes: int


def plan_large(name: str, short: bool) -> Large:
    graph = LARGE[name]()
    warm = generators.transformer(1)
    for problem in (of_bytes(warm, 2, ORDERS[2]), Problem(warm, coral(8), unmeasured(warm), stages=6)):
        for scheduler in ("ideals", "cp-sat"):
            planning.plan(problem, scheduler)
    cuts, listing_s = listed(graph)
    count = None if cuts is None else len(cuts)
    del cuts
    # What a search that may not end is given: seconds for bytes, and for throughput.
    limits = (None, None) if count else (0.2, 0.2) if short else (60.0, 30.0)
    solves = {}
    for what, stages in SOLVES.items():
        problem = of_bytes(graph, stages, ORDERS[2], time_limit_s=limits[0])
        if what.startswith("fps"):
            problem = Problem(graph, coral(8), unmeasured(graph), stages=stages, time_limit_s=limits[1])
        solves[what] = timed(problem, "ideals" if count else "best")
    return Large(len(graph), count, listing_s, solves, peak_bytes())


def peak_bytes() -> int:
    """Return the peak memory of this process; getrusage would include that of the parent process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def megabytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def outcome(taken: float, plan: Plan) -> str:
    if plan.status == "optimal":
        return f"{s(taken)} proven"
    return f"{s(taken)} gap {'unknown' if plan.gap is None else format(plan.gap, '.2%')}"


def large(short: bool) -> None:
    rows, required, peak = [], [], 0
    for name in SHORT if short else LARGE:
        # A process that is new, and not forked: a fork would begin with the memory of this one.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(plan_large, name, short).result()
        *_, (_, last) = found.solves.values()
        outcomes = (outcome(*solved) for solved in found.solves.values())
        listed = (found.cuts or "too many", s(found.listing_s))
        rows.append((name, found.operators, *listed, last.scheduler, *outcomes, megabytes(found.peak_bytes)))
        worst_s = max(seconds for seconds, _ in found.solves.values())
        peak = max(peak, found.peak_bytes)
        if name in REQUIRED_S:
            required.append(figure(f"{name}: slowest solve", worst_s, s, REQUIRED_S[name]))
    columns = ("graph", "operators", "ideals", "listed in", "method", *SOLVES, "peak memory")
    show(f"2. Large graphs: {ORDERS[2]} on k devices; throughput on coral-pcie-8", columns, rows)
    CONSOLE.print(
        "Too many ideals: `best` under a time limit. What it proves, it proves of pipelines cut anywhere, and of "
        "replicated stages (`hybrid`) cut in the graph's own order."
    )
    show("", FIGURES, [*required, figure("most memory of any of them", peak, megabytes, 2e9)])


# 3. Chains on unequal devices


def unequal(rng: random.Random, graph: OperatorGraph, count: int, **options: Any) -> Problem:
    """Return devices each of which is faster than the others at some operators, with links between all of them."""
    names = [f"d{index}" for index in range(count)]
    devices = tuple(Device(name, cores=(i,), active_w=rng.uniform(1, 5)) for i, name in enumerate(names))
    links = tuple(
        Link(source, target, rng.uniform(1e-5, 1e-4), rng.uniform(1e9, 4e9))
        for source, target in itertools.permutations(names, 2)
    )
    base = [rng.uniform(1e-4, 2e-3) for _ in range(len(graph))]
    measured = {
        name: DeviceProfile.in_order(graph, tuple(seconds * rng.uniform(0.5, 2) * (1 + 0.2 * i) for seconds in base))
        for i, name in enumerate(names)
    }
    profile = Profile(graph.name, graph.fingerprint, measured)
    return Problem(graph, Platform("unequal", devices, links), profile, **options)


def chains(short: bool) -> None:
    length, count, repeats = (10, 3, 1) if short else (800, 8, 5)
    taken: dict[str, list[float]] = defaultdict(list)
    gains = []

    def solved(what: str, problem: Problem, scheduler: str = "chain") -> Plan:
        seconds, plan = timed(problem, scheduler)
        taken[f"{what}{'' if plan.status == 'optimal' else ' (not proven)'}"].append(seconds)
        return plan

    for seed in range(0 if short else -1, repeats):  # the first is a small one, and only loads the compiled loops
        rng = random.Random(seed)
        graph = generators.chain(rng, length if seed >= 0 else 20)
        problem = unequal(rng, graph, count)
        best = solved(f"bottleneck, {count} devices once each", problem)
        for share in (0.95, 0.5, 0.2):
            floor_fps = share * (best.value or (0.0,))[0]
            limited = replace(problem, objective="energy", min_throughput_fps=floor_fps)
            solved(f"energy at {share:.0%} of the best throughput, {count} devices", limited)
        for objective in ("latency", "energy"):
            solved(f"{objective}, {count} devices again and again", replace(problem, objective=objective))
        problem = unequal(rng, graph, 2)
        again = solved("bottleneck, 2 devices again, <= 4 stages", problem, "revisits")
        once = planning.plan(problem, "chain").plan
        gains.append((again.value or (0.0,))[0] / (once.value or (0.0,))[0] - 1)
        if seed < 0:
            taken.clear()
            gains.clear()
    required = {"bottleneck, 8": 0.3, "energy at": 2.0, "bottleneck, 2": 1.0}
    rows = []
    for what, seconds in taken.items():
        most = next((most for start, most in required.items() if what.startswith(start)), math.inf)
        rows.append((what, s(statistics.median(seconds)), *figure("", max(seconds), s, most)[1:]))
    columns = ("figure", "median", "worst", "required, at most")
    show(f"3. Chains of {length} operators, {repeats} at random, on unequal devices", columns, rows)
    CONSOLE.print(
        f"Devices that come again, against once each: {statistics.mean(gains):+.1%} frames a second in the mean, "
        f"{min(gains):+.1%} to {max(gains):+.1%} (facts: +3% to +8%)"
    )


# 4. Baselines

# Mean and worst gap, in memory and in the slowest stage, of an earlier study with a simpler model of the Edge TPU.
FACTS = {
    "even-parameters": ("4.6% / 30%", "25.8% / 90%"),
    "coral-parameters": ("12% / 51%", "49% / 377%"),
    "coral-profiling": ("10.8% / 96%", "12% / 60%"),
    "chain": ("", "1.7% / 16%"),
    "best memory": ("0% / 0%", "18.7% / 92%"),
}
BASELINES = (
    *("even-parameters", "greedy", "two-stage", "chain"),
    *("coral-parameters", "coral-profiling", "coral-profiling-original"),
)


def slowest_s(problem: Problem, plan: Plan) -> float:
    return 1 / (evaluate(problem, plan.stages).predicted.throughput_fps or math.nan)


def memory(problem: Problem, plan: Plan) -> float:
    return evaluate(problem, plan.stages).predicted.memory_bytes or math.nan


def mean_and_worst(gaps: Sequence[float]) -> str:
    return f"{statistics.mean(gaps):.1%} / {max(gaps):.0%}" if gaps else "no plan"


def baselines(short: bool) -> None:
    names, counts = (("Xception",), (2,)) if short else (PUBLISHED, range(2, 7))
    # By planner: excess over the optimum in memory, and in the slowest stage; and the instances without a plan.
    gaps: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    aborts: Counter[str] = Counter()
    searches: dict[str, list[Partition]] = defaultdict(list)
    for name, k in itertools.product(names, counts):
        graph = keras(name)
        problem = Problem(graph, coral(k), unmeasured(graph), stages=k)
        of_memory = replace(problem, objective="memory,communication")
        lightest, fastest = planning.plan(of_memory, "ideals").plan, planning.plan(problem, "ideals").plan
        if (lightest.status, fastest.status) != ("optimal", "optimal"):
            CONSOLE.print(f"{name}, {k} stages: not proven; gaps are to the best known")
        plans = {"best memory": (lightest, lightest), "best throughput": (fastest, fastest)}
        for baseline in BASELINES if k == 2 else [each for each in BASELINES if each != "two-stage"]:
            try:
                plans[baseline] = (planning.plan(of_memory, baseline).plan, planning.plan(problem, baseline).plan)
            except NoPlanError:
                aborts[baseline] += 1
        for planner, (light, fast) in plans.items():
            gaps[planner][0].append(memory(problem, light) / memory(problem, lightest) - 1)
            gaps[planner][1].append(slowest_s(problem, fast) / slowest_s(problem, fastest) - 1)
        seconds = compute_seconds(graph, problem.platform.devices[0])
        fewest = fewest_bottleneck(len(graph), k, lambda _, start, end: seconds(start, end))  # noqa: B023
        searches["fewest_bottleneck"].append(fewest)
        searches["coral-profiling"].append(profiling_partition(len(graph), k, seconds, initial=even_cuts(graph, k)))
    columns = ("planner", "plans", "aborts", "memory", "facts", "slowest stage", "facts")
    rows = []
    for planner, (of_bytes_, of_seconds) in gaps.items():
        known = FACTS.get(planner, ("", ""))
        cells = (mean_and_worst(of_bytes_), known[0], mean_and_worst(of_seconds), known[1])
        rows.append((planner, len(of_bytes_), aborts[planner], *cells))
    count = len(names) * len(counts)
    title = f"4. Gap to the proven optimum, mean / worst of {count} instances, on the first k devices of coral-pcie-8"
    show(title, columns, rows)
    CONSOLE.print(
        "The slowest stage is by the platform's model, with transfers through the host; the facts' model is simpler.\n"
        "A planner with an objective has a plan for each column. two-stage is for k=2 alone; chain is the best prefix."
    )
    best = [found.bottleneck_s for found in searches["fewest_bottleneck"]]
    rows = []
    for search, found in searches.items():
        excess = [each.bottleneck_s / least - 1 for each, least in zip(found, best, strict=True)]
        evaluations = middle_and_worst([each.evaluations for each in found], "{:.0f}".format)
        rows.append((search, evaluations, mean_and_worst(excess)))
    columns = ("search", "segments evaluated: median / most", "gap to the best prefix cuts: mean / worst")
    show("Segments to be compiled and measured on hardware, transfers apart", columns, rows)


def compute_seconds(graph: OperatorGraph, device: Device) -> Callable[[int, int], float]:
    """Return seconds of a segment by the device's model without transfers, so that a longer one never takes less."""
    model = device.model
    assert model is not None
    macs = list(itertools.accumulate((operator.macs for operator in graph.operators), initial=0))
    param_bytes = list(itertools.accumulate((operator.param_bytes for operator in graph.operators), initial=0))
    return lambda start, end: model.seconds(end - start, macs[end] - macs[start], param_bytes[end] - param_bytes[start])


SECTIONS: dict[str, Callable[[bool], None]] = {
    "published": published,
    "large": large,
    "chains": chains,
    "baselines": baselines,
}


if __name__ == "__main__":
    run_parts(__doc__, SECTIONS)
