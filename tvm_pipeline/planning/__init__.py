"""Planning: from a Problem to a Plan with its bound. Nothing here imports TVM.

planner.py     the entry `solve`, and the table of schedulers
conflict.py    why there is no plan
rehearsal.py   plans for shared buses, chosen by simulation
corrected.py   a partitioner that a model guides and measurements correct
deployment.py  several models on one platform
search/        exact searches by dynamic programming
sat/           exact searches by CP-SAT
baselines/     plans without a proof, to compare with
"""

from tvm_pipeline.planning.planner import SCHEDULERS, Decision, Scheduler, describe, solve

__all__ = ["SCHEDULERS", "Decision", "Scheduler", "describe", "solve"]
