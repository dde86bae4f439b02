"""Profiles taken beside a disturbing program against quiet ones: with disturbed samples recognised, and without.

    python benchmarks/disturbed_profile.py

A program loads one core, for 60 ms in every 120, or for 2 s in every 4. Quiet and disturbed profiles take turns. "All
samples" is the median of the same run's first passes, whatever disturbed them. A profile that is refused says why, and
the table what it would have said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from networks import load
from rich.console import Console
from rich.table import Table

from tvm_pipeline import Device
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.profiling.device_bench import Bench
from tvm_pipeline.profiling.operators import figures
from tvm_pipeline.profiling.rounds import Rounds
from tvm_pipeline.workflow.steps import Compiled, compile_source

QUIET = "quiet"
LOADS = {"60 ms of 120": (0.06, 0.06), "2 s of 4": (2.0, 2.0)}
SPIN = """
import os, sys, time
core, busy, idle = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {core})
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + busy
    while time.perf_counter() < end:
        pass
    time.sleep(idle)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="squeezenet")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="a small network and one load, once: proves that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    made = compile_source(load("branching") if arguments.short else arguments.model)
    rounds = 1 if arguments.short else arguments.rounds
    console = Console(width=140)
    taken: list[Taken] = []
    core = made.platform.devices[min(1, len(made.platform.devices) - 1)].cores[-1]
    for _ in range(rounds):
        for case in (QUIET, *list(LOADS)[: 1 if arguments.short else None]):
            with loaded(core, *LOADS.get(case, (0.0, 1.0))):
                taken.append(profiled(made, case, 8 if arguments.short else 24, strict=not arguments.short))
            refused = ", refused" if taken[-1].is_refused else ""
            console.print(f"{case}: {taken[-1].spent_s:.1f} s{refused}", *taken[-1].said, sep="\n  ")
    found = summarise(taken, made.platform.devices)
    show(console, found, f"{made.compiled.graph.name}, a load on core {core}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


@contextmanager
def loaded(core: int, busy_s: float, idle_s: float) -> Iterator[None]:
    """Load a core while the block lasts; not at all for 0 busy seconds."""
    if not busy_s:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", SPIN, str(core), str(busy_s), str(idle_s)]) as program:
        try:
            yield
        finally:
            program.kill()


@dataclass(frozen=True)
class Taken:
    """One profile.

    Attributes:
        believed_s: seconds of the whole model on each device.
        all_s: the same from all samples of the first rounds.
        is_refused: whether it is a strict profile that was refused; `believed_s` then is what it would have said.
        said: warnings, or why it was refused.
    """

    case: str
    spent_s: float
    believed_s: dict[str, float]
    all_s: dict[str, float]
    is_refused: bool
    said: list[str]


def profiled(made: Compiled, case: str, repeats: int, strict: bool) -> Taken:
    with ExitStack() as opened:
        benches = {d: opened.enter_context(closing(Bench(made.compiled, d))) for d in made.platform.devices}
        rounds = Rounds(benches, repeats, lambda: None, strict)
        rounds.measure()
    all_s = {
        device.name: statistics.median(timing.seconds for timing in bench.measured.whole[:repeats])
        for device, bench in benches.items()
    }
    devices, said = figures(made.compiled.graph, rounds, strict=False)
    is_refused = False
    try:
        figures(made.compiled.graph, rounds, strict)
    except ProfileError:
        is_refused = True
    believed_s = {device.name: found.whole_s for device, found in devices.items()}
    return Taken(case, rounds.spent_s, believed_s, all_s, is_refused, said)


def summarise(taken: list[Taken], devices: tuple[Device, ...]) -> list[dict]:
    """Return, for each case and device, the ratios to the median of the quiet profiles, and how many were refused."""
    rows = []
    for case in dict.fromkeys(p.case for p in taken):
        mine = [profile for profile in taken if profile.case == case]
        for name in (device.name for device in devices):
            quiet = [p for p in taken if p.case == QUIET]
            accepted = [p for p in quiet if not p.is_refused] or quiet
            quiet_s = statistics.median(p.believed_s[name] for p in accepted)
            rows.append(
                {
                    "load": case,
                    "device": name,
                    "quiet_s": quiet_s,
                    "all_samples": [round(p.all_s[name] / quiet_s, 4) for p in mine],
                    "recognised": [round(p.believed_s[name] / quiet_s, 4) for p in mine if not p.is_refused],
                    "refused": [round(p.believed_s[name] / quiet_s, 4) for p in mine if p.is_refused],
                    "longest_s": max(p.spent_s for p in mine),
                }
            )
    return rows


def show(console: Console, rows: list[dict], title: str) -> None:
    table = Table(
        *("load", "device", "quiet ms", "all samples / quiet", "recognised / quiet", "refused / quiet", "longest s"),
        title=title,
    )
    for row in rows:
        table.add_row(
            row["load"],
            row["device"],
            f"{row['quiet_s'] * 1e3:.2f}",
            span(row["all_samples"]),
            span(row["recognised"]),
            span(row["refused"]),
            f"{row['longest_s']:.0f}",
        )
    console.print(table)


def span(ratios: list[float]) -> str:
    """Return how many ratios there are, their median and their range."""
    if not ratios:
        return "none"
    return f"{len(ratios)}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
