"""Planning: from a Problem to a Plan with its bound. Nothing here imports TVM.

planner.py         the entry `plan`, a sequence of named steps
candidates.py      the plans that compete in the default, and the bound of them all
large_graphs.py    plans where the downsets are too many to list
power_modes.py     the best plan over the power modes of a machine
registry.py        the schedulers, with the objectives and limits that they declare
conflict.py        the reasons where there is no plan
stage_orders.py    orders of operators whose activations fit into memory
bus_simulation.py  plans for shared buses, chosen by simulation
measured.py        the schedulers whose stages are compiled and timed
corrected.py       its search: a partitioner that a model guides and measurements correct
certificate.py     a problem, its plan and the bound in a file, for a checker that trusts nothing here
deployment.py      several models on one platform
together/          what judges, starts, bounds and proves deployments
search/            exact searches by dynamic programming
sat/               exact searches by CP-SAT
local/             local search, and bounds, for graphs of any size
baselines/         plans without a proof, to compare with
"""

from tvm_pipeline.cost.device_costs import cost_of, known_cost_of
from tvm_pipeline.cost.scaling import slowed
from tvm_pipeline.planning.baselines.segments import Partition, best_pipeline, even_cuts, segment_seconds
from tvm_pipeline.planning.corrected import measured_or_refused
from tvm_pipeline.planning.measured import by_predictions
from tvm_pipeline.planning.planner import plan
from tvm_pipeline.planning.power_modes import plan_modes
from tvm_pipeline.planning.registry import BEST, BY_CUTS, MEASURED, SCHEDULERS, THROUGHPUT, Scheduler, check_scheduler
from tvm_pipeline.planning.search.cuts import Cuts, ideals, is_inside, prefixes
from tvm_pipeline.planning.search.dynamic_programming import along
from tvm_pipeline.solvers.hot import hot

__all__ = [
    "BEST",
    "BY_CUTS",
    "MEASURED",
    "SCHEDULERS",
    "THROUGHPUT",
    "Cuts",
    "Partition",
    "Scheduler",
    "along",
    "best_pipeline",
    "by_predictions",
    "check_scheduler",
    "cost_of",
    "even_cuts",
    "hot",
    "ideals",
    "is_inside",
    "known_cost_of",
    "measured_or_refused",
    "plan",
    "plan_modes",
    "prefixes",
    "segment_seconds",
    "slowed",
]
