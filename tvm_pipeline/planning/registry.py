"""The schedulers by name, each with the objectives and the limits that it declares.

A scheduler is a function from a Problem to a Plan. All schedulers count the parameters of a stage where a device limits
its memory. `planner.py` refuses a problem that a scheduler does not declare, checks the limits that its search does not
count, and looks for orders in which activations fit. Installed packages add schedulers by entry points, see
docs/schedulers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import OBJECTIVES, Objective, Problem, counts_edges, is_lexicographic
from tvm_pipeline.planning.baselines.segments import even_parameters, greedy
from tvm_pipeline.planning.baselines.whole_model import replicas, single
from tvm_pipeline.planning.local.local_search import local_search
from tvm_pipeline.planning.measured import Cut, by_predictions, corrected
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.dynamic_programming import chain, hybrid, ideals, two_stage
from tvm_pipeline.planning.search.revisits import revisits
from tvm_pipeline.plugins import PluginTable

# The limits of a Problem, by the names of its fields.
LIMITS = ("children_together", "min_throughput_fps", "max_latency_s")
ALL_LIMITS = frozenset(LIMITS)

EVERY = frozenset(OBJECTIVES)
# Dynamic programming needs figures of single cuts. The bytes that edges bring into a stage are figures of two.
BY_CUTS = frozenset(objective for objective in OBJECTIVES if not counts_edges(objective))
TIMED = frozenset(objective for objective in OBJECTIVES if not is_lexicographic(objective))


@dataclass(frozen=True, slots=True)
class Scheduler:
    """An algorithm that plans.

    Attributes:
        run: the function that makes the plan. With `cut`, only the order of operators and the number of stages count.
        summary: a phrase that describes its plans, for tables and help.
        objectives: the objectives that it plans for.
        counts: the limits (of LIMITS) that its search counts, and `activations` where it looks for orders that fit.
            The planner checks the other limits afterwards.
        refuses: the limits that it does not take.
        stages: the numbers of stages that its plans may have; empty for any number.
        instead: the schedulers to use where it refuses a problem.
        cut: the function that cuts the order of `run` into stages on equal devices by compiling and measuring stages;
            such a scheduler plans for throughput. None where predictions are enough.
    """

    run: Callable[[Problem], Plan]
    summary: str
    objectives: frozenset[Objective] = EVERY
    counts: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()
    stages: tuple[int, ...] = ()
    instead: str = "chain or best"
    cut: Cut | None = None


BEST, MEASURED = "best", "measured"
THROUGHPUT = frozenset[Objective]({"throughput"})

OWN: dict[str, Scheduler] = {
    "single": Scheduler(single, "the whole model on one device", counts=ALL_LIMITS | {"activations"}, stages=(1,)),
    "replicas": Scheduler(
        replicas,
        "the whole model on several devices, or all of it between its ordered operators",
        counts=ALL_LIMITS | {"activations"},
        stages=(1, 2, 3),
    ),
    "two-stage": Scheduler(
        two_stage,
        "the best cut in two (Velasco-Montero et al., Algorithm 1)",
        BY_CUTS,
        ALL_LIMITS | {"activations"},
        stages=(2,),
    ),
    "chain": Scheduler(chain, "the best pipeline along the graph's order", BY_CUTS, ALL_LIMITS | {"activations"}),
    "ideals": Scheduler(ideals, "the best pipeline of all cuts, by dynamic programming", BY_CUTS, ALL_LIMITS),
    "cp-sat": Scheduler(cp_sat, "the best pipeline of all cuts, by OR-tools", counts=ALL_LIMITS),
    "local-search": Scheduler(
        local_search, "a good pipeline of all cuts, by simulated annealing", counts=ALL_LIMITS, instead="cp-sat or best"
    ),
    "hybrid": Scheduler(
        hybrid, "the best pipeline whose stages may be replicated", TIMED, ALL_LIMITS, instead="ideals or cp-sat"
    ),
    "revisits": Scheduler(
        revisits,
        "the best pipeline of three or four stages in which a device serves twice",
        frozenset[Objective]({"throughput", "energy"}),
        frozenset({"children_together"}),
        frozenset({"max_latency_s", "min_throughput_fps"}),
        stages=(3, 4),
        instead="chain or ideals",
    ),
    "even-parameters": Scheduler(even_parameters, "segments of equal parameter bytes"),
    "greedy": Scheduler(greedy, "segments filled in turn"),
    MEASURED: Scheduler(
        by_predictions, "stages measured until the plan stays, for Edge TPUs", THROUGHPUT, cut=corrected
    ),
}
SCHEDULERS = PluginTable[Scheduler](
    "tvm_pipeline.schedulers", "scheduler", OWN, lambda loaded: isinstance(loaded, Scheduler), "docs/schedulers.md"
)


def check_scheduler(name: str) -> None:
    """Raise OptionError, with the names of all that are installed, if there is no scheduler of this name."""
    SCHEDULERS.check(name, "scheduler", BEST)
