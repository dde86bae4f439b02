"""Local search: plans for graphs of any size, by simulated annealing. The scheduler `local-search`.

Dynamic programming over downsets is exact, but a graph like NASNet has too many of them to list. This search moves
operators between stages, so it needs no list, and it takes 100 000 operators in seconds. It proves nothing.

Every stage has a device of its own. Where the number of stages is open, short runs of each number decide which of them
get the time. Next: `problem_arrays.py`, then `annealing.py` (the loops).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_pipeline.core.plan import Plan, Stage, cost_key
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem, counts_edges
from tvm_pipeline.core.topology import topological_order
from tvm_pipeline.cost.device_costs import idle_w, known_cost_of, lock_s
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, NoPlanError, OptionError, PlanError
from tvm_pipeline.planning.local import annealing
from tvm_pipeline.planning.local.annealing import Aim, State, new_state, place_all
from tvm_pipeline.planning.local.furthest_cuts import ReachGraph
from tvm_pipeline.planning.local.problem_arrays import (
    MACS,
    PARAMS,
    DeviceArrays,
    GraphArrays,
    device_arrays,
    graph_arrays,
    nodes_of,
)
from tvm_pipeline.planning.sat.staging import stage_of
from tvm_pipeline.planning.search.cuts import Floats, Integers, grouped
from tvm_pipeline.planning.search.dynamic_programming import along
from tvm_pipeline.planning.stage_orders import fitting_orders

NAME = "local-search"

# Without a time limit a search tries this many moves, and more for each operator.
MOVES, MOVES_OF_OPERATOR = 2_000_000, 100
# The time is looked at after so many moves.
CHUNK = 4096
# Runs of different numbers of stages, or sets of devices, that get time at first.
MOST_RUNS = 12
# Temperatures, relative to the first plan's figure.
HOT, COLD = 1.0, 1e-5
SMOOTH = 0.3
# The weight of what is beyond limits: until a plan is found that keeps them, and then.
ILLEGAL, LEGAL = 1000.0, 4.0
ROUNDS = 4
MOST_NODES = 256
# Plans by minimum cuts that are starts, and the share of the time limit in which they are made.
MOST_PLACED, CUTS_SHARE = 3, 0.1
# The share of the time limit in which the loops run; the rest is for cutting anew.
ANNEALED = 0.85
# The operators times a power of the devices, beyond which dynamic programming takes too long.
MOST_CUT_ANEW = 200_000


def local_search(
    problem: Problem, hint: tuple[Stage, ...] | None = None, *, moves: int | None = None, seed: int = 0
) -> Plan:
    """Return a good pipeline of single devices, each with one stage; nothing is proven of it.

    Args:
        hint: the stages of a plan to start from. The result is never worse, if the hint keeps the problem's limits and
            has one device for each stage.
        moves: how many moves to try, in all; without it as many as the time limit allows, or a number that grows with
            the graph. `problem.time_limit_s` ends the search in any case.
        seed: of the random numbers. The same seed and number of moves give the same plan, if no time limit ends them.

    Raises:
        InfeasibleError: there are more stages than devices that can work at the same time.
        NoPlanError: no plan was found that keeps the limits; one may exist.
        ProfileError: a device has neither measurements nor a model.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> [(stage.devices, stage.operators) for stage in local_search(example_problem(), moves=100).stages]
        [(('d0',), ('double',)), (('d1',), ('increment',))]
    """
    begun = time.monotonic()
    if not problem.is_lexicographic:
        for device in problem.platform.devices:
            known_cost_of(problem, device)
    relaxed = replace(problem, profile=replace(problem.profile, segments=()), activations=False)
    budget = _Budget(begun, problem.time_limit_s, moves, len(problem.graph))
    runs = list(_runs(relaxed, hint, seed, budget))
    _share_out(runs, budget)
    return _judged(problem, [*(run.stages() for run in runs if run.is_legal), *([hint] if hint else [])])


class _Budget:
    """The moves or the seconds of a search, of which each round gets a share."""

    def __init__(self, begun: float, limit_s: float | None, moves: int | None, operators: int) -> None:
        self.begun, self.limit_s = begun, math.inf if limit_s is None else limit_s
        if moves is None and limit_s is None:
            moves = MOVES + MOVES_OF_OPERATOR * operators
        self.moves = moves
        self.spent = 0.0  # the share that rounds were given so far

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.begun >= self.limit_s

    def of_cuts(self, count: int) -> float:
        """Return the time of `time.monotonic` at which one of `count` runs must have its starts."""
        return math.inf if math.isinf(self.limit_s) else time.monotonic() + CUTS_SHARE * self.limit_s / count

    @property
    def left_s(self) -> float | None:
        """The seconds that are left; None without a limit."""
        return None if math.isinf(self.limit_s) else max(0.0, self.begun + self.limit_s - time.monotonic())

    def round(self, run: _Run, share: float, hot: float) -> None:
        """Anneal with a share of the budget, at first as hot as `hot`."""
        self.spent += share
        if self.moves is not None:
            total = round(self.moves * share)
            for done in range(0, total, CHUNK):
                if self.is_over:
                    break
                run.anneal(done, min(done + CHUNK, total), total, hot)
            return
        started, end = time.monotonic(), self.begun + ANNEALED * self.limit_s * min(self.spent, 1.0)
        done, now = 0, started
        while now < end:
            # As many moves as the time that is left allows, by the speed so far.
            total = max(done + CHUNK, int(done * (end - started) / max(now - started, 1e-9)))
            run.anneal(done, done + CHUNK, total, hot)
            done, now = done + CHUNK, time.monotonic()


@dataclass
class _Run:
    """The search for one set of devices and one number of stages."""

    problem: Problem
    devices: tuple[Device, ...]
    node: Integers
    graph: GraphArrays
    arrays: DeviceArrays
    aim: Aim
    state: State
    starts: list[tuple[Integers, Integers]]
    orders: list[Integers]

    @property
    def can_be_cut_anew(self) -> bool:
        """Whether dynamic programming along an order takes milliseconds and minimises what the problem does."""
        size = len(self.problem.graph) * len(self.devices) ** (2 if self.arrays.are_alike else 4)
        return (
            size <= MOST_CUT_ANEW
            and not counts_edges(self.problem.objective)
            and len(self.state.stage) == len(self.problem.graph)  # else `children_together` joins operators
        )

    @property
    def key(self) -> tuple[float, ...]:
        """The excess of the best plan over limits, then its figures."""
        return tuple(self.state.best[:4].tolist())

    @property
    def order(self) -> Integers:
        """The nodes in the order of the best plan."""
        return np.argsort(self.state.best_stage, kind="stable")

    @property
    def is_legal(self) -> bool:
        return bool(self.state.best[0] <= 0.0)

    def begin(self, start: tuple[Integers, Integers]) -> None:
        """Place the nodes as in a start, and note it if it is the best so far."""
        best = self.state.best.copy()
        self.state.stage[:], self.state.device[:] = start
        place_all(self.graph, self.aim, self.state)
        for s in range(len(self.state.busy)):
            annealing.weigh(self.arrays, self.aim, self.state, s)
        self.state.best[:] = best
        self.anneal(0, 0, 1, 1.0)

    def go_back(self) -> None:
        """Place the nodes as in the best plan so far."""
        self.begin((self.state.best_stage.copy(), self.state.best_device.copy()))

    def anneal(self, begin: int, end: int, total: int, hot: float) -> None:
        swaps = 0 if self.arrays.are_alike or len(self.devices) < 2 else 128
        annealing.anneal(self.graph, self.arrays, self.aim, self.state, begin, end, total, hot, COLD, swaps, MOST_NODES)

    def set_level(self, level: int) -> None:
        """Minimise this part of the objective from now on, in figures relative to those of the best plan."""
        best = self.state.best[1:4].copy()
        self.aim = self.aim._replace(level=level, caps=best, penalty=LEGAL if self.is_legal else ILLEGAL)
        if self.is_legal:
            self.aim = self.aim._replace(scale=np.maximum(best, 1e-12))

    def stages(self) -> tuple[Stage, ...]:
        """Return the best plan of this run."""
        return self.stages_of(self.state.best_stage, self.state.best_device)

    def stages_of(self, stage: Integers, device: Integers) -> tuple[Stage, ...]:
        """Return the stages where the nodes stand so."""
        groups = grouped(self.problem.graph, stage[self.node].tolist(), len(self.state.busy))
        return tuple(Stage((self.devices[d].name,), group) for d, group in zip(device, groups, strict=False))


def _share_out(runs: list[_Run], budget: _Budget) -> None:
    """Spend the budget: the better half of the runs goes on to the next turn, until one is left."""
    runs = sorted(runs, key=lambda run: run.key)[:MOST_RUNS]
    turns = max(1, math.ceil(math.log2(len(runs))) + 1)
    for turn in range(turns):
        share = (0.5 if len(runs) > 1 else 1.0) * (1 - budget.spent)
        for run in runs:
            _rounds(run, budget, share / len(runs), ROUNDS if turn == turns - 1 else 1)
        best = min(runs, key=lambda run: run.key)
        for run in runs:
            if run is not best:
                _cut_anew(run, budget, best.order)
        runs = sorted(runs, key=lambda run: run.key)[: max(1, len(runs) // 2)]


def _rounds(run: _Run, budget: _Budget, share: float, rounds: int) -> None:
    """Anneal several times: from each start, and from the best."""
    parts = [part for part in run.aim.parts.tolist() if part != annealing.NOTHING] or [0]
    levels = range(len(parts)) if run.problem.is_lexicographic else range(1)
    for number in range(rounds):
        if number < len(run.starts):
            run.begin(run.starts[number])
        else:
            run.go_back()
        for level in levels:
            run.set_level(level)
            hot = (HOT if number < len(run.starts) else HOT / 4) * len(run.state.busy) / len(run.state.stage)
            budget.round(run, share / rounds / len(levels), hot)
            run.go_back()
        _cut_anew(run, budget)


def _cut_anew(run: _Run, budget: _Budget, *others: Integers) -> None:
    """Cut the order of the best plan anew, by dynamic programming, as often as that gives a better plan.

    The order is that of the stages and, within a stage, that of the operators in the graph or in `_deep_order`. The
    loops move operators one by one and can be stuck where many must move at once; this moves whole boundaries.

    Args:
        others: more orders of the nodes to cut, which runs of other numbers of stages or other devices found.
    """
    operator_of = np.argsort(run.node)  # where each node is one operator
    while run.can_be_cut_anew and not budget.is_over:
        before = run.key
        own = [order[np.argsort(run.state.best_stage[order], kind="stable")] for order in run.orders]
        for order in (*own, *others):
            try:
                found = along(
                    replace(run.problem, stages=len(run.state.busy), time_limit_s=budget.left_s),
                    operator_of[order].tolist(),
                    NAME,
                )
            except (NoPlanError, OptionError):
                continue
            start = _of_hint(run.problem, run.devices, run.node, found.stages)
            if start is not None:
                run.begin(start)
        run.go_back()
        if run.key >= before:
            break


def _runs(problem: Problem, hint: tuple[Stage, ...] | None, seed: int, budget: _Budget) -> Iterator[_Run]:
    """Yield a run for each set of devices that can work together and each number of stages."""
    node = nodes_of(problem)
    sets = list(disjoint_sets(problem.platform.devices))
    most = min(max(map(len, sets)), int(node.max()) + 1)
    if problem.stages is not None and problem.stages > most:
        raise InfeasibleError(
            f"{NAME} puts every stage on a device of its own: {problem.stages} stages are asked for, and at most "
            f"{most} devices of platform {problem.platform.name} can work at the same time"
            if most < int(node.max()) + 1
            else f"{problem.stages} stages: with `children_together` {problem.graph.name} has at most {most}"
        )
    first = np.unique(node, return_index=True)[1]  # an operator of each node
    maker = ReachGraph.of(problem)
    count = len(sets) * (most if problem.stages is None else 1)
    for devices in sets:
        arrays, weights = device_arrays(problem, devices)
        graph = graph_arrays(problem, node, weights)
        orders = [np.arange(int(node.max()) + 1), _deep_order(graph)]
        for stages in range(1, min(len(devices), most) + 1) if problem.stages is None else [problem.stages]:
            if stages > len(devices):
                continue
            far = maker.stages_of(stages, budget.of_cuts(count)) if maker is not None else ()
            placed = [stage_of[first] for stage_of in far]
            state = new_state(graph, arrays, stages, seed)
            run = _Run(problem, devices, node, graph, arrays, _aim(problem), state, [], orders)
            _start(run, hint, placed)
            yield run


def _start(run: _Run, hint: tuple[Stage, ...] | None, placed: list[Integers]) -> None:
    """Choose the starts of a run, and the scale of its figures.

    Args:
        placed: the stage of each node in plans by minimum cuts, the better plans later.
    """
    graph, arrays, devices, state = run.graph, run.arrays, run.devices, run.state
    stages, starts = len(state.busy), []
    hinted = _of_hint(run.problem, devices, run.node, hint) if hint is not None and len(hint) == stages else None
    if hinted is not None:
        starts.append(hinted)
    fastest = np.argsort([_node_seconds(graph, arrays, d).sum() for d in range(len(devices))], kind="stable")
    for device in [np.arange(len(devices)), *([] if arrays.are_alike else [fastest])]:
        for order in run.orders:
            starts.append((_cut_order(graph, arrays, run.aim, order, device, stages), device))
        starts += [(stage_of, device) for stage_of in placed[-MOST_PLACED:]]
    found = []
    for start in starts:
        state.best[0] = math.inf
        run.begin(start)
        found.append(run.key)
    # The scale of the figures is that of the best start.
    ranked = sorted(range(len(starts)), key=found.__getitem__)
    run.starts = [starts[index] for index in ranked][: 3 if hinted is None else 4]
    best = found[ranked[0]]
    run.aim = run.aim._replace(scale=np.maximum(best[1:], _whole(run.problem, graph, arrays)))
    state.best[0] = math.inf
    for start in run.starts:
        run.begin(start)


def _whole(problem: Problem, graph: GraphArrays, arrays: DeviceArrays) -> float:
    """Return the seconds of the whole model on the slowest device, or its bytes: a scale for plans beyond limits."""
    if problem.is_lexicographic:
        return float(graph.weights[:, PARAMS].sum() + graph.tensor_bytes.sum()) + 1.0
    return max(float(_node_seconds(graph, arrays, d).sum()) for d in range(len(arrays.capacity))) + 1e-9


def _aim(problem: Problem) -> Aim:
    """Return what the problem minimises."""
    codes = {"throughput": annealing.PERIOD, "latency": annealing.LATENCY, "energy": annealing.ENERGY}
    known = {"memory": annealing.MEMORY, "dram": annealing.OVERFLOW}
    parts = [known.get(part, annealing.COMMUNICATION) for part in problem.objective.split(",")]
    if not problem.is_lexicographic:
        parts = []
    return Aim(
        objective=codes.get(problem.objective, annealing.BYTES),
        parts=np.array((parts + [annealing.NOTHING] * 3)[:3]),
        edges="edge_communication" in problem.objective,
        lock_s=lock_s(problem),
        idle_w=idle_w(problem),
        most_s=math.inf if problem.min_throughput_fps is None else 1 / problem.min_throughput_fps,
        most_latency_s=math.inf if problem.max_latency_s is None else problem.max_latency_s,
        level=0,
        caps=np.full(3, math.inf),
        scale=np.ones(3),
        smooth=SMOOTH,
        penalty=ILLEGAL,
    )


def _of_hint(
    problem: Problem, devices: tuple[Device, ...], node: Integers, hint: tuple[Stage, ...]
) -> tuple[Integers, Integers] | None:
    """Return the stage of each node and the devices of a hint; None where it is no plan of this run."""
    numbers = {device.name: index for index, device in enumerate(devices)}
    used = [numbers.get(stage.devices[0], -1) if len(stage.devices) == 1 else -1 for stage in hint]
    if min(used) < 0 or len(set(used)) < len(used):
        return None
    try:
        evaluate(problem, hint)
    except PlanError:
        return None
    stage = np.zeros(int(node.max()) + 1, np.int64)
    stage[node] = stage_of(problem.graph, hint)
    return stage, np.array([*used, *(index for index in range(len(devices)) if index not in used)])


def _judged(problem: Problem, found: list[tuple[Stage, ...]]) -> Plan:
    """Return the best of the plans by the judge."""
    plans: list[Plan] = []
    refused: list[str] = []
    for stages in found:
        if problem.stages not in (None, len(stages)) or any(len(stage.devices) > 1 for stage in stages):
            continue
        try:
            fitting = fitting_orders(problem, stages)
            plans.append(
                Plan(problem.graph.name, NAME, problem.objective, fitting, evaluate(problem, fitting).predicted)
            )
        except PlanError as error:
            refused.append(str(error))
    if plans:
        return min(plans, key=cost_key)
    if refused:
        raise LimitMissedError(f"{NAME} found no plan that keeps the limits: {refused[0]}")
    raise NoPlanError(
        f"{NAME} found no plan of {problem.graph.name} that keeps the limits of the problem; one may exist: use "
        "`scheduler` best or cp-sat, give more `time_limit_s`, or loosen a limit"
    )


def _cut_order(
    graph: GraphArrays, devices: DeviceArrays, aim: Aim, order: Integers, device: Integers, stages: int
) -> Integers:
    """Return the stage of each node after cutting `order` into stages of about equal seconds.

    Stage s is on device[s]. Transfers, fetches and limits do not count. For objectives of bytes, the stages have about
    equal bytes of parameters.
    """
    rows = [graph.weights[:, PARAMS]] * stages
    if aim.objective != annealing.BYTES:
        rows = [_node_seconds(graph, devices, d) for d in device[:stages].tolist()]
    totals = [max(float(row.sum()), 1e-12) for row in rows]
    relative = sum(row / total for row, total in zip(rows, totals, strict=True))
    ends = even_ends(np.concatenate(([0.0], np.cumsum(relative[order]))), [1 / total for total in totals])
    stage = np.empty(len(order), np.int64)
    stage[order] = np.repeat(np.arange(stages), np.diff(ends))
    return stage


def _node_seconds(graph: GraphArrays, devices: DeviceArrays, d: int) -> Floats:
    """Return the seconds of each node on device d, without fetches of parameters."""
    seconds: Floats = graph.weights[:, MACS] * devices.s_per_mac[d]
    return seconds + graph.weights[:, devices.added[d]] if devices.added[d] >= 0 else seconds


def even_ends(sums: Floats, shares: Sequence[float]) -> Integers:
    """Return ascending positions, from the first to the last, that cut ascending sums about in proportion to shares."""
    wanted = np.cumsum(shares)[:-1] / np.sum(shares) * sums[-1]
    found = np.array([0, *np.searchsorted(sums, wanted), len(sums) - 1])
    for index in range(1, len(shares)):
        found[index] = max(found[index], found[index - 1] + 1)
    for index in range(len(shares) - 1, 0, -1):
        found[index] = min(found[index], found[index + 1] - 1)
    return found


def _deep_order(graph: GraphArrays) -> Integers:
    """Return a topological order that follows a branch to its end: of the ready nodes, the last that became ready."""
    before, after = ([row.tolist() for row in np.split(graph.next[side], graph.starts[side, 1:-1])] for side in (1, 0))
    return np.array(topological_order(before, after, "last"))
