"""The instances of dnn-partitioning, and their best split under its cost model, by an exact search.

https://github.com/msr-fiddle/dnn-partitioning (Tarnawski et al., "Efficient Algorithms for Device Placement of DNN
Graph Operators", NeurIPS 2020). A split gives each accelerator and each CPU one set of nodes. Nodes of one colour class
share a device, and the sets are a chain of downsets of the forward nodes. The load of a CPU is the sum of its nodes'
`cpuLatency`. The load of an accelerator is the sum of their `fpgaLatency` and of the cost of every tensor that leaves
or enters its set, each once. The value of a split is the largest load, in the time per sample.

`Problem` expresses all but the transfers: there a device receives what crosses the boundary in front of its stage and
sends what crosses the boundary behind it. A tensor that only passes by costs it twice, and one that it reads and passes
on costs it twice, too. In this model both go by the memory of the host, and cost nothing and once. Tensors of the
backward pass cross the boundaries against the order of the stages. So `Instance.tensors` holds the transfers, and the
search below counts them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tvm_pipeline import Device, DeviceProfile, Link, Operator, OperatorGraph, Platform, Problem, Profile, Tensor
from tvm_pipeline.core.topology import successors, topological_order
from tvm_pipeline.errors import GraphError, InfeasibleError, OptionError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.planning import Cuts, cost_of, hot, ideals, is_inside

# By how much the largest load may exceed the proven bound in each pass; the last pass admits every load.
DEEPENING = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, math.inf)

_RATE = Link("host", "accelerator", bandwidth_bytes_per_s=1e9).transfer


class _Node(msgspec.Struct, rename="camel"):
    id: int
    supported_on_fpga: bool | int
    cpu_latency: float
    fpga_latency: float
    is_backward_node: bool | int
    size: float = 0.0
    color_class: int | None = None


class _Edge(msgspec.Struct, rename="camel"):
    source_id: int
    dest_id: int
    cost: float


class File(msgspec.Struct):
    nodes: list[_Node]
    edges: list[_Edge]
    accelerators: int = msgspec.field(name="maxFPGAs")
    cpus: int = msgspec.field(name="maxCPUs")
    memory_bytes: float = msgspec.field(name="maxSizePerFPGA")


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance as a problem, with its transfers and the nodes of each operator.

    Attributes:
        problem: an operator is all nodes that no split separates. A millisecond of the file is one of the profile.
        nodes: the ids of the nodes of each operator, by its name.
        tensors: the operators, by index, that write or read a tensor, and the seconds for which an accelerator sends
            or receives it. Tensors within one operator are left out.
    """

    problem: Problem
    nodes: Mapping[str, tuple[int, ...]]
    tensors: tuple[tuple[frozenset[int], float], ...]

    def load_s(self, device: str, operators: Iterable[str]) -> float:
        """Return the load of a device that has these operators; infinite where it cannot run or hold them."""
        names, costs = set(operators), cost_of(self.problem, device)
        inside = {index: op for index, op in enumerate(self.problem.graph.operators) if op.name in names}
        seconds = [costs.alone_s(operator) for operator in inside.values()]
        capacity = self.problem.platform.device(device).memory_bytes
        if capacity is None:
            return math.fsum(seconds)
        if sum(operator.param_bytes for operator in inside.values()) > capacity:
            return math.inf
        moved = [s for members, s in self.tensors if members & inside.keys() and members - inside.keys()]
        return math.fsum([*seconds, *moved])


@dataclass(frozen=True, slots=True)
class Split:
    """The best split: its value, and the device and the operators of each stage in the order of the downsets."""

    load_s: float
    stages: tuple[tuple[str, tuple[str, ...]], ...]


def read_file(path: Path | str) -> File:
    """Read the nodes, the edges and the limits of an instance.

    Raises:
        GraphError: the file is no such instance.
    """
    try:
        file = msgspec.json.decode(read_bytes(path, GraphError), type=File, strict=False)
    except msgspec.DecodeError as error:
        raise GraphError(f"{path} is no instance of dnn-partitioning: {error}") from error
    unknown = {end for edge in file.edges for end in (edge.source_id, edge.dest_id)} - {node.id for node in file.nodes}
    if unknown:
        raise GraphError(f"{path} is no instance of dnn-partitioning: no node has the id {min(unknown)}")
    return file


def read_instance(path: Path | str) -> Instance:
    """Read an instance, and join the nodes that the best split need not separate.

    These are the nodes of one colour class, classes on a cycle of the forward pass, and a class without work whose
    only neighbour takes part in all its transfers. A class of backward nodes alone stands in the order as if its
    forward nodes mirrored them. All this is as in the program of the paper.

    Raises:
        GraphError: the file is no such instance.
    """
    file = read_file(path)
    own, after = _classes(file)
    while _joins_idle(file, own, after):
        pass
    nodes = _grouped(file, own)
    names = list(after)
    before = [[source for source, other in enumerate(names) if name in after[other]] for name in names]
    order = [names[index] for index in topological_order(before, successors(before))]
    index = {name: position for position, name in enumerate(order)}
    cost_ms = {edge.source_id: edge.cost for edge in file.edges}
    operators = tuple(
        Operator(
            name,
            "nodes",
            tuple(f"of {other}" for other in order if name in after[other]),
            # One byte takes a nanosecond.
            (Tensor(f"of {name}", (round(1e6 * sum(cost_ms.get(node.id, 0.0) for node in nodes[name])),), "int8"),),
            param_bytes=math.ceil(sum(node.size for node in nodes[name])),
        )
        for name in order
    )
    graph = OperatorGraph(Path(path).stem, (), operators, ())
    slow = {name: sum(node.cpu_latency for node in nodes[name]) / 1e3 for name in order}
    fast = {name: sum(node.fpga_latency for node in nodes[name]) / 1e3 for name in order}
    runs = {name: fast[name] if all(node.supported_on_fpga for node in nodes[name]) else None for name in order}
    accelerators = [Device(f"accelerator{n}", memory_bytes=int(file.memory_bytes)) for n in range(file.accelerators)]
    cpus = [Device(f"cpu{n}", cores=(n,)) for n in range(file.cpus)]
    devices = {device.name: DeviceProfile(runs, receive=_RATE, send=_RATE) for device in accelerators}
    devices |= {device.name: DeviceProfile(slow) for device in cpus}
    profile = Profile(graph.name, graph.fingerprint, devices)
    platform = Platform("dnn-partitioning", (*accelerators, *cpus))
    return Instance(
        Problem(graph, platform, profile, activations=False),
        {name: tuple(node.id for node in nodes[name]) for name in order},
        tuple(
            (frozenset(index[name] for name in ends), cost_ms[source] / 1e3)
            for source, ends in _ends(file, own).items()
            if len(ends) > 1
        ),
    )


def _classes(file: File) -> tuple[dict[int, str], dict[str, set[str]]]:
    """Return the class of each node, and for each class those that read it, without cycles."""
    own = {node.id: f"node{node.id}" if node.color_class is None else f"class{node.color_class}" for node in file.nodes}
    backward = {node.id for node in file.nodes if node.is_backward_node}
    alone = set(own.values()) - {name for node, name in own.items() if node not in backward}
    after: dict[str, set[str]] = {name: set() for name in own.values()}
    for edge in file.edges:
        source, reader = own[edge.source_id], own[edge.dest_id]
        if backward.isdisjoint((edge.source_id, edge.dest_id)):
            after[source].add(reader)
        elif backward.issuperset((edge.source_id, edge.dest_id)) and {source, reader} & alone:
            after[reader].add(source)
    bit = {name: 1 << number for number, name in enumerate(after)}
    reach = {name: sum(bit[reader] for reader in readers | {name}) for name, readers in after.items()}
    for via in after:
        for name in after:
            if reach[name] & bit[via]:
                reach[name] |= reach[via]
    # Each class on a cycle becomes the first one on it.
    first = {name: next(n for n in after if reach[name] & bit[n] and reach[n] & bit[name]) for name in after}
    joined: dict[str, set[str]] = {name: set() for name in first.values()}
    for name, readers in after.items():
        joined[first[name]] |= {first[reader] for reader in readers} - {first[name]}
    return {node: first[name] for node, name in own.items()}, joined


def _joins_idle(file: File, own: dict[int, str], after: dict[str, set[str]]) -> bool:
    """Join one class without work to its only neighbour, if that takes part in its transfers; return whether one was.

    The memory of the neighbour's device must not matter.
    """
    fits = sum(node.size for node in file.nodes) <= file.memory_bytes
    ends = list(_ends(file, own).values())
    for name, nodes in _grouped(file, own).items():
        near = after[name] | {source for source, readers in after.items() if name in readers}
        idle = all(n.cpu_latency == n.fpga_latency == 0 and n.supported_on_fpga and (fits or not n.size) for n in nodes)
        if idle and len(near) == 1 and all(near <= touched for touched in ends if name in touched and len(touched) > 1):
            (into,) = near
            own.update({node.id: into for node in nodes})
            del after[name]
            for readers in after.values():
                readers.discard(name)
            return True
    return False


def _grouped(file: File, own: Mapping[int, str]) -> dict[str, list[_Node]]:
    grouped: defaultdict[str, list[_Node]] = defaultdict(list)
    for node in file.nodes:
        grouped[own[node.id]].append(node)
    return grouped


def _ends(file: File, own: Mapping[int, str]) -> dict[int, set[str]]:
    """Return the classes that write or read the tensor of each node."""
    ends: defaultdict[int, set[str]] = defaultdict(set)
    for edge in file.edges:
        ends[edge.source_id] |= {own[edge.source_id], own[edge.dest_id]}
    return ends


class _Table(NamedTuple):
    """The M downsets and the T tensors, as arrays.

    Attributes:
        zone, sets: see `planning.Cuts`.
        slow, fast, size, blocked: M; the sums of the operators in a downset. `blocked` counts those for CPUs only.
        counts: M x T; how many of the operators that write or read a tensor are in a downset.
        crossing: M x words; the tensors as bits of which some operators are in a downset, and some are not.
        around: M; the cost of these tensors.
        cost: T.
    """

    zone: Any
    sets: Any
    slow: Any
    fast: Any
    size: Any
    blocked: Any
    counts: Any
    crossing: Any
    around: Any
    cost: Any


def best_split(instance: Instance) -> Split:
    """Return the split with the least largest load; it is proven to be the best.

    The method is dynamic programming over the downsets and the numbers of accelerators and CPUs that are used. Each
    pass admits loads up to a cap a little above a lower bound of the value, and skips a downset if the devices before
    or behind it cannot do their operators under the cap. If a pass finds a split, the best one was admitted, too.

    Raises:
        OptionError: the graph has too many downsets to list, or the instance too many devices.
        InfeasibleError: there is no split.
    """
    problem = instance.problem
    cuts = ideals(problem.graph)
    if cuts is None:
        raise OptionError(f"{problem.graph.name} has too many downsets to list")
    accelerators = [device for device in problem.platform.devices if device.memory_bytes is not None]
    cpus = [device for device in problem.platform.devices if device.memory_bytes is None]
    if (len(accelerators) + 2) * (len(cpus) + 1) > 63:
        raise OptionError(f"{len(accelerators)} accelerators and {len(cpus)} CPUs have too many states; leave some out")
    operators = problem.graph.operators

    def seconds(devices: list[Device]) -> Any:
        return cost_of(problem, devices[0]).every_added_s(operators) if devices else np.full(len(operators), np.nan)

    runs = seconds(accelerators)
    fast, slow = np.nan_to_num(runs), np.nan_to_num(seconds(cpus))
    cost = np.array([cost for _, cost in instance.tensors], np.float64)
    touched = np.zeros((len(operators), len(cost)), np.uint16)
    for tensor, (members, _) in enumerate(instance.tensors):
        touched[list(members), tensor] = 1
    counts = np.zeros((len(cuts), len(cost)), np.uint16)
    crossing, around = np.zeros((len(cuts), len(cost) // 64 + 1), np.uint64), np.zeros(len(cuts))
    _boundaries(cuts.parent, cuts.added, touched, touched.sum(0), cost, counts, crossing, around)
    table = _Table(
        cuts.zone,
        cuts.members,
        cuts.sums(slow),
        cuts.sums(fast),
        cuts.param_bytes,
        cuts.sums(np.isnan(runs).astype(float)),
        counts,
        crossing,
        around,
        cost,
    )
    # What a CPU does in a second would take an accelerator at most so many seconds.
    help_ = max((f / s if s else math.inf for f, s in zip(fast, slow, strict=True) if f), default=0.0)
    whole_s = float(table.fast[-1])
    bound = whole_s / max(len(accelerators) + len(cpus) * help_, 1e-9)
    most = float(table.slow[-1] + whole_s + 2 * cost.sum())
    memory = accelerators[0].memory_bytes if accelerators else 0
    for more in DEEPENING:
        cap = min(bound * (1 + more), most) if more < math.inf else most
        helped = min(help_ * cap, whole_s)
        load, origin = _pass(table, len(accelerators), len(cpus), float(memory or 0), cap, helped)
        if np.isfinite(load[:, -1]).any():
            return _split(cuts, accelerators, cpus, load, origin)
    raise InfeasibleError(f"{problem.graph.name}: no split runs and holds all operators")


def _split(cuts: Cuts, accelerators: list[Device], cpus: list[Device], load: Any, origin: Any) -> Split:
    """Return the split of the best state at the last downset, from where each state and downset came from."""
    state, cut, row = int(np.argmin(load[:, -1])), len(cuts) - 1, len(accelerators) + 2
    best, devices, chosen = float(load[state, cut]), list[str](), list[int]()
    while cut:
        came = int(origin[state, cut])
        chosen.append(cut)
        if came >= 0:
            devices.append(accelerators[state % row - 1].name)
            state, cut = state - 1, came
        else:
            devices.append(cpus[state // row - 1].name)
            state, cut = state - row, -2 - came
    return Split(best, tuple(zip(reversed(devices), cuts.stages(chosen[::-1]), strict=True)))


@hot
def _boundaries(
    parent: Any, added: Any, touched: Any, whole: Any, cost: Any, counts: Any, crossing: Any, around: Any
) -> None:
    for i in range(1, len(parent)):
        counts[i] = counts[parent[i]] + touched[added[i]]
        for t in range(len(cost)):
            if 0 < counts[i, t] < whole[t]:
                crossing[i, t // 64] |= np.uint64(1) << np.uint64(t % 64)
                around[i] += cost[t]


@hot
def _accelerator_s(table: _Table, i: int, j: int) -> Any:
    """Return the load of an accelerator with the operators between downsets i and j.

    A tensor that crosses both boundaries was counted twice. It costs nothing if none of the operators touches it.
    """
    load = table.fast[j] - table.fast[i] + table.around[i] + table.around[j]
    for word in range(table.crossing.shape[1]):
        both = table.crossing[i, word] & table.crossing[j, word]
        t = 64 * word
        while both:
            if both & np.uint64(1):
                load -= table.cost[t] * (2 if table.counts[i, t] == table.counts[j, t] else 1)
            both >>= np.uint64(1)
            t += 1
    return load


@hot
def _pass(table: _Table, accelerators: int, cpus: int, memory: float, cap: float, helped: float) -> Any:
    """Return the least largest load of each state at each downset, infinite above `cap`, and the downset before it.

    The downset before stands as -2 minus its index if a CPU has the operators between. State
    `c * (accelerators + 2) + a` has used c CPUs and a accelerators; no state has one accelerator too many.
    """
    count, row = len(table.zone), accelerators + 2
    states = row * (cpus + 1)
    load, origin = np.full((states, count), np.inf), np.full((states, count), -1, np.int32)
    whole, rounding = table.fast[count - 1], 1e-9 * table.fast[count - 1]
    alive, reached, used = np.zeros(count, np.int64), np.zeros(count, np.int64), 1
    load[0, 0], reached[0] = 0.0, 1
    first, begin = 0, 0  # of the downsets that are alive, and of the zone
    for j in range(1, count):
        if table.zone[j] != table.zone[begin]:
            begin = j
        possible = 0
        for c in range(cpus + 1):
            for a in range(accelerators + 1):
                before, behind = a * cap + c * helped, (accelerators - a) * cap + (cpus - c) * helped
                if table.fast[j] <= before + rounding and whole - table.fast[j] <= behind + rounding:
                    possible |= 1 << (c * row + a)
        if not possible:
            continue
        # All downsets of this zone, and of later ones, contain those of earlier zones.
        while first < used and table.zone[alive[first]] < table.zone[j]:
            i = alive[first]
            if min(table.fast[begin] - table.fast[i], table.slow[begin] - table.slow[i]) <= cap:
                break
            first += 1
        for k in range(first, used):
            i = alive[k]
            on_accelerator, on_cpu = (reached[i] << 1) & possible, (reached[i] << row) & possible
            if table.fast[j] - table.fast[i] > cap or table.blocked[j] > table.blocked[i]:
                on_accelerator = 0
            if table.slow[j] - table.slow[i] > cap:
                on_cpu = 0
            if on_accelerator | on_cpu == 0:
                continue
            if not is_inside(table.zone, table.sets, i, j):
                continue
            seconds = np.inf
            if on_accelerator and table.size[j] - table.size[i] <= memory:
                seconds = _accelerator_s(table, i, j)
            for s in range(states):
                if on_accelerator >> s & 1 and seconds <= cap and max(load[s - 1, i], seconds) < load[s, j]:
                    load[s, j], origin[s, j] = max(load[s - 1, i], seconds), i
                if on_cpu >> s & 1:
                    taken = max(load[s - row, i], table.slow[j] - table.slow[i])
                    if taken < load[s, j]:
                        load[s, j], origin[s, j] = taken, -2 - i
                if load[s, j] < np.inf:
                    reached[j] |= 1 << s
        if reached[j]:
            alive[used] = j
            used += 1
    return load, origin
