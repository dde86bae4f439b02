"""Compare RESPECT's plans with those of orders that nobody learned: excess of the peak memory over the proven optimum.

    python benchmarks/respect.py                           # some minutes
    python benchmarks/respect.py --short                   # a few graphs and samples, for CI
    python benchmarks/respect.py --weights trained.npz     # other weights than those that are shipped
    python benchmarks/respect.py --released released.npz   # other weights of `train_respect.py --as-released`

Objective `memory,communication` on equal devices: the 13 networks of `profiles/keras` in 2 to 6 stages, and random DAGs
of 30 operators that no training has seen, in a random number of stages. An order becomes a plan by rho, the best cut of
it (`sequences.py`), or by the greedy fill: a stage takes operators until it holds an even share of the parameters.

The ways: RESPECT as published (greedy picks, repaired), with samples, and with the mask that lets it pick only what is
ready; a network trained as the authors' code does it, whose sequence begins at the outputs and is read backwards; the
first network untrained, with as many cells; orders without a network; and searches.
There are as many random orders as samples. The second table has the edges that lead backwards before the repair, and
the seconds. The last one is the paper's Figure 4 in the simulator, see `sec2022.py`: the time of a frame by equal
parameters, which stand for the Edge TPU compiler, over that by RESPECT.

The exit code is 1 where RESPECT with rho is further from the optimum than required.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from labelled_graphs import released_embedding
from planner import PUBLISHED, ROOT, keras, of_bytes, s, show, timed
from rich.progress import track
from sec2022_instances import BASELINES, COMPILER, Keeper, instances

from tvm_pipeline import planning
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline_papers.learned.pointer_network import PointerNetwork, untrained
from tvm_pipeline_papers.learned.respect import SHIPPED, ReadGraph, network_weights
from tvm_pipeline_papers.learned.respect_embedding import COLUMNS, embedding
from tvm_pipeline_papers.learned.sequences import repaired, rho, violated_edges
from tvm_pipeline_papers.learned.weights import Weights

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support import generators

# Table I of the paper; the mean gaps of its figure 5, by the number of stages.
PAPERS = sorted({*PUBLISHED} - {"ResNet50V2"})
PAPERS_GAPS = {4: 0.0226, 5: 0.0274, 6: 0.0631}
# The means of its figure 4; the best of all is 2.5, in six stages.
PAPERS_SPEED_UPS = {4: "1.06", 5: "1.08", 6: "1.65 (2.5)"}
MOST_EXCESS = 0.01
RELEASED = Path(__file__).with_name("respect_released.npz")
SEED = 2026

# The ways in the order of the table; `best of` has the number of samples.
RESPECT = "RESPECT, rho"
WAYS = (
    *(RESPECT, "RESPECT, greedy fill", "RESPECT, best of {}", "RESPECT, ready mask", "RESPECT, ready mask, best of {}"),
    *("as released, rho", "as released, greedy fill", "as released, best of {}"),
    *("untrained, rho", "untrained, greedy fill", "untrained, best of {}", "untrained, ready mask, best of {}"),
    *("own order, rho", "ASAP order, rho", "a random order, rho", "best of {} random orders"),
)


@dataclass(frozen=True)
class Settings:
    """The networks' weights, the number of samples, and the seconds of the local search."""

    trained: Weights
    untrained: Weights
    released: Weights
    samples: int
    search_s: float


@dataclass
class Results:
    """The excess by way and instance, and what reading a graph took and did."""

    excess: dict[str, dict[tuple[str, int], float]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    violated: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def mean_and_worst(self, way: str, chosen: Callable[[str, int], bool] = lambda name, stages: True) -> str:
        found = [excess for (name, stages), excess in self.excess[way].items() if chosen(name, stages)]
        return f"{statistics.mean(found):.2%} / {max(found):.1%}" if found else ""

    def mean(self, way: str, chosen: Callable[[str, int], bool]) -> str:
        found = [excess for (name, stages), excess in self.excess[way].items() if chosen(name, stages)]
        return f"{statistics.mean(found):.2%}" if found else ""


def peak_bytes(plan: Plan) -> float:
    assert plan.value is not None
    return plan.value[0]


def best(problem: Problem, orders: Sequence[Sequence[int]]) -> float:
    return peak_bytes(min((rho(problem, order, "rho") for order in orders), key=lambda plan: plan.value or ()))


def greedy_fill(problem: Problem, order: Sequence[int]) -> float:
    """Return the peak of stages that each take operators until they hold an even share of the bytes."""
    sizes = [problem.graph.operators[operator].param_bytes for operator in order]
    stages = problem.stages or 1
    ends, held = [0], 0
    for place, size in enumerate(sizes):
        left = stages - len(ends)
        held += size
        # Each later stage gets an operator.
        if left and (held * stages > sum(sizes) or len(sizes) - 1 - place == left):
            ends.append(place + 1)
            held = 0
    return max(sum(sizes[start:end]) for start, end in pairwise([*ends, len(sizes)]))


def random_order(graph: OperatorGraph, rng: random.Random) -> list[int]:
    """Return a topological order, in which each next operator is any of those that are ready."""
    missing = [len(parents) for parents in graph.edges.before]
    ready = [operator for operator, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        at = rng.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        order.append(ready.pop())
        for reader in graph.edges.after[order[-1]]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    return order


def orders_of(graph: OperatorGraph, settings: Settings, results: Results) -> dict[str, list[list[int]]]:
    """Return the topological orders of each way; those with rho and with the greedy fill are the same."""
    before, count = graph.edges.before, settings.samples
    orders: dict[str, list[list[int]]] = {}
    for name, weights in (("RESPECT", settings.trained), ("untrained", settings.untrained)):
        began = time.perf_counter()
        read = ReadGraph.by(graph, weights)
        sequence = read.sequence()
        results.seconds[name].append(time.perf_counter() - began)
        results.violated[name].append((violated_edges(before, sequence), sum(map(len, before))))
        rng = np.random.default_rng(SEED)
        orders[f"{name}, rho"] = orders[f"{name}, greedy fill"] = [repaired(before, sequence)]
        orders[f"{name}, best of {{}}"] = [repaired(before, read.sequence(rng=rng)) for _ in range(count)]
        orders[f"{name}, ready mask"] = [read.sequence(ready=True)]
        orders[f"{name}, ready mask, best of {{}}"] = [read.sequence(ready=True, rng=rng) for _ in range(count)]
    queue, rows = released_embedding(graph)
    read = ReadGraph(graph, queue, PointerNetwork.read(settings.released, rows))
    sequence, rng = read.sequence()[::-1], np.random.default_rng(SEED)
    results.violated["as released"].append((violated_edges(before, sequence), sum(map(len, before))))
    orders["as released, rho"] = orders["as released, greedy fill"] = [repaired(before, sequence)]
    orders["as released, best of {}"] = [repaired(before, read.sequence(rng=rng)[::-1]) for _ in range(count)]
    chosen = random.Random(f"{SEED} {graph.name}")
    shuffled = [random_order(graph, chosen) for _ in range(count)]
    return orders | {
        "own order, rho": [list(range(len(graph)))],
        "ASAP order, rho": [embedding(graph)[0].tolist()],
        "a random order, rho": shuffled[:1],
        "best of {} random orders": shuffled,
    }


def compare(instances: Sequence[tuple[OperatorGraph, Sequence[int]]], settings: Settings) -> Results:
    """Compare all ways on graphs, each in some numbers of stages, where the optimum is proven."""
    results = Results()
    for graph, counts in track(instances, description=f"{len(instances)} graphs", transient=True):
        orders = orders_of(graph, settings, results)
        for stages in counts:
            problem = of_bytes(graph, stages, "memory,communication")
            taken_s, exact = timed(problem, "best")
            if exact.status != "optimal":
                print(f"{graph.name} in {stages} stages is left out: no optimum was proven")
                continue
            results.seconds["exact"].append(taken_s)
            least, instance = peak_bytes(exact), (graph.name, stages)
            for way in filter(orders.__contains__, WAYS):
                began = time.perf_counter()
                fill = way.endswith("greedy fill")
                peak = greedy_fill(problem, orders[way][0]) if fill else best(problem, orders[way])
                results.seconds[way].append(time.perf_counter() - began)
                results.excess[way][instance] = peak / least - 1
            if "local-search" in planning.SCHEDULERS:
                limited = replace(problem, time_limit_s=settings.search_s)
                taken_s, found = timed(limited, "local-search")
                results.seconds["local-search"].append(taken_s)
                results.excess["local-search"][instance] = peak_bytes(found) / least - 1
            results.excess["exact"][instance] = 0.0
    return results


def held_out(count: int) -> list[tuple[OperatorGraph, Sequence[int]]]:
    """Return random DAGs like those of the training, from seeds that the training does not use."""
    found: list[tuple[OperatorGraph, Sequence[int]]] = []
    for number in range(count):
        rng = random.Random(f"held out {number}")
        graph = generators.random_dag(rng, 30, most_reads=2 + number % 5)
        found.append((replace(graph, name=f"dag{number}"), [rng.randint(2, 6)]))
    return found


def report(of_keras: Results, of_dags: Results, settings: Settings) -> None:
    def papers(at: int) -> Callable[[str, int], bool]:
        return lambda name, stages: name in PAPERS and stages == at

    rows: list[tuple[object, ...]] = []
    for way in [way for way in (*WAYS, "local-search", "exact") if of_keras.excess[way]]:
        of_papers = (of_keras.mean(way, papers(at)) for at in PAPERS_GAPS)
        name = way.format(settings.samples)
        rows.append((name, of_keras.mean_and_worst(way), *of_papers, of_dags.mean_and_worst(way)))
    rows.append(("RESPECT as published", "", *(f"{gap:.2%}" for gap in PAPERS_GAPS.values()), ""))
    columns = ("mean / worst", "Keras", *(f"the paper's, k = {at}" for at in PAPERS_GAPS), "DAGs of 30")
    instances = f"{len(of_keras.excess[RESPECT])} Keras and {len(of_dags.excess[RESPECT])} DAGs"
    show(
        f"Excess of the peak parameter bytes over the proven optimum, {instances}; the paper's ten networks alone",
        columns,
        rows,
    )
    rows = []
    for name, found in (("Keras", of_keras), ("DAGs of 30", of_dags)):
        for network in found.violated:
            backwards, edges = (sum(each) for each in zip(*found.violated[network], strict=True))
            taken_s = middle_and_most(found.seconds[network]) if found.seconds[network] else ("", "")
            rows.append((f"{name}: {network}", f"{backwards / edges:.1%}", *taken_s))
        for way in (RESPECT, "local-search", "exact"):
            if found.seconds[way]:
                what = {RESPECT: "rho of an order"}.get(way, way)
                rows.append((f"{name}: {what}", "", *middle_and_most(found.seconds[way])))
    show("Edges backwards before the repair, and seconds", ("", "edges backwards", "median", "most"), rows)


def inference(names: Sequence[str], counts: Sequence[int]) -> None:
    """Show simulated speed-ups over the compiler's stand-in on Edge TPUs at a hub, beside the paper's means."""
    found, keeper = instances(names, counts, Keeper(None)), Keeper(None)
    schedulers = {"respect": "RESPECT", "ideals": "optimum"}
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    for each in track(found, description="Figure 4", transient=True):
        problem = each.problem("memory,communication")
        taken_ms = {name: each.ms(keeper.plan(problem, name).stages) for name in (BASELINES[COMPILER], *schedulers)}
        for name in schedulers:
            ratios[name, each.stages].append(taken_ms[BASELINES[COMPILER]] / taken_ms[name])
    rows: list[tuple[object, ...]] = [
        (
            f"{label}, mean (least to most)",
            *(f"{statistics.mean(r):.3f} ({min(r):.2f} to {max(r):.2f})" for r in (ratios[name, at] for at in counts)),
        )
        for name, label in schedulers.items()
    ]
    rows.append(("RESPECT as published, mean (most)", *(f"{PAPERS_SPEED_UPS.get(at, '')}" for at in counts)))
    title = f"Figure 4, simulated on one USB hub: speed-up over equal parameters, {len(names)} networks"
    show(title, ("plan", *(f"{at} stages" for at in counts)), rows)


def middle_and_most(seconds: Sequence[float]) -> tuple[str, str]:
    return s(statistics.median(seconds)), s(max(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=SHIPPED, help="a file of weights")
    parser.add_argument("--released", type=Path, default=RELEASED, help="weights of `train_respect.py --as-released`")
    parser.add_argument("--short", action="store_true", help="a few graphs and samples")
    args = parser.parse_args()
    trained = network_weights(args.weights)
    cells = len(trained["pointer/vector"])
    samples, search_s = (2, 0.01) if args.short else (16, 0.5)
    others = untrained(COLUMNS, cells, SEED), network_weights(args.released)
    settings = Settings(trained, *others, samples, search_s)
    names = sorted(path.stem for path in (ROOT / "profiles/keras").glob("*.json"))
    counts = range(2, 7)
    if args.short:
        names, counts = ["MobileNetV2"], range(4, 5)
    for graph, stages in () if args.short else held_out(1):  # all compiled loops are loaded now
        compare([(graph, stages)], replace(settings, search_s=0.01))
    of_keras = compare([(keras(name), counts) for name in names], settings)
    of_dags = compare(held_out(5)[4:] if args.short else held_out(300), replace(settings, search_s=0.05))
    report(of_keras, of_dags, settings)
    inference(["ResNet50"] if args.short else PAPERS, [4, 6] if args.short else list(PAPERS_SPEED_UPS))
    excess = statistics.mean(of_keras.excess[RESPECT].values())
    print(f"{RESPECT}: {excess:.2%} in the mean of the Keras networks (required: at most {MOST_EXCESS:.0%})")
    sys.exit(excess > MOST_EXCESS and not args.short)


if __name__ == "__main__":
    main()
