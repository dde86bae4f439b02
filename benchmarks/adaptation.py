"""Table 5 of Velasco-Montero et al. (IEEE Access 2023) on this machine: what adapts to a load, how well, at what cost.

The network is MobileNet with default kernels, as in the paper. The loads are those of loads.py, which says what each
one stands for. The paper's devices are the GPU and the CPU of a Jetson TX2. Without a GPU they are two halves of the
CPU here; the load of the GPU is then pinned to the first half, every other load to the second one.

Under each load these run in turns, for several rounds: either device alone; the cut of Algorithm 1 for the idle machine
(static cut); the planner's candidates for the idle machine, whose best by prediction is the static plan; and the
strategies that adapt. `line-search` (the paper's Algorithm 2) and `balance` begin with the static cut, since they only
move a cut; `replan` begins with the static plan. "m kept" is the reading of the listing in which periods under one load
are averaged with those under the next. What adapts runs without the load until a search would have ended, then under
it. The oracle is the best of what does not adapt, measured under the load.

"settled" counts the last seconds, "all" everything from the onset, searches and trials included. A change of plan is
timed from the onset, in seconds and in results. Trials are the changes; slow frames are those that ran on a cut that
was more than 2 % slower than the plan at the onset had become, and had been left again at the end.

    python benchmarks/adaptation.py           # about half an hour
    python benchmarks/adaptation.py --short
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise, repeat, takewhile
from pathlib import Path

from loads import LOADS, Load
from networks import load
from rich.console import Console
from rich.table import Table

from tvm_pipeline import Problem, detect_platform, planning, profile_model, settle_platform
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.plan import Plan, Prediction, Stage, describe
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.runtime import Adaptation, LivePipeline, Pipeline
from tvm_pipeline.runtime.frame_stream import FrameStream
from tvm_pipeline.runtime.strategy import Strategy
from tvm_pipeline_papers.algorithm_1 import algorithm_1
from tvm_pipeline_papers.balance import Balance
from tvm_pipeline_papers.line_search import LineSearch

CONSOLE = Console(width=180)
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "line-search": LineSearch,
    "line-search, m kept": lambda: LineSearch(keeps_m=True),
    "balance": Balance,
    "replan": Adaptation,
}
SLOWER = 1.02


@dataclass(frozen=True, slots=True)
class Run:
    """One run under a load.

    Attributes:
        fps: of the last seconds.
        all_fps: from the onset of the load to the end.
        changes: of the plan since the onset: seconds and results since then.
        slow_frames: on cuts that were slower than the plan at the onset, without the last plan.
        last: the last plan: how many operators on which devices.
    """

    fps: float
    all_fps: float
    changes: tuple[tuple[float, int], ...] = ()
    slow_frames: int = 0
    last: str = ""


def run(
    pipeline: FrameStream,
    frame: dict,
    what: Load,
    cores: Sequence[int],
    quiet_s: float,
    settling_s: float,
    end_s: float,
) -> Run:
    """Run a saturated pipeline for `quiet_s` without the load, then under it; count the last `end_s`."""
    done: list[float] = []
    onset_s = math.inf
    with what.prepared(cores) as load_, pipeline:
        begin_s = time.perf_counter()
        last_s = begin_s + quiet_s + settling_s + end_s
        for result in pipeline.map(takewhile(lambda _: time.perf_counter() < last_s, repeat(frame))):
            if result.frame != len(done):
                raise SystemExit(f"frame {result.frame} came out where frame {len(done)} was due")
            done.append(time.perf_counter())
            if math.isinf(onset_s) and done[-1] > begin_s + quiet_s:
                onset_s = done[-1]
                load_.start()
    before = bisect_left(done, onset_s)
    fps = sum(last_s - end_s <= t <= last_s for t in done) / end_s
    all_fps = (bisect_left(done, last_s) - before) / (last_s - onset_s)
    if not isinstance(pipeline, LivePipeline):
        return Run(fps, all_fps)
    switches = [e for e in pipeline.events if e.kind == "switch" and e.time_s + pipeline.began_s > onset_s]
    changes = tuple((e.time_s + pipeline.began_s - onset_s, e.frame - before) for e in switches)
    edges = [before, *(event.frame for event in switches)]
    return Run(fps, all_fps, changes, slow_frames(done, edges), counted(pipeline.plan))


def counted(plan: Plan) -> str:
    return " | ".join(f"{len(stage.operators)} {'+'.join(stage.devices)}" for stage in plan.stages)


def slow_frames(done: Sequence[float], edges: Sequence[int]) -> int:
    """Return the frames on plans that were slower than the first, without those of the last plan.

    Args:
        done: when each result came.
        edges: the first frame of each plan; of the first one, the first frame that counts.
    """
    taken = [(end - begin, done[end - 1] - done[begin - 1]) for begin, end in pairwise(edges) if 0 < begin < end]
    if not taken:
        return 0
    usual_s = taken[0][1] / taken[0][0]
    return sum(count for count, seconds in taken[1:] if seconds / count > SLOWER * usual_s)


@dataclass(frozen=True, slots=True)
class Subject:
    """What runs under the loads: the pair of devices, the plans that stay, and the plan each strategy begins with."""

    compiled: CompiledModel
    problem: Problem
    pair: tuple[Device, Device]
    kept: dict[str, Plan]
    first: dict[str, Plan]

    def cores(self, what: Load) -> tuple[int, ...]:
        """Return where the load is pinned: to the half of the CPU that stands for its device; else nowhere."""
        if any(not device.cores for device in self.problem.platform.devices):
            return ()
        return self.pair[0 if what.on_gpu else 1].cores

    def make(self, name: str) -> FrameStream:
        if name in self.kept:
            return Pipeline(self.compiled, self.kept[name], self.problem.platform)
        return LivePipeline(self.compiled, self.problem, self.first[name], adaptation=STRATEGIES[name]())


def prepare(model: str, repeats: int, most: int | None) -> Subject:
    """Compile, profile and plan a network; `most` limits the plans that do not adapt."""
    backend, platform = settle_platform(detect_platform())
    group = max(disjoint_sets(platform.devices), key=len)
    if len(group) < 2:
        raise SystemExit(f"platform {platform.name} has no two devices that share no cores")
    # As in the paper, the accelerator is the first of the two.
    first, second = sorted(group, key=lambda device: bool(device.cores))[:2]
    compiled = backend.compile(load(model), platform.devices)
    profile = profile_model(backend, compiled, platform, repeats)
    for warning in profile.warnings:
        CONSOLE.print(f"warning: {warning}")
    problem = Problem(compiled.graph, platform, profile)
    two = replace(problem, platform=replace(platform, devices=(first, second)))
    names = tuple(compiled.graph.operator_names)
    alone = [
        judged(problem, Plan(model, "single", "throughput", (Stage((d.name,), names),), Prediction())) for d in group
    ]
    decision, static_cut = planning.plan(problem), algorithm_1(replace(two, stages=2))
    kept = {f"{plan.devices[0]} only": plan for plan in alone if plan.devices[0] in (first.name, second.name)}
    kept |= {"static cut": static_cut, "static plan": decision.plan}
    known = {plan.stages for plan in kept.values()}
    kept |= {describe(plan): plan for plan in decision.candidates if plan.stages not in known}
    kept = dict(islice(kept.items(), most))
    begin = {name: decision.plan if name == "replan" else static_cut for name in STRATEGIES}
    return Subject(compiled, problem, (first, second), kept, begin)


def measured(subject: Subject, what: Load, arguments: argparse.Namespace) -> dict[str, list[Run]]:
    """Return the runs of everything under one load, in turns."""
    frame = frame_of_noise(subject.compiled.graph)
    names = [*subject.kept, *subject.first]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for round_ in range(arguments.rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            adapts = name in subject.first
            quiet_s = arguments.quiet if adapts else min(0.5, arguments.quiet)
            settling_s = arguments.settling if adapts else min(1.0, arguments.settling)
            runs[name].append(
                run(subject.make(name), frame, what, subject.cores(what), quiet_s, settling_s, arguments.seconds)
            )
    return runs


def rates(subject: Subject, runs: dict[str, list[Run]]) -> list[str]:
    """Return a row: frames a second of everything, and of what adapts the part of the oracle's, round by round."""
    fps = {name: statistics.median(r.fps for r in rows) for name, rows in runs.items()}
    oracle = max(subject.kept, key=fps.__getitem__)
    row = [f"{fps[name]:.1f}" for name in list(subject.kept)[:4]]
    row.append(f"{fps[oracle]:.1f} {oracle}")
    for name in subject.first:
        pairs = list(zip(runs[name], runs[oracle], strict=True))
        settled = [mine.fps / best.fps for mine, best in pairs]
        since_onset = [mine.all_fps / best.fps for mine, best in pairs]
        row.append(
            f"{fps[name]:.1f}: {statistics.median(settled):.3f} ({min(settled):.2f}-{max(settled):.2f}), "
            f"all {statistics.median(since_onset):.3f}"
        )
    return row


def costs(runs: dict[str, list[Run]], name: str) -> list[str]:
    """Return a row: medians of what the changes of plan took and cost, and the last plan of the last round."""
    rows = runs[name]
    changed = [r.changes for r in rows if r.changes]
    if not changed:
        return ["no change", "no change", "0", "0", rows[-1].last]

    def shown(at: int) -> str:
        seconds = statistics.median(changes[at][0] for changes in changed)
        return f"{seconds:.2f} s, {statistics.median(changes[at][1] for changes in changed):.0f} frames"

    changes, slow = statistics.median(len(r.changes) for r in rows), statistics.median(r.slow_frames for r in rows)
    return [shown(0), shown(-1), f"{changes:g}", f"{slow:g}", rows[-1].last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mobilenet")
    parser.add_argument("--seconds", type=float, default=4.0, help="that count at the end of a run")
    parser.add_argument("--quiet", type=float, default=5.0, help="before the load, of what adapts")
    parser.add_argument(
        "--settling", type=float, default=12.0, help="from the onset until `seconds` count, of what adapts"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--short", action="store_true", help="a small network under one load, briefly: proves that it works"
    )
    arguments = parser.parse_args()
    if arguments.short:
        arguments.model, arguments.loads, arguments.rounds = "branching", ["stress"], 1
        arguments.quiet, arguments.settling, arguments.seconds = 0.1, 0.2, 0.1

    subject = prepare(arguments.model, *((4, 4) if arguments.short else (24, None)))
    rate_table = Table("load", *list(subject.kept)[:4], "oracle", *subject.first, title="frames a second; / oracle")
    cost_table = Table("load", "strategy", "first change", "last change", "changes", "slow frames", "last plan")
    found = {}
    for name in arguments.loads:
        what = LOADS[name]
        if reason := what.available():
            CONSOLE.print(f"{name} ({what.stands_for}) is left out: {reason}")
            continue
        where = subject.cores(what)
        CONSOLE.print(f"{name}: {what.stands_for}. Here {what.here()}" + (f", on cores {where}" if where else ""))
        found[name] = measured(subject, what, arguments)
        rate_table.add_row(name, *rates(subject, found[name]))
        for strategy in subject.first:
            cost_table.add_row(name, strategy, *costs(found[name], strategy))
        CONSOLE.print(rate_table, cost_table)
    CONSOLE.print(
        f"{arguments.model} on {' and '.join(device.name for device in subject.pair)}; medians of {arguments.rounds} "
        f"rounds; load average {os.getloadavg()[0]:.1f}"
    )
    if arguments.json:
        kept = {
            load_: {name: [asdict(r) for r in rows] for name, rows in runs.items()} for load_, runs in found.items()
        }
        arguments.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
