"""Plans for devices that share a bus, chosen by simulation.

`evaluate` and the searches add up the seconds that a frame needs of a bus, as if no device ever had to wait for its
turn. But devices fall into step: a device that waits for a frame begins at the moment when the device that made the
frame takes its next one. Both need the bus at that moment, and one of them waits, frame after frame. So the planner is
called several times, with slower and slower fetches of parameters, and `simulate.py` chooses between the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tvm_pipeline.core.plan import Decision, Plan, describe
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import buses_of_parameters
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.cost.scaling import with_slower_refill
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.errors import OptionError, PlanError

FRAMES = 300
# Fetches of parameters are taken to be slower by these factors, to find plans that use the bus less.
HANDICAPS = (1.15, 1.3, 1.5, 2.0)
# The throughputs of equally fast plans may differ by the rounding of sums.
ROUNDING = 1e-9


def shares_a_bus(problem: Problem) -> bool:
    """Return whether devices share a bus, so that the predicted throughput is only a bound."""
    buses = buses_of_parameters(problem)
    return problem.objective == "throughput" and len(set(buses)) < len(buses)


def chosen_by_simulation(problem: Problem, decision: Decision, propose: Callable[[Problem, str], Decision]) -> Decision:
    """Return the decision for the plan that is fastest in the simulator.

    The plans compared are the decision's candidates, and plans for slower fetches of parameters. Predictions stay those
    of `evaluate`. A choice by simulation proves nothing, so the plan keeps the bound and is `feasible`.

    Args:
        propose: the planner without this simulation, `planner.proposed`.
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
    others = (plan for plan in decision.candidates if plan.stages != best.stages)
    return replace(decision, plan=best, candidates=(best, *others), why=why)


def _proposals(problem: Problem, decision: Decision, propose: Callable[[Problem, str], Decision]) -> Iterator[Plan]:
    """Yield plans for slower and slower fetches of parameters, which fetch less and less, judged by the real problem.

    The last two are the ends of that scale: the plan of least latency, and the plan that fetches the fewest bytes.
    """
    yield from decision.candidates
    scheduler = "best" if problem.stages is None else "ideals"
    stages = problem.stages or len(problem.platform.devices)
    altered = [(with_slower_refill(problem, factor), scheduler) for factor in HANDICAPS]
    for objective in ("latency", "dram,memory,communication"):
        altered.append((replace(problem, objective=objective, stages=stages, max_latency_s=None), "ideals"))
    for other, name in altered:
        try:
            for plan in propose(other, name).candidates:
                yield judged(problem, replace(plan, objective=problem.objective))
        except (OptionError, PlanError):
            continue  # the altered problem has no plan, or its plan breaks a limit of the real one
