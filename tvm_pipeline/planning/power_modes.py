"""Planning over the power modes of a machine: the best plan of any mode, with its mode.

A mode is a machine of its own: it has its profile, its power and its cores. So the best plan over the modes is the best
of their best plans, and no plan of any mode is better than the best of their bounds. Most frames a second mostly take
the fastest mode; least energy, with a rate to keep, may take a slow one. Read next: core/in_mode.py, planner.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from tvm_pipeline.core.plan import Decision, Plan, cost_key, describe, margin
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError, ProfileError
from tvm_pipeline.planning.planner import plan, with_bound
from tvm_pipeline.planning.registry import BEST

_log = logging.getLogger(__name__)


def plan_modes(problems: Sequence[Problem], scheduler: str = BEST) -> Decision:
    """Return the best plan over the power modes, one problem for each, with the candidates of all of them.

    Each problem has the platform as it is in its mode (`in_mode`), and the profile measured in that mode. They are of
    one graph, and ask for the same.

    Raises:
        OptionError: two problems are of one mode, one names no mode, or they do not ask for the same.
        InfeasibleError: it is proven for each mode that it has no plan; the message has the reasons.
        NoPlanError: no plan was found in any mode, but one may exist.
        ProfileError: as `plan`, for one of the modes; or the idle power of some of them alone is known.
    """
    _check(problems)
    decisions: list[Decision] = []
    errors: dict[str, NoPlanError] = {}
    for problem in problems:
        mode = problem.profile.power_mode
        _log.info(f"planning for power mode {mode}" if mode else "planning")
        try:
            decisions.append(plan(problem, scheduler))
        except NoPlanError as error:
            errors[mode] = error
    if len(problems) == 1 and errors:
        raise next(iter(errors.values()))
    if len(problems) == 1:
        return decisions[0]
    if not decisions:
        kind = InfeasibleError if all(isinstance(e, InfeasibleError) for e in errors.values()) else NoPlanError
        raise kind("; ".join(f"power mode {mode}: {error}" for mode, error in errors.items()))
    # The first of equal modes stays, which the user listed first.
    decisions.sort(key=lambda decision: cost_key(decision.plan))
    chosen = _with_common_bound(decisions, list(errors.values()))
    others = sorted((p for d in decisions for p in d.candidates if p != decisions[0].plan), key=cost_key)
    return replace(decisions[0], plan=chosen, candidates=(chosen, *others), why=_why(decisions, errors))


def _check(problems: Sequence[Problem]) -> None:
    """Raise OptionError unless each problem is of a mode of its own, and all ask for the same."""
    if not problems:
        raise OptionError("`profile`: planning over power modes takes the profile of at least one")
    modes = [problem.profile.power_mode for problem in problems]
    if len(modes) > 1 and "" in modes:
        raise OptionError(
            "`profile` is given several times, and one names no power mode; measure one for each mode with "
            "`power_modes`",
            option="profile",
        )
    for mode in modes:
        if modes.count(mode) > 1:
            raise OptionError(f"`profile`: two are of power mode {mode}; give one for each mode", option="profile")
    if problems[0].objective == "energy":
        _check_idle_power(problems)
    first, *rest = (replace(p, platform=problems[0].platform, profile=problems[0].profile) for p in problems)
    if any(other != first for other in rest):
        raise OptionError("the problems of power modes differ in more than platform and profile")


def _check_idle_power(problems: Sequence[Problem]) -> None:
    """Raise ProfileError where the idle power of some modes alone is known: their energy could not be compared."""
    known = {p.profile.power_mode: not (p.profile.idle is None and p.platform.idle_w is None) for p in problems}
    if len(set(known.values())) > 1:
        without = ", ".join(mode for mode, stated in known.items() if not stated)
        raise ProfileError(
            f"objective energy: the idle power of power mode {without} is not known, that of others is; give `idle_w` "
            "in the [[power_mode]] of each, or of none"
        )


def _with_common_bound(decisions: Sequence[Decision], errors: Sequence[NoPlanError]) -> Plan:
    """Return the best plan, first of the decisions, with the bound of all modes; a mode proven empty has none."""
    best = decisions[0].plan
    bounds = [decision.plan.bound for decision in decisions if decision.plan.bound is not None]
    if len(bounds) < len(decisions) or not all(isinstance(error, InfeasibleError) for error in errors):
        return with_bound(best, None)
    return with_bound(best, max(bounds) if best.objective == "throughput" else min(bounds))


def _why(decisions: Sequence[Decision], errors: dict[str, NoPlanError]) -> str:
    """Return what the best mode is ahead of the others by, why some give nothing, and what decides inside of it."""
    best, *others = decisions
    leads = [f"{margin(best.plan, other.plan) or 0.0:+.1%} against {describe(other.plan)}" for other in others]
    said = [
        f"power mode {best.plan.power_mode} has the best {best.plan.objective}{': ' if leads else ''}{', '.join(leads)}"
    ]
    said += [f"power mode {mode} has no plan: {error}" for mode, error in errors.items()]
    return "; ".join([*said, f"in {best.plan.power_mode}, {best.why}"])
