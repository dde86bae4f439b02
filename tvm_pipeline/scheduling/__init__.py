"""Schedulers: each a function Problem -> Plan, selectable by name. None imports TVM.

`solve` is what the rest of the package calls. The default, `best`, is the rule of the house: never lose to the
obvious. It makes every candidate (one device, replicas, two stages, k stages) and returns the best by the
objective, with all the others and by how much it beats them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.evaluate import judged, require_energy
from tvm_pipeline.plan import Plan, Problem
from tvm_pipeline.scheduling.chain import chain, chain_of
from tvm_pipeline.scheduling.two_stage import two_stage
from tvm_pipeline.scheduling.whole import replicas, single, singles

Scheduler = Callable[[Problem], Plan]

SCHEDULERS: dict[str, Scheduler] = {
    "single": single,
    "replicas": replicas,
    "two-stage": two_stage,
    "chain": chain,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen plan, every candidate (the chosen one among them, best first), and why it won."""

    plan: Plan
    candidates: tuple[Plan, ...]
    why: str


def solve(problem: Problem, scheduler: str = "best") -> Decision:
    """Plans `problem` with the scheduler of that name, or with all of them (`best`).

    Raises:
        OptionError: no scheduler has that name, or it does not make plans of `problem.stages` stages.
        InfeasibleError: no plan exists; the message gives each scheduler's reason.
    """
    if problem.objective == "energy":
        require_energy(problem)
    if scheduler != "best":
        if scheduler not in SCHEDULERS:
            raise OptionError(f"no scheduler is called {scheduler}; there are best, {', '.join(SCHEDULERS)}")
        plan = judged(problem, SCHEDULERS[scheduler](problem))
        if problem.stages not in (None, len(plan.stages)):
            raise OptionError(
                f"--stages {problem.stages}: the plans of scheduler {scheduler} have {len(plan.stages)}; "
                "leave --stages out, or choose chain or best"
            )
        return Decision(plan, (plan,), f"it was asked for with --scheduler {scheduler}")
    candidates, reasons = _candidates(problem)
    if not candidates:
        raise InfeasibleError("no plan is possible: " + "; ".join(dict.fromkeys(reasons)))
    # On equal figures the simpler plan wins.
    candidates.sort(key=lambda plan: (-_merit(plan), len(plan.stages), len(plan.devices)))
    return Decision(candidates[0], tuple(candidates), _why(candidates))


def _candidates(problem: Problem) -> tuple[list[Plan], list[str]]:
    makers: list[Callable[[], list[Plan]]] = [
        lambda: singles(problem),
        lambda: [replicas(problem)],
        lambda: [two_stage(problem)],
        lambda: chain_of(problem),
    ]
    plans: list[Plan] = []
    reasons: list[str] = []
    for make in makers:
        try:
            plans.extend(judged(problem, plan) for plan in make())
        except InfeasibleError as error:
            reasons.append(str(error))
    if problem.stages is not None:
        plans = [plan for plan in plans if len(plan.stages) == problem.stages]
    # Two algorithms that agree are one candidate, named after the simpler one.
    return list({plan.stages: plan for plan in reversed(plans)}.values()), reasons


def _merit(plan: Plan) -> float:
    value = plan.value
    if value is None:
        raise OptionError(f"{plan.scheduler} has no figure for {plan.objective}")
    return value if plan.objective == "throughput" else -value


def _why(candidates: list[Plan]) -> str:
    best, *others = candidates
    if not others:
        return "it is the only plan possible"
    parts = []
    for other in others:
        ahead = (_merit(best) - _merit(other)) / abs(_merit(other)) if _merit(other) else 0.0
        parts.append(f"{ahead:+.1%} against {describe(other)}")
    return f"{describe(best)} has the best {best.objective}: {', '.join(parts)}"


def describe(plan: Plan) -> str:
    """A plan in a few words: `cpu0 | cpu1` is a pipeline, `cpu0 + cpu1` are replicas."""
    return f"{plan.scheduler} ({' | '.join(' + '.join(stage.devices) for stage in plan.stages)})"
