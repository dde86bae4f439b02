"""Plans for devices that share a bus, chosen by simulation.

`evaluate` counts what a frame needs of a bus as if turns never fell badly, and so do the searches that it judges. But
devices fall into step: who waits for a frame begins together with who made it, and of the two the one whose parameters
come first keeps the other from the bus, frame after frame. So the planner is asked several times, for a bus that weighs
more and more, and `simulate.py` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tvm_pipeline.core.plan import Decision, Plan, describe
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import buses_of_parameters, with_slower_refill
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.errors import OptionError, PlanError

FRAMES = 300
# How much slower than it is parameters are said to come, so that plans which leave the bus some slack are found.
HANDICAPS = (1.15, 1.3, 1.5, 2.0)
# Plans that are equally fast may differ by the rounding of sums.
ROUNDING = 1e-9


def shares_a_bus(problem: Problem) -> bool:
    """Whether what is judged of the problem's plans is only a bound."""
    buses = buses_of_parameters(problem)
    return problem.objective == "throughput" and len(set(buses)) < len(buses)


def rehearsed(problem: Problem, decision: Decision, propose: Callable[[Problem, str], Decision]) -> Decision:
    """The fastest in the simulator of the decision's candidates, and of plans for a bus that weighs more.

    Predictions stay those of `evaluate`; nothing is proven of a choice by simulation, so the plan keeps the bound and
    is `feasible`.
    """
    rates: dict[Plan, float] = {}
    known = set()
    for plan in _proposals(problem, decision, propose):
        if plan.stages not in known:
            known.add(plan.stages)
            rates[plan] = simulate(problem, plan.stages, FRAMES).statistics.throughput_fps or 0.0
    most = max(rates.values())
    chosen = next(plan for plan, rate in rates.items() if rate >= most * (1 - ROUNDING))
    first = decision.plan
    if chosen.stages == first.stages:
        return replace(decision, why=f"{decision.why}; simulated, with turns on the bus: {most:.4g} fps")
    best = replace(chosen, status="feasible", bound=first.bound)
    why = (
        f"{describe(best)} is the fastest of {len(rates)} simulated plans, {most:.4g} fps with turns on the bus; "
        f"{describe(first)}, the best by its bound, makes {rates[first]:.4g} there"
    )
    return Decision(best, (best, *(p for p in decision.candidates if p.stages != best.stages)), why)


def _proposals(problem: Problem, decision: Decision, propose: Callable[[Problem, str], Decision]) -> Iterator[Plan]:
    """The planner's answers, judged by the problem as it is: for slower and slower parameters, which make plans that
    fetch fewer, and for the ends of that scale, the least seconds and the least bytes that are fetched in all."""
    yield from decision.candidates
    scheduler = "best" if problem.stages is None else "ideals"
    stages = problem.stages or len(problem.platform.devices)
    asked = [(with_slower_refill(problem, factor), scheduler) for factor in HANDICAPS]
    for objective in ("latency", "dram,memory,communication"):
        asked.append((replace(problem, objective=objective, stages=stages, max_latency_s=None), "ideals"))
    for other, name in asked:
        try:
            for plan in propose(other, name).candidates:
                yield judged(problem, replace(plan, objective=problem.objective))
        except (OptionError, PlanError):
            continue  # it was an attempt
