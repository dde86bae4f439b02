"""Small random graphs, platforms and profiles: functions of a `random.Random`, and Hypothesis strategies of them.

Figures are whole milliseconds, bytes and watts, so that ties happen. Devices may share cores, be unable to run
an operator, hold few parameters, and slow one another down; links may be missing, free, or given twice over
(by the platform and by the profile, where the platform's counts). What Traits leaves out by default (modelled devices,
buses, caches) takes nothing from the source of chance, so that the other problems stay what they are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Link, Platform, Transfer
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, IdlePower, Profile, unmeasured

# The objectives of seconds and joules, and those of bytes.
TIMED: tuple[Objective, ...] = ("throughput", "latency", "energy")
LEXICOGRAPHIC: tuple[Objective, ...] = (
    "memory,communication",
    "memory,dram,communication",
    "dram,memory,communication",
)
# The same with communication counted by edges, which dynamic programming does not plan for.
BY_EDGES: tuple[Objective, ...] = (
    "memory,edge_communication",
    "memory,dram,edge_communication",
    "dram,memory,edge_communication",
)
BUSES = ("", "usb", "pcie")
DTYPES = ("float32", "int8", "uint8", "float16", "int64")


@dataclass(frozen=True)
class Traits:
    """The traits that a random problem may have; False leaves one out.

    Attributes:
        memory: some devices have little, and some serve one stage at most, or two.
        powerless: the power of some device may be unknown.
        modelled: some devices have a model, most of them instead of measurements.
        buses: some links, and some modelled devices, share a bus.
        caches: every device states a cache.
        copies: some measured devices pay for receiving and sending tensors.
        ordered: some operators take all frames in order.
        locks: some operators hold the lock of the interpreter.
        uncertain: measured devices say how uncertain their seconds are.
        idle: the idle power is known, by the platform or by the profile, of most problems.
        unstated: of some devices with measured joules the platform states no power.
    """

    overlapping: bool = True
    unsupported: bool = True
    memory: bool = True
    busy: bool = True
    joules: bool = True
    powerless: bool = False
    modelled: bool = False
    buses: bool = False
    caches: bool = False
    copies: bool = False
    ordered: bool = False
    locks: bool = False
    uncertain: bool = False
    idle: bool = False
    unstated: bool = False


def random_tensor(rng: random.Random, name: str) -> Tensor:
    shape = tuple(rng.randint(1, 8) for _ in range(rng.randint(1, 3)))
    return Tensor(name, shape, rng.choice(DTYPES))


def random_chain(rng: random.Random, length: int) -> OperatorGraph:
    """Return operators in a row, each of which reads the output of the one before."""
    operators = tuple(
        Operator(f"op{i}", "kind", (f"t{i}",), (random_tensor(rng, f"t{i + 1}"),), rng.randint(0, 9), rng.randint(0, 9))
        for i in range(length)
    )
    return OperatorGraph("chain", (random_tensor(rng, "t0"),), operators, (f"t{length}",))


def random_dag(rng: random.Random, length: int) -> OperatorGraph:
    """Return a DAG with skips, several inputs and outputs, operators of two outputs, and tensors never read."""
    inputs = tuple(random_tensor(rng, f"in{i}") for i in range(rng.randint(1, 2)))
    known = [tensor.name for tensor in inputs]
    operators = []
    for i in range(length):
        reads = tuple(rng.sample(known, min(len(known), rng.randint(1, 3))))
        writes = tuple(random_tensor(rng, f"t{i}.{j}") for j in range(rng.choice((1, 1, 1, 2))))
        operators.append(Operator(f"op{i}", "kind", reads, writes, rng.randint(0, 9), rng.randint(0, 9)))
        known.extend(tensor.name for tensor in writes)
    outputs = tuple(rng.sample(known, rng.randint(1, min(3, len(known)))))
    return OperatorGraph("dag", inputs, tuple(operators), outputs)


def random_platform(rng: random.Random, graph: OperatorGraph, count: int, traits: Traits) -> Platform:
    """Return `count` devices: clusters of cores, accelerators without cores, and some that share cores."""
    devices = []
    for index in range(count):
        kind = rng.choice(("own", "own", "accelerator", "shared"))
        cores: tuple[int, ...] = () if kind == "accelerator" else (2 * index, 2 * index + 1)
        if kind == "shared" and traits.overlapping and index:
            cores = tuple(sorted({*cores, *(2 * i for i in range(index) if rng.random() < 0.7)}))
        param_bytes = sum(operator.param_bytes for operator in graph.operators)
        memory = rng.randint(1, param_bytes + 1) if traits.memory and rng.random() < 0.4 else None
        active_w = None if traits.powerless and rng.random() < 0.5 else float(rng.randint(1, 5))
        cache = rng.randint(1, param_bytes + 1) if traits.caches else None
        model = random_model(rng, param_bytes) if traits.modelled and rng.random() < 0.6 else None
        bus = rng.choice(BUSES) if traits.buses and model else ""
        most = rng.choice((1, 2)) if traits.memory and rng.random() < 0.3 else None
        aside = traits.buses and (index + param_bytes) % 3 == 0  # no number is drawn, so that seeds stay as they are
        known = Device(f"dev{index}", "host", cores, "", memory, active_w, cache, bus, model)
        known = replace(known, most_stages=most, concurrent_copies=aside)
        devices.append(known)
    return Platform("box", tuple(devices), random_links(rng, devices, buses=traits.buses))


def random_model(rng: random.Random, param_bytes: int) -> DeviceModel:
    """Return a model of a device for a graph with so many bytes of parameters."""
    return DeviceModel(
        macs_per_s=rng.choice((None, 250.0, 1000.0)),
        call_s=rng.randint(1, 3) / 1000,
        operator_s=rng.randint(0, 3) / 1000,
        input_bytes_per_s=rng.choice((None, 1e5)),
        output_bytes_per_s=rng.choice((None, 1e5)),
        cached_bytes=rng.choice((None, rng.randint(0, param_bytes))),
        refill_bytes_per_s=rng.choice((None, 500.0)),
    )


def random_links(
    rng: random.Random, devices: list[Device] | tuple[Device, ...], *, buses: bool = False
) -> tuple[Link, ...]:
    links = []
    for source in devices:
        for destination in devices:
            if source != destination and rng.random() < 0.6:
                bandwidth = rng.choice((None, 1e4, 1e5, 1e6))
                latency_s = rng.randint(0, 3) / 1000
                bus = rng.choice(BUSES) if buses else ""
                links.append(Link(source.name, destination.name, latency_s, bandwidth, bus=bus))
    return tuple(links)


def random_profile(rng: random.Random, graph: OperatorGraph, platform: Platform, traits: Traits) -> Profile:
    devices = {}
    for device in platform.devices:
        # Where a device is measured and has a model, the measurement counts.
        if device.model and rng.random() < 0.8:
            continue
        fragile = traits.unsupported and rng.random() < 0.4
        seconds = tuple(None if fragile and rng.random() < 0.3 else rng.randint(1, 20) / 1000 for _ in graph.operators)
        measured = traits.joules and rng.random() < 0.4
        devices[device.name] = DeviceProfile.in_order(
            graph,
            seconds,
            busy_factor=rng.choice((1.0, 1.25, 2.0)) if traits.busy else 1.0,
            joules=tuple(float(rng.randint(0, 9)) for _ in graph.operators) if measured else None,
        )
        if traits.copies and rng.random() < 0.5:
            receive, send = (Transfer(rng.randint(0, 2) / 1000, rng.choice((None, 1e4, 1e5))) for _ in range(2))
            devices[device.name] = replace(devices[device.name], receive=receive, send=send)
        if traits.uncertain and rng.random() < 0.8:
            uncertainty = {operator.name: rng.randint(0, 20) / 100 for operator in graph.operators}
            devices[device.name] = replace(devices[device.name], uncertainty=uncertainty)
    locking = [operator for operator in graph.operators if traits.locks and rng.random() < 0.5]
    lock_s = {operator.name: rng.randint(0, 5) / 1000 for operator in locking}
    links = random_links(rng, platform.devices, buses=traits.buses)
    return Profile(graph.name, graph.fingerprint, devices, links, lock_s=lock_s)


def with_ordered(rng: random.Random, graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with about a third of its operators ordered."""
    return replace(graph, operators=tuple(replace(o, ordered=rng.random() < 0.35) for o in graph.operators))


def with_idle_power(rng: random.Random, platform: Platform, profile: Profile) -> tuple[Platform, Profile]:
    """Return both, most of the time with an idle power between a tenth of an active one and forty times as much."""
    stated, measured = (rng.choice((None, 0.2, 1.0, 5.0, 40.0, 200.0)) for _ in range(2))
    idle = None if measured is None else IdlePower("sensor", "the board", measured)
    return replace(platform, idle_w=stated), replace(profile, idle=idle)


def with_powers_unstated(rng: random.Random, platform: Platform, profile: Profile) -> Platform:
    """Return the platform without the power of some devices whose joules were measured."""
    sensed = {name for name, device in profile.devices.items() if device.joules is not None}
    return replace(
        platform,
        devices=tuple(
            replace(d, active_w=None) if d.name in sensed and rng.random() < 0.5 else d for d in platform.devices
        ),
    )


def random_problem(
    rng: random.Random,
    objective: Objective = "throughput",
    *,
    operators: tuple[int, int] = (1, 6),
    devices: tuple[int, int] = (1, 3),
    traits: Traits | None = None,
    choose_stages: bool = True,
    children_together: bool = False,
) -> Problem:
    """Return a problem with a graph, a platform and a profile of the given sizes (least and most)."""
    traits = traits or Traits()
    make = rng.choice((random_chain, random_dag))
    graph = make(rng, rng.randint(*operators))
    if traits.ordered:
        graph = with_ordered(rng, graph)
    platform = random_platform(rng, graph, rng.randint(*devices), traits)
    profile = random_profile(rng, graph, platform, traits)
    stages = (
        rng.randint(1, min(len(graph), len(platform.devices) + 1)) if choose_stages and rng.random() < 0.4 else None
    )
    if traits.unstated:
        platform = with_powers_unstated(rng, platform, profile)
    if traits.idle:
        platform, profile = with_idle_power(rng, platform, profile)
    # The searches count parameters alone; what becomes of their plans is tested in test_activations.py.
    return Problem(graph, platform, profile, objective, stages, children_together, activations=False)


def constrained(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with readers of an operator kept together now and then, and half of the time with a limit."""
    problem = replace(problem, children_together=rng.random() < 0.2)
    if rng.random() < 0.5:
        if problem.objective == "throughput":
            return replace(problem, max_latency_s=rng.randint(5, 120) / 1000)
        return replace(problem, min_throughput_fps=float(rng.randint(5, 80)))
    return problem


def lexicographic_problem(
    rng: random.Random,
    objective: Objective = "memory,dram,communication",
    *,
    operators: tuple[int, int] = (2, 8),
    devices: tuple[int, int] = (1, 4),
    children_together: bool = False,
) -> Problem:
    """Return a problem of bytes alone: equal devices, nothing measured, and small sizes with frequent ties."""
    graph = small_sizes(rng, rng.choice((random_chain, random_dag, random_dag))(rng, rng.randint(*operators)))
    param_bytes = sum(operator.param_bytes for operator in graph.operators)
    cache = rng.randint(1, max(1, param_bytes * 2 // 3))
    equal = tuple(Device(f"dev{index}", cache_bytes=cache) for index in range(rng.randint(*devices)))
    stages = rng.randint(1, min(len(graph), len(equal)))
    platform = Platform("box", equal)
    return Problem(graph, platform, unmeasured(graph), objective, stages, children_together, activations=False)


def small_sizes(rng: random.Random, graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with tensors of at most four bytes, and operators of at most six, half of them of none."""
    resized = {name: Tensor(name, (rng.randint(1, 4),), "int8") for name in graph.tensors}
    operators = tuple(
        replace(
            operator,
            outputs=tuple(resized[tensor.name] for tensor in operator.outputs),
            param_bytes=rng.choice((0, rng.randint(1, 6))),
        )
        for operator in graph.operators
    )
    return OperatorGraph(graph.name, tuple(resized[t.name] for t in graph.inputs), operators, graph.outputs)


def randoms() -> st.SearchStrategy[random.Random]:
    """Return a random source that Hypothesis controls and shrinks."""
    return st.randoms(use_true_random=False)


@st.composite
def graphs(draw: st.DrawFn, least: int = 1, most: int = 7) -> OperatorGraph:
    rng = draw(randoms())
    return rng.choice((random_chain, random_dag))(rng, rng.randint(least, most))


@st.composite
def problems(draw: st.DrawFn, objective: Objective = "throughput", **options: Any) -> Problem:
    """Return a problem; the options are those of `random_problem`."""
    return random_problem(draw(randoms()), objective, **options)


@st.composite
def lexicographic_problems(
    draw: st.DrawFn, objectives: tuple[Objective, ...] = LEXICOGRAPHIC, **options: Any
) -> Problem:
    """Return a problem of bytes alone; the options are those of `lexicographic_problem`."""
    return lexicographic_problem(draw(randoms()), draw(st.sampled_from(objectives)), **options)


def random_order(rng: random.Random, graph: OperatorGraph) -> list[str]:
    """Return any topological order, not only the graph's own."""
    known = {tensor.name for tensor in graph.inputs}
    left, order = list(graph.operators), []
    while left:
        operator = rng.choice([o for o in left if known.issuperset(o.inputs)])
        left.remove(operator)
        order.append(operator.name)
        known.update(tensor.name for tensor in operator.outputs)
    return order
