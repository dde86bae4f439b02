"""Several models on one platform, each at its own rate: the choice of a device for every stage of every model.

Every model is a pipeline with its own order of devices. A device may serve several models; its utilisation is the sum
of their shares of a second. The greatest utilisation is to be as small as possible: at 1 or less all rates are met.

`deploy` takes these steps, each of which improves on the one before until the time is over:

1. `first_deployment`   cuts and devices of all models by simulated annealing
2. `least_utilisation`  a bound of all deployments
3. `placed_together`    CP-SAT, which goes on from the first deployment, for models that are not too large

Co-deployment is from Yin et al., SEC 2022, who merge the graphs under one source and sink (that is `merge_graphs`, for
models that run at one rate). Separate rates are an addition of this project.

Next: `together/deployment_judge.py`, which judges a deployment; the other files of `together/`, the steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_pipeline.core.plan import Plan, Stage, Status
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.batches import of_calls, of_frames
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.whole_stages import least_ratio
from tvm_pipeline.errors import InfeasibleError, OptionError, SearchTimeError
from tvm_pipeline.planning.together.deployment_judge import Demand, held_together, judge_deployment
from tvm_pipeline.planning.together.first_deployment import FirstDeployment, first_deployment
from tvm_pipeline.planning.together.load_bound import least_utilisation
from tvm_pipeline.planning.together.placed_together import most_literals, placed_together

__all__ = ["SEARCH_S", "Demand", "Deployment", "deploy", "judge_deployment"]

# The seconds of a search without a time limit, with which the command ends within a minute.
SEARCH_S = 50.0
# The parts of the time that is left for the first deployment, for the bound, and for other first deployments.
FIRST_SHARE, BOUND_SHARE, AGAIN_SHARE = 0.4, 0.5, 0.6
# The largest models of CP-SAT (operators times stages times devices of all models), and those that it proves at once.
MOST_LITERALS, FEW_LITERALS = 150_000, 5_000
# First deployments are repeated so often, with random numbers that are so far apart.
MOST_SEEDS, SEED_STEP = 20, 1_000_003
# A bound so near to the utilisation is a proof.
PROVEN = 1e-6


@dataclass(frozen=True, slots=True)
class Deployment:
    """Plans for several models that run at the same time, in the order of the demands.

    Attributes:
        rates_fps: the requested rates.
        reachable_fps: the requested rates where all are met; else the highest rates in the same proportions.
        utilisation: for each device and bus in use, the seconds of work in each second at the requested rates; the
            rates are met where it is 1 or less. The lock of the Python interpreter is the bus `interpreter`.
        bound: no deployment has a lower greatest utilisation.
        memory_bytes: for each device in use that states its memory what all models hold there, see `held_together`.
        status: `optimal` where no deployment has a lower greatest utilisation, which is proven.
        why: a sentence that says whether the rates are met; where they are not, it names the models that are too slow
            even alone.
    """

    plans: tuple[Plan, ...]
    rates_fps: tuple[float, ...]
    reachable_fps: tuple[float, ...]
    utilisation: dict[str, float]
    bound: float
    status: Status
    why: str
    memory_bytes: dict[str, int]

    @property
    def gap(self) -> float | None:
        """The distance of the greatest utilisation from the bound, relative to the bound; None where that is 0."""
        most = max(self.utilisation.values(), default=0.0)
        if self.bound <= 0:
            return 0.0 if most == 0 else None
        return max(0.0, most / self.bound - 1)


def deploy(demands: Sequence[Demand], time_limit_s: float | None = None) -> Deployment:
    """Return the plans of all models for which the busiest device (or bus) has the least utilisation.

    Each model may have the plans that `cp_sat` searches for throughput (downset cuts, each device in at most one of its
    stages), within the `stages`, `children_together` and `max_latency_s` of its problem. A device's memory must hold
    the stages of all models, with the activations of each, and of devices that share cores only one is used. Every
    device is as slow as when all devices of the largest set that can work at the same time do work.

    The stages on a device share its modelled cache in proportion to their parameters, and the parameters beyond it are
    fetched for every frame. The search counts a linear lower bound of these fetches: no stage fetches less than if it
    were alone, and all together fetch no less than the overflow. So where stages share too small a cache, the result
    may be `feasible` with a lower bound, and may not be the best.

    Args:
        time_limit_s: seconds to search, SEARCH_S by default. The best deployment that was found then has a gap; with 0
            seconds it is a simple one.

    Raises:
        OptionError: there are no demands, a rate is not positive, platforms differ, or an objective is not throughput.
        InfeasibleError: the models cannot be placed together at any rate.
        SearchTimeError: no deployment was found in time, because of limits that few deployments keep.
    """
    batches = [demand.problem.graph.batch for demand in demands]
    if max(batches, default=1) > 1:
        pairs = list(zip(demands, batches, strict=True))
        found = deploy([Demand(of_calls(d.problem), d.rate_fps / batch) for d, batch in pairs], time_limit_s)
        return replace(
            found,
            plans=tuple(of_frames(plan, batch) for plan, batch in zip(found.plans, batches, strict=True)),
            rates_fps=tuple(demand.rate_fps for demand in demands),
            reachable_fps=tuple(batch * fps for fps, batch in zip(found.reachable_fps, batches, strict=True)),
        )
    _check(demands)
    deadline = time.monotonic() + (SEARCH_S if time_limit_s is None else time_limit_s)
    plans, bound = _searched(demands, deadline)
    utilisation = judge_deployment(demands, plans)
    most = max(utilisation.values(), default=0.0)
    rates = tuple(demand.rate_fps for demand in demands)
    proven = bound >= most * (1 - PROVEN)
    platform = demands[0].problem.platform
    return Deployment(
        tuple(_plan(demand.problem, stages) for demand, stages in zip(demands, plans, strict=True)),
        rates,
        tuple(rate / max(most, 1.0) for rate in rates),
        utilisation,
        most if proven else bound,
        "optimal" if proven else "feasible",
        _why(demands, utilisation, most if proven else bound, deadline),
        {
            name: sum(h.param_bytes + h.activation_bytes for h in held)
            for name, held in held_together(demands, plans).items()
            if platform.device(name).memory_bytes is not None
        },
    )


def _check(demands: Sequence[Demand]) -> None:
    if not demands:
        raise OptionError("a deployment needs at least one model and its rate")
    platform = demands[0].problem.platform
    for demand in demands:
        name, problem = demand.problem.graph.name, demand.problem
        if not 0 < demand.rate_fps < math.inf:
            raise OptionError(f"the rate of {name} is {demand.rate_fps}; it must be positive")
        if problem.platform != platform:
            raise OptionError(f"{name} is planned on platform {problem.platform.name}, others on {platform.name}")
        if problem.objective != "throughput":
            raise OptionError(f"the objective of {name} is {problem.objective}; models with rates need throughput")


def _plan(problem: Problem, stages: tuple[Stage, ...]) -> Plan:
    predicted = evaluate(problem, stages).predicted
    mode = problem.profile.power_mode
    return Plan(problem.graph.name, "deployment", problem.objective, stages, predicted, power_mode=mode)


def _searched(demands: Sequence[Demand], deadline: float) -> tuple[list[tuple[Stage, ...]], float]:
    """Return the stages of each model, and a lower bound of the greatest utilisation."""
    first = first_deployment(demands, _part(deadline, FIRST_SHARE))
    bound = least_utilisation(demands, first.utilisation, _part(deadline, BOUND_SHARE))
    literals = most_literals(demands)
    if literals > FEW_LITERALS:
        share = AGAIN_SHARE if literals <= MOST_LITERALS else 1.0
        first = _repeated(demands, first, bound, _part(deadline, share))
    plans, most, reason = first.plans, first.utilisation, first.reason
    if bound < most * (1 - PROVEN) and literals <= MOST_LITERALS:
        exact = placed_together(demands, plans, deadline)
        bound = max(bound, exact.bound * min(least_ratio(demand.problem) for demand in demands))
        if exact.plans is not None:
            found = max(judge_deployment(demands, exact.plans).values(), default=0.0)
            if plans is None or found < most:
                plans, most = exact.plans, found
        reason = exact.reason or reason
    if plans is None:
        names = ", ".join(demand.problem.graph.name for demand in demands)
        where = f"of {names} on platform {demands[0].problem.platform.name}"
        if bound == math.inf:
            advice = f": {reason}" if reason else "; use fewer models, or devices with more memory_bytes"
            raise InfeasibleError(f"no deployment exists {where}{advice}")
        tried = f": {reason}" if reason else ""
        raise SearchTimeError(f"no deployment was found in the time allowed {where}{tried}; allow more time")
    return plans, bound


def _repeated(demands: Sequence[Demand], first: FirstDeployment, bound: float, deadline: float) -> FirstDeployment:
    """Return the best first deployment of several, which begin with other random numbers, until the deadline."""
    for seed in range(1, MOST_SEEDS):
        if time.monotonic() >= deadline or bound >= first.utilisation * (1 - PROVEN):
            break
        other = first_deployment(demands, deadline, seed=SEED_STEP * seed)
        if other.plans is not None and other.utilisation < first.utilisation:
            first = other
    return first


def _part(deadline: float, share: float) -> float:
    """Return the time at which a part of the time that is left is over."""
    now = time.monotonic()
    return now + share * max(0.0, deadline - now)


def _why(demands: Sequence[Demand], utilisation: dict[str, float], bound: float, deadline: float) -> str:
    most, busiest = max(((share, name) for name, share in utilisation.items()), default=(0.0, "nothing"))
    if most <= 1 + 1e-9:
        return f"all rates are met; {busiest} works {most:.1%} of the time"
    words = [f"the rates need {most:.1%} of {busiest}; at {1 / most:.1%} of them all are met"]
    if bound <= 1:
        words.append(f"it is not proven that no deployment meets them: the bound is {bound:.1%}; allow more time")
    for demand in demands:
        alone = least_utilisation([demand], most, deadline) if len(demands) > 1 else 0.0
        if alone > 1 + 1e-9:
            rate = demand.rate_fps
            words.append(
                f"{demand.problem.graph.name} alone cannot make more than {rate / alone:.4g} of {rate:.4g} fps"
            )
    return "; ".join(words)
