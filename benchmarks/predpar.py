"""PredPar and Pred-ProfPar beside libcoral's partitioners, `measured`, formulas and local search, on a hidden device.

    python benchmarks/predpar.py           # 20 test networks and the 13 of Keras, in 2 to 8 segments
    python benchmarks/predpar.py --short   # a small network in 2 and 8 segments, for CI

No Edge TPU is here: the device is a board of our own making (`hidden_device.py`), the one that the shipped predictors
learned. So the figures compare methods, and say nothing of hardware. The test networks are like those that were
learned; of the kinds of networks of Keras, some were (`predpar_data.py`). Neither was learned itself.

Bottlenecks are without noise, over that of the best partition of the network's order on the board. `measured` counts
the segments that were compiled and measured, each once. `time` is the search's own on one core, and 10 s for each of
these, as on an Edge TPU. Searches:

- default: equal parameters, as the Edge TPU compiler cuts.
- ProfPar: libcoral's partitioner by profile, with its reset loop mended, and as it is published.
- PredPar, Pred-ProfPar: with the paper's features of nodes, and with the extended ones, which the package ships.
- exact: the best partition of the order by the formula (the shipped `DeviceModel`), by the formula calibrated to 20
  measured segments of other networks, and by the predictor's table, without a measurement. A table takes long: it is
  made for networks of up to 160 operators, once for all searches and numbers of segments, and counts in the first.
- measured: `corrected_partition`, which the scheduler `measured` uses, by the same three.
- local search: by the formula, in any order of the operators. So it may be better than the best in the network's order.

The paper's networks have as many segments as 6 MB each make; here every network is cut into every number.

Required: PredPar and Pred-ProfPar succeed always. With the extended features, the medians of their bottlenecks are at
most 1.15 and 1.02, but for `--short`. Else the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from planner import coral, show
from predpar_data import TESTED, board, keras_networks, labelled, networks, role, shipped_model
from profiling_partitioner import Case
from rich.progress import track

from tvm_pipeline.calibration.fit import calibrated
from tvm_pipeline.calibration.stage_time import StageTime
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline.planning.baselines.segments import Partition, even_cuts
from tvm_pipeline.planning.corrected import cheapest_segments, corrected_partition, model_seconds
from tvm_pipeline.planning.local.local_search import local_search
from tvm_pipeline.planning.search.cuts import Floats
from tvm_pipeline_papers.learned.partition_search import pred_profpar_partition, predpar_partition
from tvm_pipeline_papers.learned.predpar import SHIPPED
from tvm_pipeline_papers.learned.segment_predictor import SegmentPredictor, read_predictor, segment_predictor

PUBLISHED = Path(__file__).parents[1] / "benchmarks/milcom_published.json"
PAPERS, EXTENDED = Path(__file__).with_name("predpar.npz"), SHIPPED
COMPILE_S = 10.0
CALIBRATED_BY = 20  # measured segments, each of another network
SEGMENTS = range(2, 9)
MOVES = 100_000  # of local search, in all
# A predictor's table needs no segments that take longer than this many times PredPar's bottleneck.
BEYOND = 1.5
MOST_IN_TABLE = 160
MEDIANS = {"PredPar, extended": 1.15, "Pred-ProfPar, extended": 1.02}

DEFAULT, PROFPAR, ORIGINAL = "default", "ProfPar, mended", "ProfPar, as published"


def modelled(graph: OperatorGraph, count: int, model: DeviceModel) -> Problem:
    platform = Platform("modelled", tuple(replace(device, model=model) for device in coral(count).devices))
    return Problem(graph, platform, unmeasured(graph), stages=count)


@dataclass(frozen=True)
class Network:
    """A network on the board; tables are n+1 x n+1, in seconds.

    Attributes:
        true_s, noisy_s: on the board, and as measured.
        formula_s, calibrated_s: by the shipped model, and by the calibrated one.
        paper, extended: the predictors.
    """

    graph: OperatorGraph
    true_s: Floats
    noisy_s: Floats
    formula_s: Floats
    calibrated_s: Floats
    paper: SegmentPredictor
    extended: SegmentPredictor

    def measure(self, start: int, end: int) -> float:
        return float(self.noisy_s[start, end])

    def predicted(self, predictor: SegmentPredictor, segments: int) -> Partition:
        return predpar_partition(predictor.predicted, len(self.graph), even_cuts(self.graph, segments))

    def profiled(self, predictor: SegmentPredictor, segments: int) -> Partition:
        first = even_cuts(self.graph, segments)
        return pred_profpar_partition(predictor.predicted, self.measure, len(self.graph), first)

    def table_s(self, segments: int) -> Floats:
        """Return the table of the extended predictor, as far as it matters."""
        return self.extended.table(BEYOND * self.predicted(self.extended, segments).bottleneck_s)

    def exact(self, table_s: Floats, segments: int) -> Partition:
        chosen = cheapest_segments(table_s, segments, np.maximum)
        return Partition(tuple(start for start, _ in chosen[1:]), (), 0)

    def coral(self, segments: int, *, original: bool) -> Partition:
        return Case(self.graph, segments, self.formula_s, self.noisy_s).coral(original=original)


Search = Callable[[Network, int], Partition]
# A search that measures nothing has predicted all that its `evaluations` count.
PREDICTING: dict[str, Search] = {
    DEFAULT: lambda of, k: Partition(even_cuts(of.graph, k), (), 0),
    "PredPar, paper's": lambda of, k: of.predicted(of.paper, k),
    "PredPar, extended": lambda of, k: of.predicted(of.extended, k),
    "exact, formula": lambda of, k: of.exact(of.formula_s, k),
    "exact, calibrated": lambda of, k: of.exact(of.calibrated_s, k),
    "exact, predictor": lambda of, k: of.exact(of.table_s(k), k),
}
MEASURING: dict[str, Search] = {
    PROFPAR: lambda of, k: of.coral(k, original=False),
    ORIGINAL: lambda of, k: of.coral(k, original=True),
    "Pred-ProfPar, paper's": lambda of, k: of.profiled(of.paper, k),
    "Pred-ProfPar, extended": lambda of, k: of.profiled(of.extended, k),
    "measured, formula": lambda of, k: corrected_partition(of.formula_s, k, of.measure),
    "measured, calibrated": lambda of, k: corrected_partition(of.calibrated_s, k, of.measure),
    "measured, predictor": lambda of, k: corrected_partition(of.table_s(k), k, of.measure),
}
LOCAL = "local search, formula"
BY_TABLE = ("exact, predictor", "measured, predictor")
NAMES = (*PREDICTING, LOCAL, *MEASURING)


@dataclass
class Figures:
    """Of one search in one number of segments: of each network where it succeeds."""

    tried: int = 0
    ms: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)

    def __iadd__(self, other: Figures) -> Figures:
        self.tried += other.tried
        self.ms += other.ms
        self.gaps += other.gaps
        self.measured += other.measured
        self.own_s += other.own_s
        return self


def calibrated_model(count: int) -> DeviceModel:
    """Return the shipped model, refitted to a measured segment of each of the first networks that no test has."""
    times = []
    for index, graph in enumerate(networks(2 * count)):
        if role(index) != TESTED and len(times) < count:
            one = labelled(graph, board(), index, most=1)
            start, end = one.segments[0]
            operators = tuple(operator.name for operator in graph.operators[start:end])
            times.append(StageTime(graph, operators, float(one.seconds[0])))
    return calibrated(shipped_model(), times).model


def network(graph: OperatorGraph, model: DeviceModel, chance: np.random.Generator) -> Network:
    true_s, kept = board().seconds(graph), shipped_model().cached_bytes or 0
    formula, other = (modelled(graph, 1, it) for it in (shipped_model(), model))
    return Network(
        graph,
        true_s,
        board().measured(true_s, chance),
        model_seconds(formula, formula.platform.devices),
        model_seconds(other, other.platform.devices),
        *(segment_predictor(graph, kept, read_predictor(path)[0]) for path in (PAPERS, EXTENDED)),
    )


def searched_locally(of: Network, segments: int, moves: int) -> float:
    """Return the bottleneck, on the board, of local search by the formula."""
    stages = local_search(modelled(of.graph, segments, shipped_model()), moves=moves).stages
    by_name = {operator.name: operator for operator in of.graph.operators}
    ordered = tuple(by_name[name] for stage in stages for name in stage.operators)
    true_s = board().seconds(replace(of.graph, operators=ordered))
    ends = list(itertools.accumulate(len(stage.operators) for stage in stages))
    return max(float(true_s[segment]) for segment in itertools.pairwise((0, *ends)))


def compared(
    graphs: Iterable[OperatorGraph], counts: Sequence[int], moves: int, calibrated_by: int
) -> dict[tuple[int, str], Figures]:
    """Return the figures by number of segments and name of the search."""
    figures: dict[tuple[int, str], Figures] = defaultdict(Figures)
    model, chance = calibrated_model(calibrated_by), np.random.default_rng(0)
    for graph in graphs:
        of = network(graph, model, chance)
        for segments in counts:
            best_s = max(of.true_s[segment] for segment in cheapest_segments(of.true_s, segments, np.maximum))
            for name in NAMES:
                figure = figures[segments, name]
                if name in BY_TABLE and len(graph) > MOST_IN_TABLE:
                    continue
                figure.tried += 1
                # Of the predictions that others asked for, a search knows none but those of tables.
                alone = (
                    of
                    if name in BY_TABLE
                    else replace(of, paper=replace(of.paper, known={}), extended=replace(of.extended, known={}))
                )
                began, measured = time.process_time(), 0
                try:
                    if name == LOCAL:
                        slowest_s = searched_locally(of, segments, moves)
                    else:
                        found = (PREDICTING | MEASURING)[name](alone, segments)
                        parts = itertools.pairwise((0, *found.cuts, len(graph)))
                        slowest_s = max(float(of.true_s[segment]) for segment in parts)
                        measured = found.evaluations if name in MEASURING else 0
                except NoPlanError:
                    continue
                figure.own_s.append(time.process_time() - began)
                figure.measured.append(measured)
                figure.ms.append(1e3 * slowest_s)
                figure.gaps.append(slowest_s / best_s)
    return figures


def minutes(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def summary(title: str, figures: dict[tuple[int, str], Figures], counts: Sequence[int]) -> None:
    """Show a row for each search over all numbers of segments, then median bottlenecks and success by number."""
    rows, by_count = [], []
    for name in NAMES:
        total = Figures()
        for segments in counts:
            total += figures[segments, name]
        done = [figures[segments, name] for segments in counts]
        by_count.append((name, *(_middle(one.gaps) for one in done), *(_share(one) for one in done)))
        if total.gaps:
            gaps = (statistics.median(total.gaps), statistics.mean(total.gaps), max(total.gaps))
            asked = f"{statistics.median(total.measured):.0f}", str(max(total.measured))
            own_s = statistics.median(total.own_s)
            spent_s = statistics.median(map(lambda own, of: own + COMPILE_S * of, total.own_s, total.measured))
            rows.append(
                (name, _share(total), *(f"{gap:.3f}" for gap in gaps), *asked, minutes(own_s), minutes(spent_s))
            )
    columns = ("search", "succeeds", "bottleneck / best", "mean", "worst", "measured", "most", "own time", "time")
    show(title, columns, rows)
    show(
        f"{title}, by segments: median bottleneck / best, and success",
        ("search", *map(str, counts), *(f"{segments} ok" for segments in counts)),
        by_count,
    )


def beside_the_paper(figures: dict[tuple[int, str], Figures], counts: Sequence[int]) -> None:
    """Show mean bottlenecks over those of ProfPar (mended, here; at 8 segments of the paper over the compiler's)."""
    ours = (DEFAULT, "PredPar, paper's", "PredPar, extended", "Pred-ProfPar, paper's", "Pred-ProfPar, extended")
    rows = []
    for row in json.loads(PUBLISHED.read_text())["rows"]:
        segments, over = row["segments"], row["profpar_ms"]
        if segments in counts:
            theirs = ["failed"] * 3
            if over:
                theirs = [f"{row[name] / over:.2f}" for name in ("default_ms", "predpar_ms", "pred_profpar_ms")]
            base = statistics.mean(figures[segments, PROFPAR].ms or [math.nan])
            own = [f"{statistics.mean(figures[segments, name].ms or [math.nan]) / base:.2f}" for name in ours]
            rows.append((segments, *theirs, *own))
    columns = ("segments", "paper: default", "PredPar", "Pred-ProfPar", *(f"here: {name}" for name in ours))
    show("Mean bottleneck / that of ProfPar, on other networks and another device than the paper's", columns, rows)


def _middle(gaps: Sequence[float]) -> str:
    return f"{statistics.median(gaps):.2f}" if gaps else ""


def _share(figure: Figures) -> str:
    return f"{len(figure.gaps) / figure.tried:.0%}" if figure.tried else ""


def test_networks(count: int) -> list[OperatorGraph]:
    """Return the first networks that training never sees."""
    return [graph for index, graph in enumerate(networks(5 * count)) if role(index) == TESTED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=20, help="how many test networks")
    parser.add_argument("--short", action="store_true", help="a small network in 2 and 8 segments, for CI")
    args = parser.parse_args()
    counts: Sequence[int] = (2, 8) if args.short else SEGMENTS
    moves, calibrated_by = (MOVES // 100, 10) if args.short else (MOVES, CALIBRATED_BY)
    groups = {"Test networks": sorted(test_networks(2), key=len)[:1] if args.short else test_networks(args.networks)}
    if not args.short:
        groups["Keras"] = keras_networks()
    missed: list[str] = []
    for title, graphs in groups.items():
        figures = compared(track(graphs, title, transient=True), counts, moves, calibrated_by)
        summary(f"{len(graphs)} {title}", figures, counts)
        if title == "Test networks":
            beside_the_paper(figures, counts)
        for (segments, name), figure in figures.items():
            if "Pred" in name and len(figure.gaps) < figure.tried:
                missed.append(f"{title}: {name} failed in {segments} segments")
        for name, most in MEDIANS.items():
            middle = statistics.median(gap for segments in counts for gap in figures[segments, name].gaps)
            if middle > most and not args.short:
                missed.append(f"{title}: {name} {middle:.3f}, above {most}")
    if missed:
        raise SystemExit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
