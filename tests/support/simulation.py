"""A plan as a queue of frames in front of devices that do one thing at a time: an independent judge of `evaluate`.

It shares no code with the product: it computes the crossing tensors, the costs of links and modelled devices and the
slow-down of busy devices again, in the naive way. A bus serves one device after another.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Link
from tvm_pipeline.core.problem import Problem


@dataclass(frozen=True)
class Run:
    """The seconds at which each frame came out, in the order of completion, and the joules of all frames.

    Attributes:
        order: for each stage, the frames in the order in which they were done there.
    """

    done_s: tuple[float, ...]
    joules: float
    order: tuple[tuple[int, ...], ...]

    @property
    def steady_fps(self) -> float:
        """Return frames a second between the first and the third quarter of the run."""
        first, last = len(self.done_s) // 4, 3 * len(self.done_s) // 4
        return (last - first) / (self.done_s[last] - self.done_s[first])

    def overtaken(self, stage: int) -> int:
        """Return the most frames that were done at a stage before an earlier one was."""
        order = self.order[stage]
        return max(sum(other > frame for other in order[:position]) for position, frame in enumerate(order))


@dataclass(frozen=True)
class Phase:
    """A part of what a device does for a frame; it starts when the bus is free, and keeps that for `bus_s`."""

    seconds: float
    bus: str = ""
    bus_s: float = 0.0


def naive_crossing(graph: OperatorGraph, groups: Sequence[Sequence[str]], boundary: int) -> set[str]:
    """Return the tensors that exist before group `boundary` runs, and that it, a later group or the caller reads."""
    before = {name for group in groups[:boundary] for name in group}
    after = {name for group in groups[boundary:] for name in group}
    exist = {tensor.name for tensor in graph.inputs}
    exist |= {tensor.name for operator in graph.operators if operator.name in before for tensor in operator.outputs}
    read_later = {read for operator in graph.operators if operator.name in after for read in operator.inputs}
    return exist & (read_later | set(graph.outputs))


def _bytes(tensor: Tensor) -> int:
    size = {"float32": 4, "int8": 1, "uint8": 1, "float16": 2, "int64": 8}[tensor.dtype]
    for extent in tensor.shape:
        size *= extent
    return size


def find_link(problem: Problem, source: str, destination: str) -> Link:
    """Return the link between two devices: the platform's before the profile's; free within one or if unknown."""
    for links in (problem.platform.links, problem.profile.links):
        for link in links:
            if link.source == source != destination == link.destination:
                return link
    return Link(source, destination)


def link_s(link: Link, size: int) -> float:
    return link.latency_s + (size / link.bandwidth_bytes_per_s if link.bandwidth_bytes_per_s else 0.0)


def slowdown(problem: Problem, name: str, working: int) -> float:
    """Return 1 alone, the measured factor with the largest set of devices beside it, and linear between."""
    devices = problem.platform.devices
    largest = 0
    for size in range(1, len(devices) + 1):
        for group in itertools.combinations(devices, size):
            clash = any(set(a.cores) & set(b.cores) for a, b in itertools.combinations(group, 2))
            if not clash and name in [device.name for device in group]:
                largest = size
    factor = problem.profile.devices[name].busy_factor if name in problem.profile.devices else 1.0
    return 1 + (factor - 1) * (working - 1) / (largest - 1) if largest > 1 else 1.0


def model_phases(
    device: Device, operators: Sequence[Operator], input_bytes: int, output_bytes: int
) -> tuple[Phase, Phase]:
    """Return a frame on a device that was not measured: calls and copies, then work beside the fetch of parameters."""
    model = device.model
    assert model is not None
    copied = model.call_s + model.operator_s * len(operators)
    copied += input_bytes / model.input_bytes_per_s if model.input_bytes_per_s else 0.0
    copied += output_bytes / model.output_bytes_per_s if model.output_bytes_per_s else 0.0
    worked = sum(operator.macs for operator in operators) / model.macs_per_s if model.macs_per_s else 0.0
    fetched = 0.0
    if model.cached_bytes is not None and model.refill_bytes_per_s:
        param_bytes = sum(operator.param_bytes for operator in operators)
        fetched = max(param_bytes - model.cached_bytes, 0) / model.refill_bytes_per_s
    return Phase(copied), Phase(max(worked, fetched), device.bus, fetched)


class Service:
    """The work of each device for a frame of each stage, and its seconds."""

    def __init__(self, problem: Problem, stages: Sequence[Stage], *, busy: bool) -> None:
        graph, groups = problem.graph, [stage.operators for stage in stages]
        sizes = {t.name: _bytes(t) for t in (*graph.inputs, *(t for o in graph.operators for t in o.outputs))}
        self.crossing = [sum(sizes[t] for t in naive_crossing(graph, groups, k)) for k in range(len(stages) + 1)]
        self.problem, self.groups = problem, groups
        self.used = sorted({name for stage in stages for name in stage.devices})
        self.factor = {name: slowdown(problem, name, len(self.used)) if busy else 1.0 for name in self.used}

    def of(self, stage: int, name: str, came_from: str | None) -> tuple[list[Phase], float]:
        """Return the phases of one frame, and its joules."""
        problem, factor = self.problem, self.factor[name]
        (device,) = (device for device in problem.platform.devices if device.name == name)
        phases = []
        if came_from:
            link = find_link(problem, came_from, name)
            seconds = link_s(link, self.crossing[stage])
            phases.append(Phase(seconds * factor, link.bus, seconds))
        operators = [operator for operator in problem.graph.operators if operator.name in self.groups[stage]]
        profile = problem.profile.devices.get(name)
        if profile is None:
            phases += model_phases(device, operators, self.crossing[stage], self.crossing[stage + 1])
            return phases, sum(phase.seconds for phase in phases) * (device.active_w or 0.0)
        for transfer, size in ((profile.receive, self.crossing[stage]), (profile.send, self.crossing[stage + 1])):
            if transfer is not None:
                seconds = transfer.latency_s
                if transfer.bandwidth_bytes_per_s is not None:
                    seconds += size / transfer.bandwidth_bytes_per_s
                phases.append(Phase(seconds * factor))
        transfers_j = sum(phase.seconds for phase in phases) * (device.active_w or 0.0)
        computed_s = sum(profile.seconds[operator.name] or 0.0 for operator in operators) * factor
        phases += _locked(computed_s, sum(problem.profile.lock_s.get(operator.name, 0.0) for operator in operators))
        if profile.joules is not None:
            return phases, sum(profile.joules[operator.name] for operator in operators) + transfers_j
        return phases, transfers_j + computed_s * (device.active_w or 0.0)


def _locked(computed_s: float, held_s: float) -> list[Phase]:
    """Return the phases of computing, which begins with all seconds of the interpreter's lock."""
    if not held_s:
        return [Phase(computed_s)]
    return [Phase(min(held_s, computed_s), "the interpreter", held_s), Phase(max(computed_s - held_s, 0.0))]


def push_frames(
    problem: Problem,
    stages: Sequence[Stage],
    frames: int,
    *,
    busy: bool = True,
    taking: Mapping[int, str] | None = None,
    inside: int | None = None,
) -> Run:
    """Push frames that all wait from the start through the stages; a free device takes the oldest that it may.

    A replica that serves other stages does these first. A stage with an ordered operator takes all frames in order.

    Args:
        busy: whether the devices slow each other down.
        taking: the replica that takes the frames of a stage, where it is forced.
        inside: the most frames that are inside at once; all wait inside if it is left out.
    """
    service = Service(problem, stages, busy=busy)
    waiting: list[list[tuple[int, str | None]]] = [[] for _ in stages]  # heaps of (frame, where it lies)
    waiting[0] = [(frame, None) for frame in range(min(frames, inside or frames))]
    idle = list(service.used)
    ticket = itertools.count()
    events: list[tuple[float, int, Callable[[], None]]] = []
    wanting: dict[str, deque[tuple[Phase, Callable[[], None]]]] = defaultdict(deque)
    taken: set[str] = set()
    done: list[float] = []
    order: list[list[int]] = [[] for _ in stages]
    begun: list[list[int]] = [[] for _ in stages]
    ordered = {operator.name for operator in problem.graph.operators if operator.ordered}
    in_order = {k for k, stage in enumerate(stages) if ordered.intersection(stage.operators)}
    now = joules = 0.0

    def after(seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(events, (now + seconds, next(ticket), action))

    def release(bus: str) -> None:
        taken.discard(bus)
        grant(bus)

    def grant(bus: str) -> None:
        if bus not in taken and wanting[bus]:
            phase, proceed = wanting[bus].popleft()
            taken.add(bus)
            after(phase.bus_s, partial(release, bus))
            after(phase.seconds, proceed)

    def proceed(device: str, stage: int, frame: int, phases: list[Phase]) -> None:
        if not phases:
            finish(device, stage, frame)
            return
        phase, rest = phases[0], partial(proceed, device, stage, frame, phases[1:])
        if phase.bus and phase.bus_s:
            wanting[phase.bus].append((phase, rest))
            grant(phase.bus)
        else:
            after(phase.seconds, rest)

    def finish(device: str, stage: int, frame: int) -> None:
        idle.append(device)
        order[stage].append(frame)
        if stage + 1 == len(stages):
            done.append(now)
            if inside and len(done) + inside <= frames:
                heapq.heappush(waiting[0], (len(done) + inside - 1, None))
        else:
            heapq.heappush(waiting[stage + 1], (frame, device))

    while len(done) < frames:
        for device in list(idle):
            may = [
                (len(stage.devices), waiting[k][0][0], k)
                for k, stage in enumerate(stages)
                if waiting[k] and device in stage.devices and (taking or {}).get(k, device) == device
                if k not in in_order or waiting[k][0][0] == len(begun[k])
            ]
            if may:
                _, frame, stage = min(may)
                begun[stage].append(frame)
                _, came_from = heapq.heappop(waiting[stage])
                phases, energy = service.of(stage, device, came_from)
                joules += energy
                idle.remove(device)
                proceed(device, stage, frame, phases)
        now, _, action = heapq.heappop(events)
        action()
    return Run(tuple(done), joules, tuple(map(tuple, order)))


def single_frames(problem: Problem, stages: Sequence[Stage]) -> list[Run]:
    """Yield a frame that meets an empty pipeline, by each path through the replicas."""
    return [
        push_frames(problem, stages, 1, busy=False, taking=dict(enumerate(taken)))
        for taken in itertools.product(*(stage.devices for stage in stages))
    ]


def single_frame(problem: Problem, stages: Sequence[Stage]) -> tuple[float, float]:
    """Return the worst seconds of a frame in an empty pipeline, over the replicas it may meet, and its joules."""
    worst = max(single_frames(problem, stages), key=lambda run: run.done_s[0])
    return worst.done_s[0], worst.joules
