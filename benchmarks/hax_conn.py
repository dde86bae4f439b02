"""Schedule pairs of HaX-CoNN's networks on a GPU and a DLA, exactly, by the times that its solver states.

    python benchmarks/hax_conn.py --folder FOLDER   # a clone of github.com/ismetdagli/HaX-CoNN
    python benchmarks/hax_conn.py --short           # networks made here, against all schedules, for CI

HaX-CoNN (Dagli, Belviranli, PPoPP 2024) runs two networks at once. Each is a chain of groups of layers. A group runs on
the GPU or on the DLA of a Jetson, one group at a time on each, and a network that changes its processor pays for the
transition. The aim is the earliest end of both. `src/z3_solver_multi_dnn.py` has the milliseconds of the groups of
GoogleNet, a ResNet and AlexNet. It calls its transitions and its memory traffic dummy data, so contention is left out
here, and a transition costs the median of those that it states. Its file is read as text, and nothing of it runs.

`alone` is the best of three baselines: both on the GPU, or one on each. `one change` lets a network change its
processor once, as their solver does, and `any` as often as it likes. All ends are proven: labels are dropped only if
another one of the same state is as early in all, or if they cannot end before the best known schedule.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

NETWORKS = ("GoogleNet", "ResNet", "AlexNet")  # in the order of the file
SOLVER = "src/z3_solver_multi_dnn.py"
LISTS = re.compile(r"^[# ]*nn\d_(times|trans)_acc([12]) = (\[.*\])", re.M)
CONSOLE = Console(width=110)
Value = TypeVar("Value")
Times = tuple[tuple[float, ...], tuple[float, ...]]  # of each group, on the GPU and on the DLA


class Label(NamedTuple):
    """A part of a schedule: when each network and each processor is free."""

    ends: tuple[float, float]
    free: tuple[float, float]


def read_solver(path: Path) -> tuple[list[Times], float]:
    """Return the times of the networks and the median of the transitions, in ms."""
    networks: list[Times] = []
    transitions: list[float] = []
    gpu: tuple[float, ...] = ()
    for kind, processor, text in LISTS.findall(path.read_text()):
        # Numbers are parted by a comma and a space; `0,28` is 0.28.
        numbers = tuple(ast.literal_eval(text if kind == "trans" else re.sub(r"(\d),(\d)", r"\1.\2", text)))
        if kind == "trans":
            transitions += numbers
        elif processor == "1":
            gpu = numbers
        elif len(gpu) == len(numbers) and (gpu, numbers) not in networks:
            networks.append((gpu, numbers))
    if len(networks) != len(NETWORKS) or not transitions:
        sys.exit(f"{path} states the times of {len(networks)} networks, not those of {', '.join(NETWORKS)}")
    return networks, median(transitions)


def alone(pair: tuple[Times, Times]) -> float:
    (gpu, dla), (other_gpu, other_dla) = ((sum(times[0]), sum(times[1])) for times in pair)
    return min(gpu + other_gpu, max(gpu, other_dla), max(dla, other_gpu))


def earliest_end(pair: tuple[Times, Times], transition: float, most_changes: int) -> float:
    """Return the earliest end of two networks; each may change its processor so often."""
    lengths = tuple(len(times[0]) for times in pair)
    fastest = [[min(both) for both in zip(*times, strict=True)] for times in pair]
    rest = [
        [sum(row[at:]) for at in range(len(row) + 1)] for row in fastest
    ]  # the least that is left behind each group
    best = alone(pair)
    states: defaultdict[tuple[tuple[int, int], tuple[int, int], tuple[int, int]], list[Label]] = defaultdict(list)
    states[(0, 0), (-1, -1), (0, 0)] = [Label((0.0, 0.0), (0.0, 0.0))]
    for done in itertools.product(*(range(length + 1) for length in lengths)):
        for state in [state for state in states if state[0] == done]:
            for label in states.pop(state):
                for network, processor in itertools.product((0, 1), (0, 1)):
                    at = state[0][network]
                    if at == lengths[network]:
                        continue
                    changed = state[1][network] not in (-1, processor)
                    changes = _with(state[2], network, state[2][network] + changed)
                    if changes[network] > most_changes:
                        continue
                    begin = max(label.ends[network] + transition * changed, label.free[processor])
                    end = begin + pair[network][processor][at]
                    ends, after = _with(label.ends, network, end), _with(state[0], network, at + 1)
                    bound = max(ends[0] + rest[0][after[0]], ends[1] + rest[1][after[1]])
                    if bound >= best:
                        continue
                    if after == lengths:
                        best = bound
                    key = after, _with(state[1], network, processor), changes
                    _add(states[key], Label(ends, _with(label.free, processor, end)))
    return best


def _with(pair: tuple[Value, Value], index: int, value: Value) -> tuple[Value, Value]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


def _add(labels: list[Label], new: Label) -> None:
    """Keep the labels that no other one is as early as."""

    def no_later(one: Label, other: Label) -> bool:
        return all(a <= b for a, b in zip(one.ends + one.free, other.ends + other.free, strict=True))

    if not any(no_later(label, new) for label in labels):
        labels[:] = [label for label in labels if not no_later(new, label)] + [new]


def of_all_schedules(pair: tuple[Times, Times], transition: float, most_changes: int) -> float:
    """Return the earliest end of all choices of processors and of all orders, one by one."""
    lengths = [len(times[0]) for times in pair]
    orders = set(itertools.permutations([0] * lengths[0] + [1] * lengths[1]))
    best = float("inf")
    for placed in itertools.product(*(itertools.product((0, 1), repeat=length) for length in lengths)):
        if any(sum(a != b for a, b in itertools.pairwise(row)) > most_changes for row in placed):
            continue
        for order in orders:
            ends, free, at = [0.0, 0.0], [0.0, 0.0], [0, 0]
            for network in order:
                where = placed[network][at[network]]
                changed = at[network] > 0 and where != placed[network][at[network] - 1]
                begin = max(ends[network] + transition * changed, free[where])
                ends[network] = free[where] = begin + pair[network][where][at[network]]
                at[network] += 1
            best = min(best, max(ends))
    return best


def check() -> None:
    """Compare the search with all schedules of small networks."""
    draw = random.Random(0)
    for _ in range(40):
        first, second = draw.randint(1, 4), draw.randint(1, 3)
        pair: tuple[Times, Times] = (_random(draw, first), _random(draw, second))
        for changes in (1, 9):
            found, least = earliest_end(pair, 0.5, changes), of_all_schedules(pair, 0.5, changes)
            if abs(found - least) > 1e-9:
                sys.exit(f"{pair}: the search ends at {found}, and a schedule at {least}")
    CONSOLE.print("80 earliest ends equal those of all schedules")


def _random(draw: random.Random, groups: int) -> Times:
    gpu = tuple(float(draw.randint(1, 6)) for _ in range(groups))
    return gpu, tuple(time + draw.randint(0, 6) for time in gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help=f"a clone, which has {SOLVER}")
    parser.add_argument("--short", action="store_true", help="networks made here, against all schedules, for CI")
    args = parser.parse_args()
    check()
    if args.short:
        return
    if args.folder is None or not (args.folder / SOLVER).is_file():
        sys.exit(f"no {SOLVER} in {args.folder}: clone https://github.com/ismetdagli/HaX-CoNN and give --folder")
    networks, transition = read_solver(args.folder / SOLVER)
    table = Table(title=f"The earliest end of both networks, ms; a transition costs {transition:g} ms")
    for column in ("networks", "alone", "one change", "any", "gain", "seconds"):
        table.add_column(column, justify="left" if column == "networks" else "right")
    for (name, one), (other_name, other) in itertools.combinations(zip(NETWORKS, networks, strict=True), 2):
        begin = time.process_time()
        single, free = (earliest_end((one, other), transition, changes) for changes in (1, 99))
        seconds, base = time.process_time() - begin, alone((one, other))
        figures = (f"{base:.2f}", f"{single:.2f}", f"{free:.2f}", f"{base / free - 1:.0%}", f"{seconds:.2f}")
        table.add_row(f"{name} and {other_name}", *figures)
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
