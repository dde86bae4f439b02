"""Stages that were measured as a whole, against what their operators say: for bounds that count operators alone.

If every measured stage takes at least f times the seconds of its operators and transfers, f at most 1, then every plan
takes at least f times a bound of plans that adds up operators. Next: `planning/local/bounds.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import cost_of


def least_ratio(problem: Problem) -> float:
    """Return the least ratio, at most 1, of a measured stage's seconds or joules to those that are added up for it."""
    graph = problem.graph
    by_name = {operator.name: operator for operator in graph.operators}
    devices = {device.name for device in problem.platform.devices}
    ratio = 1.0
    for segment in problem.profile.segments:
        if segment.device not in devices:
            continue
        costs = cost_of(problem, segment.device)
        operators = [by_name[name] for name in segment.operators]
        received, sent = _most_moved(graph, segment.operators)
        transfer_s = costs.receive.seconds(received) + costs.send.seconds(sent)
        added_s = costs.operators_s(operators) + transfer_s
        seconds = costs.whole_s(segment.operators) or 0.0
        ratio = min(ratio, seconds / max(added_s, 1e-12))
        joules = [costs.added_j(operator) for operator in operators]
        if problem.objective == "energy" and None not in joules:
            measured_j = costs.energy_j(operators, seconds, 0.0) or 0.0
            added_j = sum(j or 0.0 for j in joules) + (costs.active_w or 0.0) * transfer_s
            ratio = min(ratio, measured_j / max(added_j, 1e-12))
    return ratio


def _most_moved(graph: OperatorGraph, stage: Iterable[str]) -> tuple[int, int]:
    """Return the most bytes that a stage can receive and send, whatever stages stand around it."""
    edges, outputs = graph.edges, set(graph.outputs)
    inside = {edges.index[name] for name in stage}
    needed, needing = _reached(inside, edges.before) - inside, _reached(inside, edges.after) - inside
    received = sent = 0
    for name, tensor in graph.tensors.items():
        writer, readers = edges.writer.get(name, -1), set(edges.readers[name])
        used = bool(readers) or name in outputs
        if used and writer not in inside and writer not in needing and (name in outputs or readers - needed):
            received += tensor.bytes
        if used and writer not in needing and (name in outputs or readers - needed - inside):
            sent += tensor.bytes
    return received, sent


def _reached(start: set[int], neighbours: tuple[tuple[int, ...], ...]) -> set[int]:
    found, waiting = set(start), list(start)
    while waiting:
        for neighbour in neighbours[waiting.pop()]:
            if neighbour not in found:
                found.add(neighbour)
                waiting.append(neighbour)
    return found
