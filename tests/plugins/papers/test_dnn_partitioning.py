"""The best split of small instances of dnn-partitioning against all splits, counted on the nodes of the file."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tvm_pipeline.errors import GraphError, InfeasibleError
from tvm_pipeline.planning import plan
from tvm_pipeline_papers.dnn_partitioning import best_split, read_instance

File = dict[str, Any]


def random_file(draw: random.Random) -> File:
    """Return an instance of up to six classes, with a backward pass or without one."""
    count, training = draw.randint(1, 6), draw.random() < 0.5
    nodes: list[File] = []
    for node in range(count):
        idle = draw.random() < 0.3
        nodes.append(
            {
                "id": node,
                "supportedOnFpga": draw.random() < 0.85,
                "cpuLatency": 0.0 if idle else float(draw.randint(1, 30)),
                "fpgaLatency": 0.0 if idle else float(draw.randint(1, 9)),
                "isBackwardNode": 0,
                "colorClass": node if draw.random() < 0.8 else draw.randrange(count),
                "size": float(draw.choice((0, 3, 5))),
            }
        )
        if draw.random() < 0.2:
            del nodes[-1]["colorClass"]
    pairs = [(a, b) for a, b in itertools.combinations(range(count), 2) if draw.random() < 0.4]
    if training:
        for node in range(count):
            # A forward node without a class leaves its backward node in a separate class.
            nodes.append({**nodes[node], "id": count + node, "isBackwardNode": True, "cpuLatency": 4.0, "size": 1.0})
        pairs += [(count + b, count + a) for a, b in pairs] + [(a, count + b) for a, b in pairs if draw.random() < 0.5]
    cost = [float(draw.randint(0, 4)) for _ in nodes]
    return {
        "maxSizePerFPGA": float(draw.choice((8, 100))),
        "maxFPGAs": draw.randint(1, 3),
        "maxCPUs": draw.randint(0, 1),
        "nodes": nodes,
        "edges": [{"sourceId": a, "destId": b, "cost": cost[a]} for a, b in pairs],
    }


def load(file: File, inside: set[int], accelerator: bool) -> float:
    """Return the load of a device, as the paper defines it."""
    nodes = [node for node in file["nodes"] if node["id"] in inside]
    if not accelerator:
        return math.fsum(node["cpuLatency"] for node in nodes)
    if not all(node["supportedOnFpga"] for node in nodes):
        return math.inf
    if sum(node["size"] for node in nodes) > file["maxSizePerFPGA"]:
        return math.inf
    moved = {e["sourceId"]: e["cost"] for e in file["edges"] if (e["sourceId"] in inside) != (e["destId"] in inside)}
    return math.fsum([*(node["fpgaLatency"] for node in nodes), *moved.values()])


def least_load(file: File) -> float:
    """Return the least largest load of all assignments of the nodes whose devices have an order."""
    classes = {node["id"]: node.get("colorClass", ("alone", node["id"])) for node in file["nodes"]}
    backward = {node["id"] for node in file["nodes"] if node["isBackwardNode"]}
    forward = {classes[node] for node in classes if node not in backward}
    before = set()
    for edge in file["edges"]:
        source, reader = edge["sourceId"], edge["destId"]
        if source not in backward and reader not in backward:
            before.add((classes[source], classes[reader]))
        elif source in backward and reader in backward and not {classes[source], classes[reader]} <= forward:
            before.add((classes[reader], classes[source]))
    names = list(dict.fromkeys(classes.values()))
    devices = file["maxFPGAs"] + file["maxCPUs"]
    best = math.inf
    for chosen in itertools.product(range(devices), repeat=len(names)):
        device = dict(zip(names, chosen, strict=True))
        edges = {(device[a], device[b]) for a, b in before if device[a] != device[b]}
        if not any(all(o.index(a) < o.index(b) for a, b in edges) for o in itertools.permutations(range(devices))):
            continue
        parts = [{node for node, name in classes.items() if device[name] == d} for d in range(devices)]
        best = min(best, max(load(file, part, d < file["maxFPGAs"]) for d, part in enumerate(parts)))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all_splits_is_found(tmp_path: Path, seed: int) -> None:
    """The value is that of all assignments, and the split has it by the paper's definition."""
    file = random_file(random.Random(seed))
    while len({node.get("colorClass", ("alone", node["id"])) for node in file["nodes"]}) > 7:
        file = random_file(random.Random(seed := seed + 1000))
    path = tmp_path / "net.json"
    path.write_text(json.dumps(file))
    instance, least = read_instance(path), least_load(file)
    if math.isinf(least):
        with pytest.raises(InfeasibleError):
            best_split(instance)
        return
    split = best_split(instance)
    assert split.load_s * 1e3 == pytest.approx(least)
    nodes = [{node for name in names for node in instance.nodes[name]} for _, names in split.stages]
    assert sorted(itertools.chain(*nodes)) == sorted(node["id"] for node in file["nodes"])
    loads = [load(file, part, "acc" in device) for (device, _), part in zip(split.stages, nodes, strict=True)]
    assert max(loads) == pytest.approx(least)
    assert [instance.load_s(*stage) * 1e3 for stage in split.stages] == pytest.approx(loads)


def test_the_planner_takes_the_problem(tmp_path: Path) -> None:
    """A plan of the problem is a split, and the best split is no worse."""
    file = random_file(random.Random(4))
    path = tmp_path / "net.json"
    path.write_text(json.dumps(file))
    instance = read_instance(path)
    found = plan(instance.problem).plan
    load_s = max(instance.load_s(stage.devices[0], stage.operators) for stage in found.stages)
    assert best_split(instance).load_s <= load_s * (1 + 1e-9)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text('{"nodes": []}')
    with pytest.raises(GraphError, match=r"net.json is no instance of dnn-partitioning: .* missing required field"):
        read_instance(path)
