"""How many frames a call is to compute: a model is compiled, measured and planned for each, and the best is taken.

A call of several frames pays where a device has a fixed cost for each call, or reads its weights once for all of them:
on GPUs and engines more than on the cores of a CPU. Frames wait for one another, so the latency is that of the call.

Next: `frontends/batching.py`, which widens a model; `cost/batches.py`, whose figures are of frames.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

from tvm_pipeline.backends.batched import with_batch
from tvm_pipeline.backends.closeness import difference
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import Port, frames_of_noise
from tvm_pipeline.core.in_mode import in_mode
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Decision, Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import GraphError, LimitMissedError, ModelError, NoPlanError, OptionError
from tvm_pipeline.frontends.batching import batched
from tvm_pipeline.runtime.comparison import in_turn, runner
from tvm_pipeline.runtime.pipeline import Pipeline
from tvm_pipeline.runtime.verification import TIED
from tvm_pipeline.workflow.compiling import Compiled
from tvm_pipeline.workflow.steps import measured_profile

AUTO = (2, 4, 8)  # are tried, beside one frame a call
MOST_BATCH = 256
ROUNDS = 5  # one of two equal plans is faster in all of them once in 32 times

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """A model compiled for calls of some frames, with its plan."""

    made: Compiled
    problem: Problem
    decision: Decision

    @property
    def plan(self) -> Plan:
        return self.decision.plan


# Plans a compiled model by a problem, whose graph and platform are the model's.
Decide = Callable[[Compiled, Problem], Planned]


def batches_of(text: str, objective: str) -> Sequence[int]:
    """Return the batches to try for a text: `auto`, or one number.

    Raises:
        OptionError: it is neither, or a batch serves no such objective.
    """
    if text == "1":
        return ()
    if objective not in ("throughput", "energy"):
        raise OptionError(
            f"`batch` goes with objective throughput or energy: for {objective}, one frame a call is best",
            option="batch",
            value=text,
        )
    if text == "auto":
        return AUTO
    if not text.isdecimal() or not 1 <= int(text) <= MOST_BATCH:
        raise OptionError(
            f"`batch` {text}: give `auto`, or how many frames a call computes, from 1 to {MOST_BATCH}",
            option="batch",
            value=text,
        )
    return (int(text),)


def best_batch(
    model: Model,
    alone: Planned,
    batches: Sequence[int],
    recompiled: Callable[[Model], Compiled],
    decided: Decide,
    verify_s: float,
) -> Planned:
    """Return the model compiled for the batch of most frames a second, or of fewest joules.

    Several batches compete with one frame a call, see `best_of`. A single batch is taken as it is.

    Args:
        alone: one frame a call, with which the others are compared.
        recompiled: compiles the model for the same platform.
        decided: plans a compiled model.
        verify_s: seconds in which the plans run in turns; 0 chooses by prediction.

    Raises:
        ModelError: a single batch was asked for, and the model does not take it, or mixes frames.
        LimitMissedError, NoPlanError: a single batch was asked for, and no plan with it keeps the limits.
    """
    found = [] if len(batches) == 1 else [alone]
    for batch in batches:
        _log.info(f"compiling {model.name} for {batch} frames a call")
        try:
            found.append(planned_batch(model, alone, batch, recompiled, decided))
        except (ModelError, LimitMissedError, NoPlanError) as error:
            if len(batches) == 1:
                raise
            _log.warning(f"{batch} frames a call are not tried, nor are more: {error}")
            break
    best = best_of(found, verify_s) if len(found) > 1 else found[0]
    for other in (alone, *found):
        if other is not best:
            other.made.compiled.close()
    return best


def planned_batch(
    model: Model,
    alone: Planned,
    batch: int,
    recompiled: Callable[[Model], Compiled],
    decided: Decide,
) -> Planned:
    """Return the plan of one batch, after a comparison of its frames with those of one frame a call.

    The arguments, and what is raised, are those of `best_batch` for a single batch.
    """
    with ExitStack() as failing:
        made = recompiled(batched(model, alone.made.compiled.graph.inputs, batch))
        failing.callback(made.compiled.close)
        try:
            made = replace(made, compiled=with_batch(made.compiled, batch))
        except GraphError as error:
            raise ModelError(str(error)) from error
        problem = replace(
            alone.problem,
            graph=made.compiled.graph,
            platform=in_mode(made.platform, alone.problem.profile.power_mode),
            profile=measured_profile(made),
        )
        wide = decided(made, problem)
        name, worst = model.name, compared(alone, wide)
        failing.pop_all()
    if worst:
        _log.warning(
            f"{name}: with {batch} frames a call its outputs differ by up to {worst:.1e} of the largest from those of "
            "one frame a call"
        )
    return wide


def compared(alone: Planned, wide: Planned) -> float:
    """Return how far the outputs of frames in calls are from those of frames alone, over the largest; 0 for equal bits.

    Raises:
        ModelError: they are further apart than two compilations of a model may be, so frames mix.
    """
    frames, worst = frames_of_noise(alone.problem.graph, 2 * wide.plan.batch + 1), 0.0
    for expected, found in zip(_outputs(alone, frames), _outputs(wide, frames), strict=True):
        for name, array in expected.items():
            port = Port(name, array.shape, str(array.dtype))
            apart = difference((port, array), (port, found[name].reshape(array.shape)))
            if not apart.is_close_behind_a_cut(0):
                raise ModelError(
                    f"{wide.plan.graph}: its frames are not apart with {wide.plan.batch} a call: output {name} of a "
                    f"frame is {apart}; compile it with one frame a call"
                )
            worst = max(worst, apart.worst / max(apart.largest, 1e-30))
    return worst


def _outputs(planned: Planned, frames: list[dict[str, Array]]) -> list[dict[str, Array]]:
    with Pipeline(planned.made.compiled, planned.plan, planned.made.platform) as pipeline:
        return [result.outputs for result in pipeline.map(frames)]


def best_of(found: Sequence[Planned], verify_s: float) -> Planned:
    """Return the best of several batches, which are in ascending order, with the reason in its decision.

    A larger batch must be better by more than 2 %, and in each round.
    """
    energy = found[0].plan.objective == "energy"
    figures, how = [[_predicted(one.plan, energy=energy)] for one in found], "predicted"
    if verify_s > 0 and not energy:
        figures, how = _rates(found, verify_s), "measured in turns"
    chosen = 0
    for index, own in enumerate(figures):
        ratios = [rate / max(other, 1e-12) for rate, other in zip(own, figures[chosen], strict=True)]
        if median(ratios) * TIED > 1 and min(ratios) > 1:
            chosen = index
    unit = "frames a joule" if energy else "fps"
    pairs = zip(figures, found, strict=True)
    told = ", ".join(f"{median(own):.4g} with {one.plan.batch}" for own, one in pairs)
    best = found[chosen]
    why = f"{best.plan.batch} frames a call: {unit} {how}: {told}; {best.decision.why}"
    return replace(best, decision=replace(best.decision, why=why))


def _rates(found: Sequence[Planned], verify_s: float) -> list[list[float]]:
    """Return the frames a second of each plan in each round, in which all of them run in turns."""
    runs = [runner(one.made.compiled, one.made.platform) for one in found]
    seconds = verify_s / ROUNDS / len(found)
    rates: list[list[float]] = [[] for _ in found]
    for round_ in range(ROUNDS):
        for index in in_turn(range(len(found)), round_):
            plan = found[index].plan
            _log.info(f"measuring {plan.batch} frames a call, round {round_ + 1} of {ROUNDS}")
            rates[index].append(runs[index](plan, seconds).throughput_fps)
    return rates


def _predicted(plan: Plan, *, energy: bool) -> float:
    if energy:
        return 1 / max(plan.predicted.energy_j or 0.0, 1e-12)
    return plan.predicted.throughput_fps or 0.0
