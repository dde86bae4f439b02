"""Every plan there is, for problems small enough to write them all down; `evaluate` judges each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Prediction, Stage
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.problem import Problem, may_exceed
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import PlanError


def every_chain(problem: Problem, stages: int | None, *, again: bool) -> Iterator[tuple[Stage, ...]]:
    """Yield every cut of the graph's own order into consecutive stages, on every choice of devices.

    Args:
        stages: how many; None for any number.
        again: whether a device may come again (not in consecutive stages); else each serves one stage.
    """
    names = problem.graph.operator_names
    devices = [device.name for device in problem.platform.devices]
    for count in range(1, len(names) + 1) if stages is None else [stages]:
        for cuts in itertools.combinations(range(1, len(names)), count - 1):
            ends = [0, *cuts, len(names)]
            for chosen in itertools.product(devices, repeat=count):
                if again and any(a == b for a, b in itertools.pairwise(chosen)):
                    continue
                if not again and len(set(chosen)) < count:
                    continue
                yield tuple(
                    Stage((device,), tuple(names[start:end]))
                    for device, (start, end) in zip(chosen, itertools.pairwise(ends), strict=True)
                )


def every_plan(
    problem: Problem, stages: int | None = None, *, again: bool = False, replicas: bool = False
) -> Iterator[tuple[Stage, ...]]:
    """Yield every division of the operators into stages that respects every edge, on every choice of devices.

    Stages need not be consecutive in the graph's order; inside one, operators stand in it. No two devices share cores.

    Args:
        stages: how many; None for any number.
        again: whether a device may come again (not in consecutive stages, and not as a replica).
        replicas: whether a stage may stand on several devices.
    """
    names = problem.graph.operator_names
    most = len(names) if again else min(len(names), len(problem.platform.devices))
    chosen: dict[int, list[tuple[tuple[str, ...], ...]]] = {}
    for groups in every_cut(problem.graph, most):
        count = len(groups)
        if stages not in (None, count):
            continue
        if count not in chosen:
            chosen[count] = list(every_choice(problem.platform, count, again=again, replicas=replicas))
        for devices in chosen[count]:
            yield tuple(map(Stage, devices, groups))


def every_cut(graph: OperatorGraph, most: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield the operators in 1 to `most` non-empty groups, none of which reads from a later one."""
    names = graph.operator_names
    writer = {tensor.name: i for i, operator in enumerate(graph.operators) for tensor in operator.outputs}
    reads = [sum({1 << writer[t] for t in operator.inputs if t in writer}) for operator in graph.operators]
    # Sets of operators are bits; legal as the operators of the first groups where all that they read is in them.
    downsets = [s for s in range(1 << len(names)) if all(reads[i] & ~s == 0 for i in range(len(names)) if s >> i & 1)]

    def extend(groups: tuple[tuple[str, ...], ...], done: int) -> Iterator[tuple[tuple[str, ...], ...]]:
        if done == (1 << len(names)) - 1:
            yield groups
        elif len(groups) < most:
            for following in downsets:
                if following != done and following & done == done:
                    new = following & ~done
                    yield from extend((*groups, tuple(n for i, n in enumerate(names) if new >> i & 1)), following)

    return extend((), 0)


def every_choice(
    platform: Platform, count: int, *, again: bool, replicas: bool
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield the devices of each of `count` stages in every way, as `every_plan` says."""
    cores = {device.name: set(device.cores) for device in platform.devices}
    widest = len(cores) if replicas else 1
    sets = [group for size in range(1, widest + 1) for group in itertools.combinations(cores, size)]

    def extend(chosen: tuple[tuple[str, ...], ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
        if len(chosen) == count:
            yield chosen
            return
        used = {name for group in chosen for name in group}
        for group in sets:
            repeats = again and len(group) == 1 and group in chosen and group != chosen[-1]
            fresh = all(name not in used for name in group)
            if (fresh or repeats) and _apart([cores[name] for name in used.union(group)]):
                yield from extend((*chosen, group))

    return extend(())


def serving_once(problem: Problem) -> set[str]:
    """Return the devices that serve one stage: as they say, with little memory for several, or a cache in their model.

    The model of a device that was measured does not count, and neither does its cache.
    """
    return {
        device.name
        for device in problem.platform.devices
        if device.most_stages == 1
        or may_exceed(problem.graph, device)
        or (device.name not in problem.profile.devices and device.model and device.model.cached_bytes is not None)
    }


def every_sharing(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """Yield every plan that `evaluate` allows: stages on any devices, replicas that serve other stages as well."""
    names = [device.name for device in problem.platform.devices]
    sets = [group for size in range(1, len(names) + 1) for group in itertools.combinations(names, size)]
    for groups in every_cut(problem.graph, len(problem.graph)):
        for devices in itertools.product(sets, repeat=len(groups)):
            stages = tuple(map(Stage, devices, groups))
            if verdict(problem, stages) is not None:
                yield stages


def _apart(cores: list[set[int]]) -> bool:
    return sum(map(len, cores)) == len(set().union(*cores))


def every_replication(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """Yield the whole model on every set of two or more devices that may work together."""
    names = tuple(problem.graph.operator_names)
    devices = [device.name for device in problem.platform.devices]
    for size in range(2, len(devices) + 1):
        for group in itertools.combinations(devices, size):
            if verdict(problem, (Stage(group, names),)) is not None:
                yield (Stage(group, names),)


def verdict(problem: Problem, stages: tuple[Stage, ...]) -> Prediction | None:
    """Return the verdict of `evaluate` on a plan; None if it refuses it."""
    try:
        return evaluate(problem, stages).predicted
    except PlanError:
        return None


def figure(problem: Problem, predicted: Prediction) -> Any:
    """Return the objective's figure, signed so that less is better; a tuple if the objective is lexicographic."""
    match problem.objective:
        case "throughput":
            assert predicted.throughput_fps is not None
            return -predicted.throughput_fps
        case "latency":
            assert predicted.latency_s is not None
            return predicted.latency_s
        case "energy":
            assert predicted.energy_j is not None
            return predicted.energy_j
    known = {
        "memory": predicted.memory_bytes,
        "dram": predicted.dram_bytes,
        "communication": predicted.communication_bytes,
        "edge_communication": predicted.edge_communication_bytes,
    }
    return tuple(known[part] for part in problem.objective.split(","))


def least(problem: Problem, plans: Iterator[tuple[Stage, ...]]) -> Any:
    """Return the best figure of all plans that `evaluate` allows; None if it allows none."""
    allowed = (verdict(problem, stages) for stages in plans)
    return min((figure(problem, predicted) for predicted in allowed if predicted is not None), default=None)
