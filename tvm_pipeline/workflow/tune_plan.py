"""Tune what bounds the best plan: tuning and planning in turns, behind `tvm-pipeline tune --objective`.

1. Compile and profile the model as it is, and plan.
2. Search the kernels of the busiest devices; for latency and energy those of all devices of the plan.
3. Divide the profile's seconds by what these kernels gained, and plan again. Where that makes the best plan better by
   1 % or more, go on with the kernels that bound it now.
4. Compile and profile what won, plan once more, and let both builds run their plans in turns.

Velasco-Montero et al., IEEE Access 2023, leave joining the two to future work. Next: `tune_targets.py`, which tunes a
model as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tvm_pipeline import planning
from tvm_pipeline.backends.contract import Guide, TuningReport
from tvm_pipeline.core.model import with_tolerance
from tvm_pipeline.core.plan import Measured, Plan, cost_key
from tvm_pipeline.core.problem import Objective, Problem, is_lexicographic
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.scaling import scaled_profile
from tvm_pipeline.errors import OptionError
from tvm_pipeline.frontends import Shapes, Values, load
from tvm_pipeline.runtime.comparison import runner, side_by_side
from tvm_pipeline.workflow.steps import Compiled, compile_source, measured_profile
from tvm_pipeline.workflow.tune_targets import SECONDS, check_seconds, tuners_of

WORTHWHILE = 0.01  # of the plan's figure: a batch that moves it by less is the last one
BUSY = 0.9  # of the busiest device: such a device could take over work of that one, if it were faster
TURN_S, ROUNDS = 1.0, 5  # of the comparison of both builds

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlanTuning:
    """What tuning did for the best plan of a model.

    Attributes:
        reports: of each target.
        predicted: the figure of the objective of the best plan before tuning, and after each batch by the scaled
            profile.
        before, after: the best plans of the two builds by their own profiles; None where nothing won.
        measured: what these two did in turns; empty where nothing won, and where a device is not here itself.
    """

    objective: Objective
    reports: tuple[TuningReport, ...]
    predicted: tuple[float, ...]
    before: Plan | None = None
    after: Plan | None = None
    measured: tuple[Measured, ...] = ()


def tune_plan(
    source: str | Path,
    objective: Objective = "throughput",
    seconds: float = SECONDS,
    shapes: Shapes | None = None,
    platform: Path | None = None,
    devices: str = "",
    *,
    tolerance: float | None = None,
    values: Values | None = None,
) -> PlanTuning:
    """Tune the kernels that bound the best plan of a model, until the plan does not become better.

    Args:
        source: what `load` takes.
        devices: which devices of the platform are used, as `Platform.with_devices`.
        seconds: that the search may take for each target, without compiling and profiling.
        tolerance: the error that faster algorithms may have, see `Model.tolerance`; the model's own without it.

    Raises:
        OptionError: `seconds` is no time, or the objective counts bytes.
        PlatformError: no device of the platform can be tuned for.
    """
    check_seconds(seconds)
    if is_lexicographic(objective):
        raise OptionError(
            f"`objective` {objective}: it counts bytes, and tuning changes none; give throughput, latency or energy",
            option="objective",
            value=objective,
        )
    model = with_tolerance(load(source, shapes, values), tolerance)
    made = compile_source(source, shapes, platform, devices=devices, tolerance=tolerance, values=values)
    tuners = tuners_of(made.platform)
    before = Problem(made.compiled.graph, made.platform, measured_profile(made, None), objective)
    bounds = _Bounds(before, made)
    reports = []
    for device, tuner in tuners:
        report = tuner.tune(model, device, seconds, bounds.guide(device.target))
        reports.append(replace(report, stopped=bounds.stopped or report.stopped))
    found = PlanTuning(objective, tuple(reports), tuple(bounds.figures))
    if not any(report.ratio for report in reports):
        return found
    _log.info(f"measuring {model.name} as it is tuned")
    tuned = compile_source(source, shapes, platform, devices=devices, tolerance=tolerance, values=values)
    after = replace(before, graph=tuned.compiled.graph, profile=measured_profile(tuned, None))
    plans = planning.plan(before).plan, planning.plan(after).plan
    found = replace(found, before=plans[0], after=plans[1])
    if made.platform.stand_ins:
        return found
    runs = [(plan, runner(of.compiled, of.platform)) for plan, of in zip(plans, (made, tuned), strict=True)]
    return replace(found, measured=tuple(side_by_side(runs, seconds=TURN_S, rounds=ROUNDS)))


class _Bounds:
    """The best plan by the profile as it was scaled so far.

    Attributes:
        figures: of the best plan, in the unit of the objective: before tuning, and after each batch.
        stopped: why the plan asks for no more; empty where it did not end the search.
    """

    def __init__(self, problem: Problem, made: Compiled) -> None:
        self.stopped = ""
        self._problem = problem
        self._kernels = {device.name: made.compiled.kernels_to_tune(device) for device in problem.platform.devices}
        self._gains: dict[str, Mapping[Hashable, float]] = {}  # by target
        self.figures = [self._bound("")[0]]

    def guide(self, target: str) -> Guide:
        """Return the guide that asks for the kernels of a target that bound the best plan."""
        asked: set[Hashable] = set()
        self.stopped = ""

        def ask(gains: Mapping[Hashable, float]) -> Collection[Hashable]:
            self._gains[target] = gains
            figure, bounding = self._bound(target)
            is_better = not asked or abs(figure / self.figures[-1] - 1) >= WORTHWHILE
            if asked:
                self.figures.append(figure)
            batch = bounding - asked if is_better else set()
            if not is_better:
                self.stopped = f"the best plan became less than {WORTHWHILE:.0%} better"
            elif not batch:
                self.stopped = "nothing else of this target bounds the best plan"
            asked.update(batch)
            return batch

        return ask

    def _bound(self, target: str) -> tuple[float, set[Hashable]]:
        """Return the figure of the best plan by the scaled profile, and the kernels of the target that bound it."""
        scaled = replace(self._problem, profile=scaled_profile(self._problem.profile, self._shares()))
        plan = planning.plan(scaled).plan
        bounding = _bounding_devices(scaled, plan)
        kernels = {
            kernel
            for stage in plan.stages
            for name in bounding.intersection(stage.devices)
            if scaled.platform.device(name).target == target
            for operator in stage.operators
            for kernel in self._kernels[name].get(operator, ())
        }
        return abs(cost_key(plan)[0]), kernels

    def _shares(self) -> dict[str, dict[str, float]]:
        """Return the part of its seconds that each operator still takes, by device."""
        shares: dict[str, dict[str, float]] = {}
        for device in self._problem.platform.devices:
            gains = self._gains.get(device.target, {})
            shares[device.name] = {
                operator: sum(1 / gains.get(kernel, 1.0) for kernel in kernels) / len(kernels)
                for operator, kernels in self._kernels[device.name].items()
            }
        return shares


def _bounding_devices(problem: Problem, plan: Plan) -> set[str]:
    """Return the devices whose seconds bound the plan: for throughput the busiest, for the others all of them."""
    busy_s: dict[str, float] = {}
    for cost in evaluate(problem, plan.stages).costs:
        busy_s[cost.device] = busy_s.get(cost.device, 0.0) + cost.share * cost.seconds
    most_s = max(busy_s.values())
    return {name for name, taken in busy_s.items() if taken >= BUSY * most_s or problem.objective != "throughput"}
