"""Platforms and graphs that are too large to plan for are refused, and large ones end in time with a plan."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph_files import Node, graph_of_nodes, read_graph
from tvm_pipeline.core.graph_limits import MOST_OPERATORS
from tvm_pipeline.core.platform import Device, Platform, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import read_profile, unmeasured
from tvm_pipeline.errors import GraphError, PlatformError, ProfileError
from tvm_pipeline.planning import plan
from tvm_pipeline.planning.planner import MOST_DEVICES

GRAPH = graph_of_nodes("net", [Node(f"n{i}", output_bytes=8, macs=1000) for i in range(4)], [(0, 1), (1, 2), (2, 3)])


def problem(devices: list[Device]) -> Problem:
    return Problem(GRAPH, Platform("box", tuple(devices)), unmeasured(GRAPH), time_limit_s=1.0)


def modelled(name: str, macs_per_s: float, cores: tuple[int, ...] = ()) -> Device:
    return Device(name, cores=cores, model=DeviceModel(macs_per_s=macs_per_s))


@pytest.mark.thorough
def test_thirty_devices_are_planned_for_without_all_sets_of_replicas() -> None:
    """There are 2**30 sets of replicas; all equal devices together are the best of the plans."""
    decision = plan(problem([modelled(f"d{index}", 1e6) for index in range(30)]))
    replicas = next(found for found in decision.candidates if found.scheduler == "replicas")
    assert replicas.predicted.throughput_fps == pytest.approx(30 * 1e6 / 4000)
    assert (replicas.status, replicas.gap) == ("optimal", 0.0)  # by the bound of all plans, without a search


def test_the_fastest_devices_replicate() -> None:
    decision = plan(problem([modelled(f"d{index}", 1e3 if index % 2 else 1e6) for index in range(14)]), "replicas")
    assert decision.plan.status == "feasible"
    assert decision.plan.gap is not None
    assert decision.plan.gap < 0.03
    assert decision.plan.predicted.throughput_fps is not None
    assert decision.plan.predicted.throughput_fps >= 7 * 1e6 / 4000


def test_more_devices_than_any_machine_has_are_refused() -> None:
    with pytest.raises(PlatformError, match=f"platform box has {MOST_DEVICES + 1} devices.*leave some out"):
        plan(problem([modelled(f"d{index}", 1e6) for index in range(MOST_DEVICES + 1)]))


def test_devices_that_share_cores_in_too_many_ways_are_refused() -> None:
    pairs = [modelled(f"d{index}", 1e6, pair) for index, pair in enumerate(combinations(range(9), 2))]
    with pytest.raises(PlatformError, match="the 36 devices share cores in more ways"):
        plan(problem(pairs))
    assert len(list(disjoint_sets(pairs[:10]))) > 1


def test_graphs_with_too_many_operators_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    nodes = [{"name": f"n{index}", "output_bytes": 1} for index in range(MOST_OPERATORS + 1)]
    path.write_text(json.dumps({"name": "net", "nodes": nodes, "edges": []}))
    with pytest.raises(
        GraphError, match=rf"graph\.json: graph net has {MOST_OPERATORS + 1} nodes.* up to {MOST_OPERATORS}"
    ):
        read_graph(path)


def test_files_without_an_end_are_not_read_for_ever() -> None:
    with pytest.raises(ProfileError, match="/dev/zero has more than"):
        read_profile("/dev/zero")
