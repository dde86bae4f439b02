"""Table II of SEC 2022, row by row: which operators each of its nine first cuts puts in front, and what that takes.

The cuts are drawn in the paper's Figure 3 and named nowhere. They follow in three steps, and each row says which of
them decided it:

1. bytes: all pairs of downsets of the network whose stages hold and fetch what the row says. A convolution holds
   CHANNEL_BYTES for each output channel beyond its parameters, and a normalisation that is not folded fetches
   STREAMED_BYTES a channel for each of its two operators and is never cached. With these two constants every figure of
   the table is met within TOLERANCE_MIB.
2. text: the rules that section III-B states of rows IV, V, VI, VIII and IX.
3. time: of what is still open, the choice for which the nine times lie nearest to one line over the bytes that are
   fetched and the bytes that cross the cut. A row that was chosen so proves nothing of a model of time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np
from edgetpu_model import AFFINE, as_tflite, frame_ms, hub, mean_and_median, published
from planner import keras, show

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.planning.search.cuts import Cuts, ideals

MIB = 2**20
CHANNEL_BYTES = 10
STREAMED_BYTES = 16
TOLERANCE_MIB = 0.01  # two figures of two digits each, and what is left of the two constants
STREAMED_TOLERANCE_MIB = 0.001
BLOCK = "conv4_block6_"
ADD, POOL, NORMALISED, FIRST_CONV = "conv4_block5_out", "max_pooling2d_2", f"{BLOCK}preact_bn", f"{BLOCK}1_conv"


@dataclass(frozen=True)
class Choice:
    """A first cut: the operators in front of it, and the bytes that cross it."""

    front: frozenset[str]
    crossing_bytes: int

    @property
    def ends(self) -> str:
        """The last operator in front, but for the shortcut's pooling, which says where it stands itself."""
        return _last(self.front - {POOL})

    @property
    def pooled_in(self) -> int:
        return 0 if POOL in self.front else 1

    @property
    def keeps_children_together(self) -> bool:
        """Whether the two readers of the block's first sum stand in one stage."""
        return (f"{NORMALISED}/mul" in self.front) == (POOL in self.front)


@dataclass(frozen=True)
class Reading:
    """A row of the table with its cut, and how the cut was found: `bytes`, `text` or `time`."""

    row: dict[str, Any]
    choice: Choice
    by: str
    by_bytes: int
    rms_otherwise_ms: float


# What section III-B says of a row beyond its bytes.
RULES: dict[str, Callable[[Choice], bool]] = {
    "IV": lambda c: c.ends == FIRST_CONV,  # a tensor of (14, 14, 256) is handed over
    "V": lambda c: c.ends == NORMALISED,  # from ReLU to convolution, (14, 14, 1024)
    "VI": lambda c: c.keeps_children_together,
    "VIII": lambda c: not c.keeps_children_together,
    "IX": lambda c: c.keeps_children_together,
}


def network() -> OperatorGraph:
    return as_tflite(keras("ResNet50V2"))


def _order() -> dict[str, int]:
    return {operator.name: index for index, operator in enumerate(network().operators)}


def _last(names: frozenset[str]) -> str:
    return max(names, key=_order().__getitem__)


def held_and_streamed_mib(cuts: Cuts) -> tuple[Any, Any]:
    """Return for each cut the MiB that its operators hold where there is room, and the MiB that they always fetch."""
    held, streamed = [], []
    for operator in cuts.graph.operators:
        channels = operator.outputs[0].shape[-1]
        affine = operator.param_bytes > 0 and (operator.kind == "Mul" or operator.kind in ("Add", *AFFINE))
        held.append(0 if affine else operator.param_bytes + (CHANNEL_BYTES * channels if operator.param_bytes else 0))
        streamed.append(STREAMED_BYTES * channels if affine else 0)
    return cuts.sums(held) / MIB, cuts.sums(streamed) / MIB


def by_bytes(row: dict[str, Any], ends: str, cuts: Cuts) -> list[Choice]:
    """Return every first cut that the row's MiB allow, with a second stage that ends with the operator `ends`."""
    held, streamed = held_and_streamed_mib(cuts)
    (first_dram, second_dram), (first_cache, second_cache) = row["dram_mib"], row["cache_mib"]
    found = []
    for cut in np.flatnonzero(abs(held + streamed - first_dram - first_cache) <= TOLERANCE_MIB):
        behind = np.flatnonzero(
            (abs(held - held[cut] - second_cache) <= TOLERANCE_MIB)
            & (abs(streamed - streamed[cut] - second_dram) <= STREAMED_TOLERANCE_MIB)
        )
        behind = behind[cuts.inside(int(cut), behind)]
        names = [frozenset(cuts.stages([int(cut), int(other), len(cuts) - 1])[1]) for other in behind]
        if any(ends in second for second in names):
            front = frozenset(cuts.stages([int(cut), len(cuts) - 1])[0])
            found.append(Choice(front, int(cuts.crossing_bytes[cut])))
    return found


def line_rms_ms(rows: Sequence[dict[str, Any]], choices: Sequence[Choice]) -> tuple[float, Any]:
    """Return how far the times are from the nearest line, and its ms: fixed, a fetched MiB, a crossing MiB."""
    columns = [[1.0, sum(row["dram_mib"]), c.crossing_bytes / MIB] for row, c in zip(rows, choices, strict=True)]
    times = np.array([row["ms"] for row in rows])
    line = np.linalg.lstsq(np.array(columns), times, rcond=None)[0]
    return float(np.sqrt(np.mean((np.array(columns) @ line - times) ** 2))), line


def readings() -> tuple[list[Reading], Any]:
    """Return the reading of every row, and the line through their times."""
    table = published("sec2022-table-2")
    rows, cuts = table["rows"], ideals(network())
    assert cuts is not None
    allowed = [by_bytes(row, table["second_stage_ends"], cuts) for row in rows]
    stated = [list(filter(RULES.get(r["choice"], bool), found)) for r, found in zip(rows, allowed, strict=True)]
    ranked = sorted(
        ((line_rms_ms(rows, taken)[0], taken) for taken in itertools.product(*stated) if _different(rows, taken)),
        key=lambda each: each[0],
    )
    best = ranked[0][1]
    found = []
    for index, row in enumerate(rows):
        by = "bytes" if len(allowed[index]) == 1 else "text" if len(stated[index]) == 1 else "time"
        other = next((rms for rms, taken in ranked if taken[index] != best[index]), nan)
        found.append(Reading(row, best[index], by, len(allowed[index]), other))
    return found, line_rms_ms(rows, best)[1]


def _different(rows: Sequence[dict[str, Any]], taken: Sequence[Choice]) -> bool:
    """Return whether rows of the same bytes and other times have other cuts; a cut has one time."""
    times: dict[Choice, float] = {}
    return all(times.setdefault(choice, row["ms"]) == row["ms"] for row, choice in zip(rows, taken, strict=True))


def stages_of(graph: OperatorGraph, choice: Choice, second_ends: str) -> tuple[Stage, ...]:
    names = graph.operator_names
    rest = names[names.index(second_ends) + 1 :]
    first = tuple(name for name in names if name in choice.front)
    second = tuple(name for name in names if name not in choice.front and name not in rest)
    return tuple(Stage((f"tpu{index}",), part) for index, part in enumerate((first, second, tuple(rest))))


def table_2() -> None:
    """Print the nine rows with their cuts, and what the judge, the simulator and the line say of each."""
    found, line = readings()
    graph, ends = network(), published("sec2022-table-2")["second_stage_ends"]
    problem = Problem(graph, hub(3), unmeasured(graph), stages=3)
    lines = []
    errors: dict[str, list[float]] = {"judge": [], "simulator": [], "line through the nine times": []}
    for reading in found:
        row, choice = reading.row, reading.choice
        stages = stages_of(graph, choice, ends)
        guesses = {
            "judge": frame_ms(problem, stages),
            "simulator": 1e3 / (simulate(problem, stages, 300).statistics.throughput_fps or nan),
            "line through the nine times": float(
                line @ np.array([1.0, sum(row["dram_mib"]), choice.crossing_bytes / MIB])
            ),
        }
        cells = [row["choice"], choice.ends.replace("conv", "c").replace("block", "b"), choice.pooled_in]
        cells += [f"{choice.crossing_bytes / 1e3:.0f}", reading.by_bytes, reading.by, f"{row['ms']:.1f}"]
        for who, ms in guesses.items():
            errors[who].append(ms / row["ms"] - 1)
            cells.append(f"{ms:.1f} {errors[who][-1]:+.0%}")
        otherwise = "" if isnan(reading.rms_otherwise_ms) else f"{reading.rms_otherwise_ms:.2f}"
        lines.append((*cells, otherwise))
    columns = ("choice", "stage 0 ends with", "pool in", "kB cross", "cuts by bytes", "decided by", "published, ms")
    rms = line_rms_ms([r.row for r in found], [r.choice for r in found])[0]
    title = f"Table II, ResNet50V2 in 3 stages: its nine first cuts; the line's root mean square is {rms:.2f} ms"
    show(title, (*columns, "judge", "simulator", "line", "line if otherwise"), lines)
    print(
        f"The line: {line[0]:.1f} ms + {line[1]:.2f} ms for each MiB that stages 0 and 1 fetch "
        f"({MIB / line[1] / 1e3:.0f} MB/s) + {line[2]:.2f} ms for each MiB that crosses ({MIB / line[2] / 1e3:.0f} "
        "MB/s, out and in).\n"
    )
    means = ", ".join(f"{who} {mean_and_median(off)}" for who, off in errors.items())
    guessed = sum(reading.by == "time" for reading in found)
    print(
        f"Error of the nine, mean / median: {means}.\n"
        f"The line was fitted to them, and {guessed} of the cuts were chosen by it.\n"
    )
