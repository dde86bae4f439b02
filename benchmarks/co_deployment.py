"""Measure the gap that `deploy` states for two large models on Edge TPUs, and what memory does to a deployment.

    python benchmarks/co_deployment.py                # both parts, up to a minute for each row
    python benchmarks/co_deployment.py --only memory  # one of gaps, memory
    python benchmarks/co_deployment.py --short        # a little of each, for CI

1. gaps: pairs of networks at 10 fps each on 4 and 8 modelled Edge TPUs over PCIe, with the default time limit: the
   utilisation of the busiest device, the bound of all deployments, and the gap after the first deployment (before
   CP-SAT) and at the end. On 8 devices also at 10 and 30 fps.
2. memory: the first pair on 4 of these devices with less and less memory. Activations are those of all stages of all
   models on a device; beside it, what the deployment that counts parameters alone would hold.

The loops are compiled before. A row takes CPU seconds of this process, which include those of the solver's threads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks.planner and tests.support

from benchmarks.planner import FIGURES, ROOT, coral, figure, keras, run_parts, s, show
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline.planning.deployment import Demand, deploy
from tvm_pipeline.planning.together.deployment_judge import held_together
from tvm_pipeline.planning.together.first_deployment import first_deployment

PAIRS = (
    ("InceptionResNetV2", "DenseNet201"),
    ("NASNetLarge", "ResNet152"),
    ("ResNet101", "DenseNet169"),
)
SMALL = ("ResNet50", "MobileNetV2")
TINY = ("swiftnet-cell-b", "swiftnet-cell-c")
MEGABYTES = (None, 28, 24, 22, 20)
SHORT_S = 0.2


def graph_of(name: str) -> OperatorGraph:
    for folder, start in (("tflite", "NASNet"), ("swiftnet", "swiftnet")):
        if name.startswith(start):
            return read_graph(ROOT / "profiles" / folder / f"{name}.json")
    return keras(name)


def demands_of(names: Sequence[str], platform: Platform, rates: Sequence[float] = (10.0, 10.0)) -> list[Demand]:
    graphs = map(graph_of, names)
    return [Demand(Problem(g, platform, unmeasured(g)), rate) for g, rate in zip(graphs, rates, strict=True)]


def percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.2%}"


def gaps(short: bool) -> None:
    rows, found_gaps, walls = [], [], []
    cases = [(pair, count, (10.0, 10.0)) for pair in PAIRS for count in (4, 8)] + [(PAIRS[0], 8, (10.0, 30.0))]
    for pair, count, rates in [(TINY, 2, (10.0, 10.0))] if short else cases:
        demands = demands_of(pair, coral(count), rates)
        at_once = deploy(demands, 0.0)
        started, cpu = time.perf_counter(), time.process_time()
        found = deploy(demands, SHORT_S if short else None)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        most = max(found.utilisation.values())
        found_gaps.append(found.gap or 0.0)
        walls.append(wall)
        stages = " + ".join(str(len(plan.stages)) for plan in found.plans)
        models = " + ".join(f"{name}@{rate:g}" for name, rate in zip(pair, rates, strict=True))
        row = (stages, percent(at_once.gap), percent(most), percent(found.bound), percent(found.gap), found.status)
        rows.append((models, count, *row, s(wall), s(cpu)))
    columns = ("models", "TPUs", "stages", "gap at 0 s", "busiest", "bound", "gap", "status", "in", "CPU")
    show("1. Two models on modelled Edge TPUs", columns, rows)
    widest = figure("widest gap", max(found_gaps), percent)
    show("", FIGURES, [widest, figure("longest search", max(walls), s, 60.0)])


def memory(short: bool) -> None:
    rows = []
    pair, count = (TINY, 2) if short else (PAIRS[0], 4)
    for megabytes in (20,) if short else MEGABYTES:
        size = None if megabytes is None else megabytes * 1_000_000
        base = coral(count)
        platform = replace(base, devices=tuple(replace(device, memory_bytes=size) for device in base.devices))
        demands = demands_of(pair, platform)
        label = "any" if megabytes is None else f"{megabytes} MB"
        by_parameters = [replace(d, problem=replace(d.problem, activations=False)) for d in demands]
        first = first_deployment(by_parameters, time.monotonic() + (SHORT_S if short else 10.0))
        without = "none"
        if first.plans is not None and size is not None:
            held = held_together(demands, first.plans)
            without = (
                f"{max(sum(h.param_bytes + h.activation_bytes for h in row) for row in held.values()) / 1e6:.1f} MB"
            )
        try:
            found = deploy(demands, SHORT_S if short else None)
        except NoPlanError as error:
            rows.append((label, without, type(error).__name__, "", "", ""))
            continue
        most = max(found.utilisation.values())
        holds = f"{max(found.memory_bytes.values(), default=0) / 1e6:.1f} MB"
        rows.append(
            (
                label,
                without if size else "",
                holds if size else "",
                percent(most),
                percent(found.bound),
                percent(found.gap),
            )
        )
    columns = ("memory of a device", "held, by parameters alone", "held", "busiest", "bound", "gap")
    show(f"2. {' + '.join(pair)} on {count} devices with memory_bytes", columns, rows)


PARTS = {"gaps": gaps, "memory": memory}


def compile_loops(short: bool) -> None:
    if not short:
        first_deployment(demands_of(SMALL, coral(2)), time.monotonic() + 3.0)


if __name__ == "__main__":
    run_parts(__doc__, PARTS, compile_loops)
