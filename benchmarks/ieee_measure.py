"""What `ieee_access.py` measures: each function returns rows that are written down as JSON.

Seconds and frames a second have their unit in their names; a figure that is not known is None. Next: ieee_report.py,
which makes tables and figures of the rows; ieee_loads.py, what runs under loads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from networks import load_lively

from tvm_pipeline import Platform, Problem, detect_platform, planning, profile_model, settle_platform
from tvm_pipeline.backends.contract import Backend, CompiledModel
from tvm_pipeline.core.plan import Measured, Plan, Prediction, Stage
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.cost.evaluate import evaluate, judged
from tvm_pipeline.errors import NoPlanError, PlatformError
from tvm_pipeline.power import chosen_sensor, survey
from tvm_pipeline.profiling.links import measure_link
from tvm_pipeline.runtime.comparison import runner, side_by_side
from tvm_pipeline.runtime.metering import metered
from tvm_pipeline.workflow.power_meter import opened_meter, with_joules
from tvm_pipeline_papers.every_cut import every_cut
from tvm_pipeline_papers.measured_cuts import MeasuredCut, measured_cuts

_log = logging.getLogger(__name__)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of this machine, and the two of them that stand for the paper's GPU and CPU."""

    backend: Backend
    platform: Platform
    pair: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Subject:
    """A network that was compiled and profiled.

    Attributes:
        problem: that of the two devices alone.
        whole: that of all devices of the machine.
    """

    name: str
    kernels: str
    compiled: CompiledModel
    problem: Problem
    whole: Problem

    @property
    def pair(self) -> tuple[str, str]:
        first, second = self.problem.platform.devices
        return first.name, second.name


def machine(names: Sequence[str] = ()) -> Machine:
    """Return this machine with the two devices of these names, or with those most like the paper's.

    These are two devices of different backends if there are such, else those with the most cores; they share none.
    """
    backend, platform = settle_platform(detect_platform())
    if names:
        first, second = (platform.device(name) for name in names)
        if first.overlaps(second):
            raise PlatformError(f"devices {first.name} and {second.name} share cores: choose two that do not")
        return Machine(backend, platform, (first.name, second.name))
    pairs = [pair for pair in combinations(platform.devices, 2) if not pair[0].overlaps(pair[1])]
    if not pairs:
        raise PlatformError(
            f"{platform.name} has no two devices that can work at the same time, which all of this needs"
        )
    first, second = max(
        pairs,
        key=lambda pair: (
            pair[0].backend != pair[1].backend,
            min(len(d.cores) for d in pair),
            -platform.devices.index(pair[0]),
        ),
    )
    if first.backend == "host" and second.backend != "host":  # the paper's GPU stands first
        first, second = second, first
    return Machine(backend, platform, (first.name, second.name))


def subject(here: Machine, name: str, kernels: str, tune_s: float, repeats: int = 24) -> Subject | str:
    """Compile a network and profile it; return why not, where there is nothing tuned of it.

    Args:
        kernels: `default` or `tuned`. The latter takes what tuning has found on this machine before.
        tune_s: seconds to search first for each of the two devices' targets.
        repeats: of the profile.
    """
    model = load_lively(name)
    devices = here.platform.devices
    tuner = here.backend if here.backend.can_tune else None
    if kernels == "default":
        compiled = (tuner.compile_untuned if tuner else here.backend.compile)(model, devices)
    else:
        if tuner is None:
            return f"backend {here.backend.name} does not tune"
        nothing = f"nothing of it is tuned on this machine: run `tvm-pipeline tune {name}`, or give --tune SECONDS"
        if tune_s:
            targets = {here.platform.device(each).target: here.platform.device(each) for each in here.pair}
            for device in targets.values():
                report = tuner.tune(model, device, tune_s)
                nothing = f"{report.tuned} of {report.kernels} kernels tuned for {device.name}; {report.stopped}"
                _log.info(f"{name}: {nothing}")
        compiled = here.backend.compile(model, devices)
        if not any(found.tuned for found in compiled.tuned()):
            return f"{name}, tuned kernels: {nothing}"
    profile = _with_joules(compiled, here.platform, profile_model(here.backend, compiled, here.platform, repeats))
    whole = Problem(compiled.graph, here.platform, profile)
    two = replace(here.platform, devices=tuple(here.platform.device(each) for each in here.pair))
    return Subject(name, kernels, compiled, replace(whole, platform=two), whole)


def _with_joules(compiled: CompiledModel, platform: Platform, profile: Profile) -> Profile:
    """Return the profile with joules of operators, where a sensor of power is."""
    sensor = chosen_sensor(survey())
    return with_joules(compiled, platform, profile, sensor) if sensor else profile


def shown(plan: Plan) -> str:
    """Return the operators of each stage and its devices, as `23 cuda | 7 cpu`."""
    return " | ".join(f"{len(stage.operators)} {' + '.join(stage.devices)}" for stage in plan.stages)


# Table 2 and Figures 4 and 6


def network_row(found: Subject) -> Row:
    graph = found.compiled.graph
    macs = sum(operator.macs for operator in graph.operators)
    param_bytes = sum(operator.param_bytes for operator in graph.operators)
    return {"network": found.name, "operators": len(graph), "macs": macs, "param_bytes": param_bytes}


def layers(found: Subject) -> Row:
    """Return the seconds of each operator on both devices, in the graph's order."""
    names = found.compiled.graph.operator_names
    devices = {name: found.problem.profile.devices[name].seconds for name in found.pair}
    return {"network": found.name, "devices": {name: [by[each] for each in names] for name, by in devices.items()}}


def transfers(found: Subject) -> list[Row]:
    """Return the seconds of transfers of several sizes, measured and as the profile has fitted them, both ways."""
    devices = found.problem.platform.devices
    names = found.compiled.graph.operator_names
    rows = []
    for source, target in (devices, devices[::-1]):
        with (
            closing(found.compiled.stage(names, source)) as writer,
            closing(found.compiled.stage(names, target)) as reader,
        ):
            sizes, seconds = measure_link(writer, reader)
        link, own = found.problem.link(source.name, target.name), found.problem.profile.devices[target.name].receive
        fitted = [link.seconds(size) + (own.seconds(size) if own else 0.0) for size in sizes]
        pair = [source.name, target.name]
        rows.append({"devices": pair, "bytes": sizes, "measured_s": seconds, "fitted_s": fitted})
    return rows


# Tables 3 and 4, Figures 8 and 9


def configurations(found: Subject) -> tuple[dict[str, Plan], list[str]]:
    """Return the plans to compare by what they are, and why some that were wanted are not there."""
    names = tuple(found.compiled.graph.operator_names)
    plans: dict[str, Plan] = {}
    missing = []
    for device in found.pair:
        alone = Plan(found.compiled.graph.name, "single", "throughput", (Stage((device,), names),), Prediction())
        plans[f"{device} alone"] = judged(found.problem, alone)
    wanted = {
        "Algorithm 1 as printed": ("algorithm-1", found.problem),
        "two stages": ("two-stage", found.problem),
        "three stages": ("revisits", replace(found.problem, stages=3)),
        "replicas": ("replicas", found.problem),
        "best": (planning.BEST, found.whole),
    }
    for title, (scheduler, problem) in wanted.items():
        if scheduler != planning.BEST and scheduler not in planning.SCHEDULERS:
            missing.append(f"{title}: there is no scheduler {scheduler} in this version")
            continue
        try:
            plans[title] = planning.plan(problem, scheduler).plan
        except NoPlanError as error:
            missing.append(f"{found.name}, {title}: {error}")
    return plans, missing


def compared(found: Subject, plans: dict[str, Plan], seconds: float, rounds: int) -> list[Row]:
    """Run the distinct plans in turns; return a row for each name of a plan."""
    distinct = {plan.stages: plan for plan in plans.values()}.values()
    with opened_meter("") as meter:
        run = metered(runner(found.compiled, found.whole.platform), found.whole, meter)
        results = side_by_side([(plan, run) for plan in distinct], seconds=seconds, rounds=rounds)
    by_stages = {result.plan.stages: result for result in results}
    return [
        {"network": found.name, "kernels": found.kernels, "configuration": title}
        | figures(plan, by_stages[plan.stages])
        for title, plan in plans.items()
    ]


def figures(plan: Plan, result: Measured | None) -> Row:
    """Return predicted and measured figures of one plan."""
    predicted = plan.predicted
    energy = result.energy if result else None
    return {
        "plan": shown(plan),
        "stages": len(plan.stages),
        "expected_fps": predicted.throughput_fps,
        "expected_latency_s": predicted.latency_s,
        "expected_j": predicted.energy_j,
        "measured_fps": result.throughput_fps if result else None,
        "measured_latency_s": result.latency_s if result else None,
        "measured_j": energy.energy_j if energy else None,
        "joules_by": energy.by if energy else "",
        "spread": result.spread if result else None,
    }


# Figures 5, 11 and 12


def sweep(found: Subject, seconds: float, rounds: int) -> Row:
    """Run every cut of the two devices in both orders; return the rows with the seconds of each stage."""
    began_s = time.perf_counter()
    cuts = every_cut(found.problem, *found.pair)
    compared_cuts = measured_cuts(cuts, runner(found.compiled, found.whole.platform), seconds=seconds, rounds=rounds)
    return {
        "network": found.name,
        "rows": [_cut_row(found, each) for each in compared_cuts.cuts],
        "chosen": _cut_row(found, compared_cuts.chosen),
        "best": _cut_row(found, compared_cuts.best),
        "ratio": compared_cuts.ratio,
        "took_s": time.perf_counter() - began_s,
    }


def _cut_row(found: Subject, each: MeasuredCut) -> Row:
    cut, result = each.cut, each.result
    costs = evaluate(found.problem, cut.plan.stages).costs if cut.plan else ()
    return {
        "cut": str(cut),
        "devices": list(cut.devices),
        "operators": cut.operators,
        "crossing_bytes": cut.crossing_bytes,
        "expected_s": each.predicted_s,
        "measured_s": each.measured_s,
        "expected_stages_s": [cost.seconds for cost in costs],
        "measured_stages_s": [s.compute_s + s.transfer_s for s in result.statistics.stages] if result else [],
        "obstacle": cut.obstacle,
    }


def eight_schedules(found: Subject) -> dict[str, Plan]:
    """Return each device alone, and for each order the cut predicted to be best with one before and one behind it."""
    plans: dict[str, Plan] = {}
    cuts = every_cut(found.problem, *found.pair)
    total = len(found.compiled.graph)
    for devices in (found.pair, found.pair[::-1]):
        legal = {cut.operators: cut.plan for cut in cuts if cut.devices == devices and cut.plan}
        inner = sorted(n for n in legal if n < total)
        if inner:
            best = min(inner, key=lambda n: -(legal[n].predicted.throughput_fps or 0.0))
            apart = max(1, total // 6)
            near = [min(inner, key=lambda n: abs(n - wanted)) for wanted in (best - apart, best, best + apart)]
            plans |= {shown(legal[n]): legal[n] for n in near}
        if total in legal:
            plans[shown(legal[total])] = legal[total]
    return plans
