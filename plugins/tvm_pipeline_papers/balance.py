"""The strategy `balance`: one operator at a time moves from a slower stage to a faster one until they are equal.

It is this project's own baseline for `runtime/adaptation.py`, beside the published one of `line_search.py`:

- it looks at the time of each stage (the median of compute and transfer), not at the period of the pipeline;
- stages whose times differ by at most a threshold, relative to the faster one, or by no more than the noise of the
  measured times, are left alone;
- the slowest stage gives an operator to the faster of its neighbours, so that the imbalance chooses the direction;
- more than two stages are allowed, and no stage is ever emptied;
- an operator that takes less than `STEP` of its stage's time moves along with the next one;
- a move after which the slowest stage is not faster is taken back, also where both times are equal;
- after a move is taken back it rests until the time of a stage has changed by more than the threshold.

It has no model of what a move brings, and it works for throughput alone. A single device and replicas have no cut to
move and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_pipeline import Plan, Problem, Stage
from tvm_pipeline.errors import PlanError
from tvm_pipeline.planning import cost_of
from tvm_pipeline.runtime import StageRecord, Strategy, judged_now

# The least share of its stage's time that a move takes from a stage.
STEP = 0.01


class Balance(Strategy):
    """Moves the cuts of a chain until its stages take equal times.

    Args:
        threshold: the relative difference of two stages' times above which an operator moves.
    """

    def __init__(self, threshold: float = 0.1) -> None:
        super().__init__()
        self._threshold = threshold
        self._plan: Plan | None = None
        # The plan before a move and the slowest stage's seconds: of the move under trial, and of the last proposal.
        self._before: tuple[Plan, float] | None = None
        self._proposed: tuple[tuple[Stage, ...], tuple[Plan, float] | None] | None = None
        self._resting = False
        self._rest_s: list[float] = []  # the stages' times when the rest began; empty until they are measured

    def begin(self, problem: Problem, plan: Plan) -> None:
        super().begin(problem, plan)
        self._plan, proposed, self._proposed = plan, self._proposed, None
        if proposed and proposed[0] == plan.stages:
            self._before = proposed[1]
        else:  # this plan was chosen by something else
            self._before, self._resting = None, False

    def look(self, records: Sequence[StageRecord], problem: Problem) -> tuple[Plan, str] | None:
        self.observe(records, problem.platform.devices)
        plan = self._plan
        known = [worker.seconds for worker in self.seen if worker is not None]
        if plan is None or not is_chain(plan) or len(known) < len(plan.stages):
            return None
        if self._before is not None:
            (before, before_s), self._before = self._before, None
            if max(known) >= before_s:
                self._resting, self._rest_s = True, []
                reason = f"taken back: the stages take {_shown(known)} ms, the slowest took {1e3 * before_s:.3g}"
                return self._to(problem, before, reason)
        if self._resting:
            self._rest_s = self._rest_s or known
            least = max(self._threshold, self.noise)
            if not any(abs(now / then - 1) > least for now, then in zip(known, self._rest_s, strict=True)):
                return None
            self._resting = False
        return self._move(problem, plan, known)

    def _move(self, problem: Problem, plan: Plan, known: list[float]) -> tuple[Plan, str] | None:
        slow = max(range(len(known)), key=known.__getitem__)
        neighbours = sorted((n for n in (slow - 1, slow + 1) if 0 <= n < len(known)), key=known.__getitem__)
        for fast in neighbours:
            if known[slow] <= known[fast] * (1 + max(self._threshold, self.noise)):
                continue
            stages = moved(self.scaled(problem), plan.stages, slow, fast)
            if stages is None:
                continue
            reason = f"the stages take {_shown(known)} ms: one operator moves from stage {slow} to {fast}"
            try:
                return self._to(problem, replace(plan, stages=stages), reason, (plan, known[slow]))
            except PlanError:  # the device cannot run or hold it
                continue
        return None

    def _to(
        self, problem: Problem, plan: Plan, reason: str, trial: tuple[Plan, float] | None = None
    ) -> tuple[Plan, str]:
        proposal = judged_now(self.scaled(problem), replace(plan, scheduler="balance", status="feasible", bound=None))
        self._proposed = plan.stages, trial
        return proposal, reason


def is_chain(plan: Plan) -> bool:
    """Return whether the plan has several stages, each on one device that serves no other stage."""
    return 1 < len(plan.stages) == len(plan.devices) and all(len(stage.devices) == 1 for stage in plan.stages)


def moved(problem: Problem, stages: tuple[Stage, ...], source: int, target: int) -> tuple[Stage, ...] | None:
    """Return the stages after the smallest move from stage `source` to its neighbour `target`.

    The operators that move are the last (or the first) of their stage in the graph's order, so that no path leaves a
    stage and comes back. Returns None if the move would leave the stage empty.
    """
    order = {operator.name: index for index, operator in enumerate(problem.graph.operators)}
    giving = sorted(stages[source].operators, key=order.__getitem__, reverse=target > source)
    costs = cost_of(problem, stages[source].devices[0])
    count = 1
    if not costs.is_modelled:
        seconds = [costs.added_s(problem.graph.operators[order[name]]) for name in giving]
        while count < len(giving) and sum(seconds[:count]) < STEP * sum(seconds):
            count += 1
    if count == len(giving):
        return None
    parts = {source: set(giving[count:]), target: {*stages[target].operators, *giving[:count]}}
    return tuple(
        replace(stage, operators=tuple(sorted(parts[index], key=order.__getitem__))) if index in parts else stage
        for index, stage in enumerate(stages)
    )


def _shown(seconds: Sequence[float]) -> str:
    return " | ".join(f"{1e3 * s:.3g}" for s in seconds)
