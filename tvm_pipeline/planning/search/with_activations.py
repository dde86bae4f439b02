"""Pipelines whose stages fit the memory of their devices with their activations, and not only with their parameters.

The peak of a stage's activations in the best order is no sum over operators, and does not grow with the stage: a larger
stage may end at a cut where fewer bytes are alive. So the searches count parameters alone, which is a relaxation. Its
bound holds in any case, and if its best plan fits with activations, too, this plan is optimal. If it does not fit, this
module cuts the graph's own order by dynamic programming over (last device, devices used) with a cost of every segment.

A segment first counts with a cheap lower bound of its memory (`least_needs`). Only when the best pipeline contains the
segment, its best order is searched; if the segment is too large, the best pipeline is searched again. The pipeline at
the end is the best one. LazySP (Dellin and Srinivasa, ICAPS 2016) checks only the edges of the best path in the same
way, as does `planning/corrected.py`.

Next: `tvm_pipeline/memory/stage_memory.py`, the memory that a stage needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import counts_period, idle_w, lock_s
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, PlanError
from tvm_pipeline.memory import stage_memory as memory
from tvm_pipeline.planning.search.cost_tables import StageCosts, capacities, stage_joules, stage_seconds
from tvm_pipeline.planning.search.cuts import Cuts, Floats, Integers, prefixes
from tvm_pipeline.planning.search.idle_power import CappedResult, EnergyResult, least_energy
from tvm_pipeline.planning.search.space import is_steady, serving_once, stage_limits
from tvm_pipeline.planning.stage_orders import fitting_orders

# If there are more devices, only their order in the platform is tried: all orders of six devices take seconds for a
# graph of 700 operators.
MOST_REORDERED = 5
# The seconds for which pipelines are proposed and checked if no limit is given; nearly all searches end within one.
SEARCH_S = 30.0


def fitting_chain(problem: Problem, refused: str) -> Plan:
    """Return the best pipeline of consecutive operators, in the graph's own order, that fits with its activations.

    It is like `dynamic_programming.chain` with three differences. Of a lexicographic objective only the first part is
    minimised. A limit of latency and the buses are only judged at the end. More than MOST_REORDERED devices serve in
    the order of the platform. The plan has no bound.

    Args:
        refused: why the best pipeline by parameters alone does not fit; the message says so if no other one fits.

    Raises:
        InfeasibleError: an operator fits no device.
        LimitMissedError: no such pipeline was found.
    """
    _check_operators(problem)
    deadline = time.monotonic() + (SEARCH_S if problem.time_limit_s is None else problem.time_limit_s)
    cuts = prefixes(problem.graph)
    needs = _SegmentBytes(problem.graph, cuts)
    found: list[_Segment] | None = None
    least = math.inf
    for search in _searches(problem, cuts):
        best = _best_fitting(search, needs, least, deadline)
        least = best.value
        if best.plan:
            found = [(search.devices[device].name, start, end) for device, start, end in best.plan]
        if best.ended:
            break
    if found is None:
        raise LimitMissedError(
            f"no pipeline was found along the order of {problem.graph.name} whose stages fit into memory_bytes with "
            f"their activations, and of the best without them {refused}"
        )
    names = tuple(operator.name for operator in problem.graph.operators)
    stages = tuple(Stage((name,), names[start:end]) for name, start, end in found)
    try:
        stages = fitting_orders(problem, stages)
        predicted = evaluate(problem, stages).predicted
    except PlanError as error:
        raise LimitMissedError(f"the best pipeline whose activations fit misses a limit: {error}") from error
    return Plan(problem.graph.name, "chain", problem.objective, stages, predicted)


def _best_fitting(search: _Search, needs: _SegmentBytes, below: float, deadline: float) -> EnergyResult[list[_Segment]]:
    """Return the best pipeline that fits, and whose value is `below`; the value need not be an energy."""

    def under(cap: float, _: float, below: float) -> CappedResult[list[_Segment]]:
        while time.monotonic() < deadline:
            value, segments = search.best(needs.bytes, below, cap)
            # All are checked, so that the next proposal avoids every segment of this one that is too large.
            fits = [needs.fit(search.devices[device], start, end) for device, start, end in segments]
            if all(fits):
                period_s = search.period_s(segments) if search.idle_w else math.inf
                return CappedResult(value, period_s, segments or None)
        return CappedResult(math.inf, math.inf, None, ended=True)

    if not search.idle_w:
        found = under(search.most_s, 0.0, below)
        return EnergyResult(found.plan, below if found.plan is None else found.active_j, -math.inf, found.ended)
    return least_energy(under, search.idle_w, (search.least_s, search.most_s), below)


def _check_operators(problem: Problem) -> None:
    """Raise InfeasibleError if an operator by itself fits no device."""
    devices = problem.platform.devices
    largest = max(devices, key=lambda device: math.inf if device.memory_bytes is None else device.memory_bytes)
    if largest.memory_bytes is None:
        return
    tensors = problem.graph.tensors
    for operator in problem.graph.operators:
        touched = sum(tensors[read].bytes for read in dict.fromkeys(operator.inputs)) + operator.output_bytes
        if operator.param_bytes + touched > largest.memory_bytes:
            raise InfeasibleError(
                f"operator {operator.name} needs {operator.param_bytes} bytes of parameters and {touched} of tensors "
                f"that it reads and writes; device {largest.name}, which has the most memory, has "
                f"{largest.memory_bytes}; give it more, or choose a smaller input"
            )


def least_needs(graph: OperatorGraph) -> Floats:
    """Return an N+1 x N+1 matrix: a lower bound of the activations, in bytes, that operators i to j-1 need.

    A segment needs all its inputs together with its outputs, and all its inputs together with the tensors of any one of
    its operators. Entries with i >= j are infinite.
    """
    count, tensors = len(graph), graph.tensors
    writer, readers = graph.edges.writer, graph.edges.readers
    own = np.array(
        [sum(tensors[t].bytes for t in dict.fromkeys(o.inputs)) + o.output_bytes for o in graph.operators], float
    )
    kept = set(graph.outputs)
    need = np.full((count + 1, count + 1), np.inf)
    alive: list[str] = [tensor.name for tensor in graph.inputs]
    written = np.zeros(count + 1)  # for each cut: bytes alive there that were written after cut i, `start` below
    for name, index in writer.items():
        last = count if name in kept else max(readers[name], default=index)
        written[index + 1 : last + 1] += tensors[name].bytes
    for start in range(count):
        # `other` has the bytes of each operator's tensors that are no inputs of the segment.
        received, other, leaving = np.zeros(count + 1), own.copy(), written.copy()
        for name in alive:
            size = tensors[name].bytes
            later = [reader for reader in readers[name] if reader >= start]
            if later:
                received[later[0] + 1 :] += size
                other[later] -= size
            if name in writer:
                last = count if name in kept else max(readers[name], default=writer[name])
                leaving[start : last + 1] -= size
        most = np.maximum.accumulate(other[start:])
        need[start, start + 1 :] = received[start + 1 :] + np.maximum(most, leaving[start + 1 :])
        alive = [name for name in alive if name in kept or any(reader > start for reader in readers[name])]
        alive += [
            tensor.name for tensor in graph.operators[start].outputs if tensor.name in kept or readers[tensor.name]
        ]
    return need


class _SegmentBytes:
    """The bytes of parameters and activations that segments need.

    Attributes:
        bytes: N+1 x N+1; a lower bound, or the exact bytes of a segment that `fit` found too large.
    """

    def __init__(self, graph: OperatorGraph, cuts: Cuts) -> None:
        self.graph, self.param_bytes = graph, cuts.param_bytes
        self.bytes = least_needs(graph) + (self.param_bytes - self.param_bytes[:, None])

    def fit(self, device: Device, start: int, end: int) -> bool:
        """Return whether the operators start to end-1 fit the device."""
        if device.memory_bytes is None:
            return True
        names = [operator.name for operator in self.graph.operators[start:end]]
        params = int(self.param_bytes[end] - self.param_bytes[start])
        needed = params + memory.activation_bytes(self.graph, names, device.memory_bytes - params)
        if needed > device.memory_bytes:
            self.bytes[start, end] = needed
        return needed <= device.memory_bytes


# A segment is the device of a stage, and the cuts before and behind the stage.
_Segment = tuple[Any, int, int]
# How many stages each device served, where that is limited, and the device of the last stage.
_State = tuple[tuple[int, ...], int]


def _searches(problem: Problem, cuts: Cuts) -> Iterator[_Search]:
    """Yield a search for each set of devices that work together, and for each number of them if they slow down."""
    # As in `dynamic_programming.py`: only if no throughput is required, a device may serve several stages.
    apart = counts_period(problem) or problem.is_lexicographic
    for devices in disjoint_sets(problem.platform.devices):
        once = serving_once(problem, devices, apart)
        if problem.is_lexicographic:
            stages = problem.stages or min(len(devices), len(problem.graph))
            yield _Search(problem, cuts, devices, once, stages, 1)
            continue
        if not apart or is_steady(problem, devices):
            yield _Search(problem, cuts, devices, once, problem.stages, 1)
            continue
        for working in range(1, len(devices) + 1) if problem.stages is None else [problem.stages]:
            yield _Search(problem, cuts, devices, once, working, working)


class _LayerPipelines(NamedTuple):
    """The best pipelines of a layer, by the cut at which they end.

    Attributes:
        value: N+1; their values.
        origin: N+1; the cut before the last stage.
        leader: N+1; the number of the state before the last stage.
    """

    value: Floats
    origin: Integers
    leader: Integers


class _Search:
    """A search for pipelines along a chain of M cuts.

    Attributes:
        devices, stages: as in `space.Space`.
        limits: how many stages each device serves at most; infinite where any number.
        usable: M; whether a stage may end at the cut.
        capacity: the bytes of memory of each device; infinite where there is no limit.
        adds: whether the values of stages are added, else their maximum counts.
        tables: for each device, M x M costs of a stage without receiving.
        enter: (D+1) x D x M; the cost of receiving a cut, as in `StageCosts`.
        seconds, received_s: the same of the seconds of a stage while the others work, where they are capped.
        most_s: the seconds that no stage may exceed.
        least_s: a lower bound of the seconds between frames, which the lock of the interpreter gives.
        idle_w: the idle power, where it counts; else 0.
    """

    def __init__(
        self,
        problem: Problem,
        cuts: Cuts,
        devices: tuple[Device, ...],
        once: frozenset[int],
        stages: int | None,
        working: int,
    ) -> None:
        self.devices, self.stages = devices, stages
        self.limits = stage_limits(devices, once, stages or len(cuts.graph))
        self.usable = cuts.together if problem.children_together else np.ones(len(cuts), bool)
        param_bytes, self.capacity = cuts.param_bytes.astype(float), capacities(devices)
        self.adds = problem.objective not in ("throughput", "memory,communication", "memory,dram,communication")
        self.most_s, self.least_s = math.inf, lock_s(problem)
        self.idle_w = idle_w(problem) if problem.objective == "energy" else 0.0
        if problem.is_lexicographic:
            beyond = [device.cache_bytes or 0 if self.adds else 0 for device in devices]
            between = param_bytes - param_bytes[:, None]
            self.tables = [np.maximum(between - cache, 0.0) for cache in beyond]
            self.enter = np.zeros((len(devices) + 1, len(devices), len(cuts)))
            return
        busy = stage_seconds(problem, cuts, devices, working)
        costs = busy
        if self.adds:
            costs = (stage_joules if problem.objective == "energy" else stage_seconds)(problem, cuts, devices)
        self.tables, self.enter = _tables(costs, param_bytes), costs.enter
        self.seconds, self.received_s = _tables(busy, param_bytes), busy.enter
        if problem.min_throughput_fps is not None:
            self.most_s = (1 + 1e-9) / problem.min_throughput_fps

    def period_s(self, segments: Sequence[_Segment]) -> float:
        """Return the seconds of the slowest stage; infinite where there are no stages."""
        senders = [len(self.devices), *(device for device, _, _ in segments)]
        taken = [
            float(self.seconds[device][start, end] + self.received_s[sender, device, start])
            for sender, (device, start, end) in zip(senders, segments, strict=False)
        ]
        return max(taken, default=math.inf)

    def best(self, needs: Floats, below: float, cap: float = math.inf) -> tuple[float, list[_Segment]]:
        """Return the pipeline of least value below `below` whose segments fit; infinite and empty if there is none.

        Args:
            needs: N+1 x N+1; the bytes that each segment needs.
            cap: the seconds that no stage may exceed.
        """
        fitting = [
            np.where(needs <= capacity, table, np.inf)
            for table, capacity in zip(self.tables, self.capacity, strict=True)
        ]
        count = len(self.usable)
        start = _LayerPipelines(np.where(np.arange(count) > 0, np.inf, 0.0), np.zeros(count, int), np.zeros(count, int))
        layers: list[dict[_State, _LayerPipelines]] = [{((0,) * len(self.devices), -1): start}]
        least: dict[_State, Floats] = {}
        while layers[-1] and len(layers) <= (self.stages or count):
            following: dict[_State, _LayerPipelines] = {}
            for number, ((served, last), before) in enumerate(layers[-1].items()):
                for device in self.next_devices(served, last):
                    counted = math.isfinite(self.limits[device])
                    key = (*served[:device], served[device] + counted, *served[device + 1 :]), device
                    reached = self.extended(before, number, fitting[device], last, device, cap)
                    following[key] = _better(following[key], reached) if key in following else reached
            for key, reached in list(following.items()):
                known = least.get(key, np.full(count, below)) if self.stages is None else below
                reached.value[~(self.usable & (reached.value < known))] = np.inf
                if self.stages is None:
                    least[key] = np.minimum(reached.value, known)
                if np.isinf(reached.value).all():
                    del following[key]
            layers.append(following)
        return _traced([layer if self.stages in (None, stages) else {} for stages, layer in enumerate(layers)], layers)

    def next_devices(self, served: tuple[int, ...], last: int) -> list[int]:
        """Return the devices that may serve the next stage."""
        if len(self.devices) > MOST_REORDERED:
            return list(range(last + 1, len(self.devices)))
        return [d for d, count in enumerate(served) if d != last and count < self.limits[d]]

    def extended(
        self, before: _LayerPipelines, number: int, table: Floats, last: int, device: int, cap: float
    ) -> _LayerPipelines:
        """Return the pipelines of state `number` with one more stage, which receives from device `last`."""
        alive = np.flatnonzero(np.isfinite(before.value))
        costs = table[alive] + self.enter[last, device, alive, None]
        if math.isfinite(cap):
            costs[self.seconds[device][alive] + self.received_s[last, device, alive, None] > cap] = np.inf
        values = before.value[alive, None]
        values = values + costs if self.adds else np.maximum(values, costs)
        chosen = values.argmin(axis=0)
        return _LayerPipelines(values[chosen, np.arange(len(chosen))], alive[chosen], np.full(len(chosen), number))


def _tables(costs: StageCosts, param_bytes: Floats) -> list[Floats]:
    """Return, for each device, M x M costs of the stage between two cuts, without receiving; else infinite."""
    ends = np.arange(len(param_bytes))
    starts = ends[:, None]
    tables = []
    for device in range(len(costs.added)):
        taken = costs.stage(param_bytes, device, len(costs.added), starts, ends) - costs.enter[-1, device][:, None]
        tables.append(np.where((starts < ends) & (taken < costs.impossible), taken, np.inf))
    return tables


def _better(one: _LayerPipelines, other: _LayerPipelines) -> _LayerPipelines:
    """Return the better of two pipelines at every cut."""
    wins = other.value < one.value
    return _LayerPipelines(*(np.where(wins, theirs, own) for own, theirs in zip(one, other, strict=True)))


def _traced(
    ends: list[dict[_State, _LayerPipelines]], layers: list[dict[_State, _LayerPipelines]]
) -> tuple[float, list[_Segment]]:
    """Return the value and the segments of the best pipeline that ends in one of `ends` at the last cut."""
    finished = [
        (reached.value[-1], stages, number)
        for stages, layer in enumerate(ends)
        for number, reached in enumerate(layer.values())
    ]
    value, stages, number = min(finished, default=(math.inf, 0, 0))
    if math.isinf(value):
        return math.inf, []
    cut, segments = -1, []
    while stages:
        (_, device), reached = list(layers[stages].items())[number]
        end = cut % len(reached.value)
        cut, number, stages = int(reached.origin[end]), int(reached.leader[end]), stages - 1
        segments.append((device, cut, end))
    return float(value), segments[::-1]
