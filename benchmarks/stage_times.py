"""Seconds of stages on a device that tells no times of operators, predicted from a few stages: how far off they are.

    python benchmarks/stage_times.py                 # four networks on a core of onnxruntime
    python benchmarks/stage_times.py --short         # one small network, for CI

onnxruntime's own kernels stand for an execution provider: they also tell the times of operators, for comparison. The
time of the whole model is shared out in four ways: by the operators' work, by the time of each operator as a stage of
its own, from measured stages (what `compile` does for a provider), and by onnxruntime's profiler. Then random stages
are compiled and timed, which none of them saw. The table has |predicted - measured| / measured, median and worst.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from networks import load_lively
from peers import CONSOLE, network_file
from rich.table import Table

from tvm_pipeline import Device, Platform, Problem, Profile, profile_model, settle_platform
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.operator_timing import OperatorTimer
from tvm_pipeline.calibration.stage_profile import with_stage_times
from tvm_pipeline.core.partition import longest_stages
from tvm_pipeline.cost.device_costs import cost_of
from tvm_pipeline.frontends import load
from tvm_pipeline.profiling import stage_timer
from tvm_pipeline_onnxruntime.onnxruntime_model import OnnxruntimeModel

WAYS = ("work", "operators alone", "measured stages", "profiler")


class StagesOnly(OnnxruntimeModel):
    """A model of which no device tells times of operators."""

    def has_operator_times(self, device: Device) -> bool:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["squeezenet", "mobilenet", "resnet-18", "centerface"])
    parser.add_argument("--stages", type=int, default=30, help="random ones that are timed")
    parser.add_argument("--short", action="store_true", help="one small network, briefly: proves that it works")
    options = parser.parse_args()
    if options.short:
        options.models, options.stages = ["branching"], 3
    table = Table("network", "operators", "measured stages", "seconds of these", *WAYS)
    for name in options.models:
        table.add_row(name, *row(name, options.stages))
    CONSOLE.print(table)


def row(name: str, count: int) -> list[str]:
    """Return the figures of one network."""
    with TemporaryDirectory() as folder:
        lively = load_lively(name)
        model = lively if lively.format == "onnx" else load(network_file(lively, Path(folder)))
    core = max(os.sched_getaffinity(0))
    backend, platform = settle_platform(Platform("box", (Device("npu", "onnxruntime", (core,)),)))
    [device] = platform.devices
    with closing(backend.compile(model, platform.devices)) as compiled:
        assert isinstance(compiled, OnnxruntimeModel)
        by_profiler = profile_model(backend, compiled, platform)
        with closing(StagesOnly(compiled.file.source, compiled.order)) as whole:
            by_work = profile_model(backend, whole, platform)
            began = time.perf_counter()
            by_stages = with_stage_times(whole, platform.devices, by_work)
            spent_s = time.perf_counter() - began
        profiles = (by_work, by_operators(compiled, device, by_work), by_stages, by_profiler)
        errors = np.array(errors_of(compiled, platform, profiles, count))
    cells = [f"{np.median(each):.1%} / {each.max():.1%}" for each in errors.T]
    return [str(len(compiled.graph)), str(len(by_stages.segments)), f"{spent_s:.1f}", *cells]


def by_operators(compiled: CompiledModel, device: Device, by_work: Profile) -> Profile:
    """Return a profile that shares the time of the model out by the times of stages of one operator."""
    with closing(OperatorTimer(compiled.graph, compiled.stage, compiled.values)) as timer:
        alone_s = np.median(timer.seconds(device, 24), axis=0)
    before = by_work.devices[device.name]
    shares_s = alone_s * before.whole_s / alone_s.sum()
    figures = replace(before, seconds=dict(zip(before.seconds, shares_s.tolist(), strict=True)))
    return replace(by_work, devices={device.name: figures})


def errors_of(
    compiled: CompiledModel, platform: Platform, profiles: Sequence[Profile], count: int
) -> list[list[float]]:
    """Return the relative errors of each profile (stages x profiles), on random stages that no profile has."""
    graph, [device] = compiled.graph, platform.devices
    timed, chance = stage_timer(compiled), np.random.default_rng(11)
    known = {frozenset(segment.operators) for profile in profiles for segment in profile.segments}
    names = graph.operator_names
    costs = [cost_of(Problem(graph, platform, profile), device) for profile in profiles]
    found: list[list[float]] = []
    while len(found) < count:
        start, end = sorted(chance.choice(len(names) + 1, 2, replace=False).tolist())
        stage = max(longest_stages(graph, names[start:end]), key=len)
        if frozenset(stage) in known:
            continue
        known.add(frozenset(stage))
        measured_s = timed(stage, device).seconds
        operators = [graph.operators[graph.edges.index[name]] for name in stage]
        predicted_s = [each.operators_s(operators) + each.receive.latency_s for each in costs]
        found.append([abs(seconds - measured_s) / measured_s for seconds in predicted_s])
    return found


if __name__ == "__main__":
    main()
