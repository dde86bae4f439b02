"""The latency of splits of small instances of dnn-partitioning, and its bounds, against all splits."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tvm_pipeline.errors import GraphError
from tvm_pipeline_papers.dnn_blocks import between_separators
from tvm_pipeline_papers.dnn_inference import Inference, NodeSets, read_inference
from tvm_pipeline_papers.dnn_latency import LatencySplit, along_path, least_latency

File = dict[str, Any]


def file_of(draw: random.Random, count: int, pairs: list[tuple[int, int]]) -> File:
    """Return an instance with these edges. The nodes stand in any order, and their ids are no indices."""
    slowest, dearest, alone = draw.choice((9, 30, 90)), draw.choice((4, 10, 20)), draw.random() < 0.6
    nodes: list[File] = []
    for node in range(count):
        idle = draw.random() < 0.2
        nodes.append(
            {
                "id": 3 * node + 1,
                "supportedOnFpga": draw.random() < 0.9,
                "cpuLatency": 0.0 if idle else float(draw.randint(1, slowest)),
                "fpgaLatency": 0.0 if idle else float(draw.randint(1, 9)),
                "isBackwardNode": 0,
                "size": float(draw.choice((0, 1, 3, 5))),
            }
        )
        if not alone and draw.random() < 0.8:
            nodes[-1]["colorClass"] = draw.randrange(count) if draw.random() < 0.4 else node
    cost = [float(draw.randint(0, dearest)) for _ in nodes]
    draw.shuffle(nodes)
    return {
        "maxSizePerFPGA": float(draw.choice((5, 8, 12, 100))),
        "maxFPGAs": draw.randint(0 if draw.random() < 0.1 else 1, 3),
        "maxCPUs": 0,
        "nodes": nodes,
        "edges": [{"sourceId": 3 * a + 1, "destId": 3 * b + 1, "cost": cost[a]} for a, b in pairs],
    }


def any_graph(draw: random.Random) -> File:
    count, share = draw.randint(1, 7), draw.choice((0.25, 0.4, 0.6))
    return file_of(draw, count, [pair for pair in itertools.combinations(range(count), 2) if draw.random() < share])


def blocks(draw: random.Random) -> File:
    """Return an instance of up to nine nodes in which branches meet again and again."""
    pairs: list[tuple[int, int]] = []
    count, joint = 0, -1
    while count < 6:
        ends = set()
        for _ in range(draw.randint(1, 3)):
            end = joint
            for _ in range(draw.randint(joint < 0, 2 if count < 5 else 1)):
                pairs.append((end, count))
                end, count = count, count + 1
            ends.add(end)
        pairs += [(end, count) for end in ends]
        joint, count = count, count + 1
    return file_of(draw, count, [(a, b) for a, b in pairs if a >= 0])


def branches(draw: random.Random) -> File:
    """Return a node whose tensor is dear, one to three branches with six nodes in all, and a node behind them."""
    ends = sorted({7, *(draw.randint(2, 6) for _ in range(2))})
    chains = [range(first, end) for first, end in itertools.pairwise([1, *ends])]
    file = file_of(draw, 8, [pair for chain in chains for pair in itertools.pairwise([0, *chain, 7])])
    for node in file["nodes"]:
        node |= {"supportedOnFpga": 1 < node["id"] < 22, "cpuLatency": float(draw.randint(3, 30)), "size": 0.0}
        node |= {"fpgaLatency": float(draw.randint(1, 3)), "colorClass": node["id"]}
    for edge in file["edges"]:
        edge["cost"] = 30.0 if edge["sourceId"] == 1 else edge["cost"] % 8
    return file


def star(draw: random.Random) -> File:
    """Return a node that an accelerator has, and six around it, of which its memory holds some."""
    file = file_of(draw, 7, [draw.choice([(0, node), (node, 0)]) for node in range(1, 7)])
    for node in file["nodes"]:
        node |= {"supportedOnFpga": 1, "fpgaLatency": 1.0, "size": float(draw.randint(1, 9)), "colorClass": node["id"]}
        node["cpuLatency"] = 1000.0 if node["id"] == 1 else 0.0
    return file | {"maxSizePerFPGA": 20.0, "maxFPGAs": 1}


def latency(file: File, device: dict[int, int]) -> float:
    """Return the latency of a split, as the model defines it, infinite if devices wait in turn; device -1 is a CPU."""
    nodes = {node["id"]: node for node in file["nodes"]}
    edges = {(edge["sourceId"], edge["destId"]) for edge in file["edges"]}
    cost = {edge["sourceId"]: edge["cost"] for edge in file["edges"]}
    ends: dict[tuple[str, int], float] = {}

    def end(node: int) -> float:
        own = ("cpu", node) if device[node] < 0 else ("accelerator", device[node])
        if own not in ends:
            ends[own] = math.inf  # until it is known
            held = {node} if device[node] < 0 else {other for other in nodes if device[other] == device[node]}
            enter = {a for a, b in edges if b in held and a not in held}
            leave = {a for a, b in edges if a in held and b not in held}
            busy = nodes[node]["cpuLatency"]
            if device[node] >= 0:
                busy = sum(nodes[n]["fpgaLatency"] for n in held) + sum(cost[n] for n in enter | leave)
            ends[own] = max(map(end, enter), default=0.0) + busy
        return ends[own]

    return max(map(end, nodes))


def legal(file: File) -> Iterator[dict[int, int]]:
    """Yield the devices of the nodes by classes, support and memory. The first node of a later accelerator is later."""
    members: dict[object, list[File]] = {}
    for node in file["nodes"]:
        members.setdefault(node.get("colorClass", ("alone", node["id"])), []).append(node)
    families = list(members.values())

    def extended(device: dict[int, int], free: list[float]) -> Iterator[dict[int, int]]:
        depth = next((n for n, family in enumerate(families) if family[0]["id"] not in device), None)
        if depth is None:
            yield device
            return
        size = sum(node["size"] for node in families[depth])
        supported = all(node["supportedOnFpga"] for node in families[depth])
        for number in range(-1, min(len(free) + 1, file["maxFPGAs"])):
            rest = [*free, file["maxSizePerFPGA"]] if number == len(free) else list(free)
            if number >= 0:
                rest[number] -= size
                if rest[number] < 0 or not supported:
                    continue
            yield from extended(device | {node["id"]: number for node in families[depth]}, rest)

    yield from extended({}, [])


def read(file: File) -> Inference:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.json"
        path.write_text(json.dumps(file))
        return read_inference(path)


@cache
def solved(make: Callable[[random.Random], File], seed: int) -> tuple[LatencySplit, float]:
    """Return the split of a random instance and the latency of the best one, after some checks."""
    draw = random.Random(seed)
    file = make(draw)
    instance = read(file)
    split = least_latency(instance)
    device = {node["id"]: -1 for node in file["nodes"]}
    for number, ids in enumerate(split.accelerators):
        device |= dict.fromkeys(ids, number)
    assert len(device) == len(file["nodes"])
    assert split.latency_ms == pytest.approx(latency(file, device))
    assert split.latency_ms == pytest.approx(instance.latency_ms(split.accelerators))
    least = min(latency(file, device) for device in legal(file))
    assert split.bound_ms <= least * (1 + 1e-9) <= split.latency_ms * (1 + 2e-9)
    # A bound above the least latency would not be seen where the split has the least latency.
    path = [draw.randrange(len(instance.ids))]
    while instance.after[path[-1]]:
        path.append(draw.choice(instance.after[path[-1]]))
    for bound_ms, _ in (between_separators(NodeSets(instance)), along_path(NodeSets(instance), path)):
        assert bound_ms <= least * (1 + 1e-9)
    return split, least


MAKERS = [any_graph, blocks, branches, star]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("seed", range(30))
def test_no_split_is_below_the_bound(make: Callable[[random.Random], File], seed: int) -> None:
    """Both bounds hold for all splits, and the split that was found has the latency that is stated."""
    solved(make, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("make", MAKERS)
def test_no_split_of_many_is_below_the_bound(make: Callable[[random.Random], File]) -> None:
    for seed in range(30, 90):
        solved(make, seed)


@pytest.mark.parametrize(
    ("make", "proven", "best"), [(any_graph, 25, 30), (blocks, 28, 29), (branches, 30, 30), (star, 30, 30)]
)
def test_most_splits_are_proven(make: Callable[[random.Random], File], proven: int, best: int) -> None:
    """Of 30, at least so many are proven, and so many are the best."""
    found = [solved(make, seed) for seed in range(30)]
    assert sum(split.latency_ms == split.bound_ms for split, _ in found) >= proven
    assert sum(split.latency_ms == pytest.approx(least) for split, least in found) >= best


@pytest.mark.parametrize("seed", range(10))
def test_the_memory_is_filled_as_well_as_possible(seed: int) -> None:
    """The bound along a path of one node is the least load of all sets that fit, where the price of bytes has gaps."""
    instance = read(star(random.Random(seed)))
    assert along_path(NodeSets(instance), [instance.ids.index(1)])[0] == pytest.approx(solved(star, seed)[1])


def network(pairs: list[tuple[int, int]], cost: dict[int, float], **limits: Any) -> File:
    """Return an instance whose nodes take 10 on a CPU, 1 on an accelerator, and one byte."""
    node = {"supportedOnFpga": 1, "cpuLatency": 10, "fpgaLatency": 1, "isBackwardNode": 0, "size": 1}
    nodes = [{**node, "id": number} for number in range(1 + max(map(max, pairs)))]
    edges = [{"sourceId": a, "destId": b, "cost": cost.get(a, 1)} for a, b in pairs]
    return {"maxSizePerFPGA": 100, "maxFPGAs": 2, "maxCPUs": 0, "nodes": nodes, "edges": edges} | limits


# Node 0, whose tensor is dear, three branches of three nodes, and node 10, which no accelerator runs.
BRANCHES = [(0, 1), (1, 2), (2, 3), (0, 4), (4, 5), (5, 6), (0, 7), (7, 8), (8, 9), (3, 10), (6, 10), (9, 10)]


@pytest.mark.parametrize(("accelerators", "least", "bound"), [(0, 50, 50), (1, 42, 36), (2, 38, 36), (3, 34, 34)])
def test_branches_share_accelerators(accelerators: int, least: float, bound: float) -> None:
    """An accelerator has two nodes of a branch, between a tensor that enters and one that leaves, or of several."""
    file = network(BRANCHES, {0: 100}, maxFPGAs=accelerators)
    file["nodes"][0]["supportedOnFpga"] = file["nodes"][10]["supportedOnFpga"] = 0
    split = least_latency(read(file))
    parts = [{2, 3}, {5, 6}, {8, 9}]
    held = [set().union(*parts[number::accelerators]) for number in range(accelerators)]
    assert read(file).latency_ms(held) == least
    assert split.bound_ms == pytest.approx(bound)
    assert split.latency_ms == pytest.approx(least) or accelerators in (1, 2)  # not found


def test_a_tensor_enters_once() -> None:
    """Nodes 1 and 2 are on an accelerator, and both read node 0; node 3 is done earlier on a CPU."""
    file = network([(0, 1), (0, 2), (1, 2), (2, 4), (0, 3), (3, 4)], {0: 10})
    file["nodes"][0]["supportedOnFpga"] = file["nodes"][4]["supportedOnFpga"] = 0
    assert between_separators(NodeSets(read(file)))[0] == pytest.approx(10 + (10 + 1 + 1 + 1) + 10)


def test_what_is_no_split_has_no_latency() -> None:
    """Each of these breaks one rule."""
    file = network([(0, 1), (1, 2), (3, 4)], {}, maxSizePerFPGA=2)
    file["nodes"][4]["supportedOnFpga"] = 0
    file["nodes"][3]["colorClass"] = file["nodes"][4]["colorClass"] = 7
    instance = read(file)
    assert instance.latency_ms([[0, 1], [2]]) == 20  # of nodes 3 and 4; the others take 5
    wrong = [[[0, 2]], [[0, 1, 2]], [[3]], [[3, 4]], [[0], [0]], [[0], [1], [2]], [[5]]]
    assert [instance.latency_ms(held) for held in wrong] == [math.inf] * len(wrong)


def test_accelerators_that_wait_in_turn_are_no_split() -> None:
    """Each has a convex set and reads from the other."""
    instance = read(network([(0, 1), (2, 3)], {}))
    assert instance.latency_ms([[0, 3], [1, 2]]) == math.inf
    assert instance.latency_ms([[0, 1], [2, 3]]) == 2


def test_nothing_takes_no_time() -> None:
    split = least_latency(read({"maxSizePerFPGA": 1, "maxFPGAs": 1, "maxCPUs": 0, "nodes": [], "edges": []}))
    assert split == LatencySplit(0.0, 0.0, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"isBackwardNode": 1}, r"net.json has a backward pass: latency is for inference"),
        ({"id": 9}, r"net.json is no instance of dnn-partitioning: no node has the id 0"),
        ({"size": "much"}, r"net.json is no instance of dnn-partitioning: "),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: File, message: str) -> None:
    file = network([(0, 1)], {})
    file["nodes"][0] |= change
    path = tmp_path / "net.json"
    path.write_text(json.dumps(file))
    with pytest.raises(GraphError, match=message):
        read_inference(path)


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(json.dumps(network([(0, 1), (1, 0)], {})))
    with pytest.raises(GraphError, match=r"net.json is no instance of dnn-partitioning: its nodes have a cycle"):
        read_inference(path)
