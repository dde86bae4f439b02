"""A plan as a queue of frames in front of devices that do one thing at a time: an independent judge of `evaluate`.

It shares no code with the product: what crosses a boundary, what a link costs and how much busy devices slow each
other down are worked out again here, the naive way.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm_pipeline.graph import OperatorGraph, Tensor
from tvm_pipeline.plan import Problem, Stage


@dataclass(frozen=True)
class Run:
    """When each frame came out (in the order of completion), and the joules all frames took."""

    done_s: tuple[float, ...]
    joules: float

    @property
    def steady_fps(self) -> float:
        """Frames a second between the first and the third quarter of the run."""
        first, last = len(self.done_s) // 4, 3 * len(self.done_s) // 4
        return (last - first) / (self.done_s[last] - self.done_s[first])


def naive_crossing(graph: OperatorGraph, groups: Sequence[Sequence[str]], boundary: int) -> set[str]:
    """The tensors that exist before group `boundary` runs, and that this or a later group, or the caller, reads."""
    before = {name for group in groups[:boundary] for name in group}
    after = {name for group in groups[boundary:] for name in group}
    exist = {tensor.name for tensor in graph.inputs}
    exist |= {tensor.name for operator in graph.operators if operator.name in before for tensor in operator.outputs}
    wanted = {read for operator in graph.operators if operator.name in after for read in operator.inputs}
    return exist & (wanted | set(graph.outputs))


def _bytes(tensor: Tensor) -> int:
    size = {"float32": 4, "int8": 1, "uint8": 1, "float16": 2, "int64": 8}[tensor.dtype]
    for extent in tensor.shape:
        size *= extent
    return size


def link_s(problem: Problem, source: str, destination: str, size: int) -> float:
    """Seconds of a transfer: the platform's word before the profile's; free within a device or where unknown."""
    if source == destination:
        return 0.0
    for links in (problem.platform.links, problem.profile.links):
        for link in links:
            if link.source == source and link.destination == destination:
                return link.latency_s + (size / link.bandwidth_bytes_per_s if link.bandwidth_bytes_per_s else 0.0)
    return 0.0


def slowdown(problem: Problem, name: str, working: int) -> float:
    """1 alone, the measured factor with the largest set of devices that can work beside it, linear between."""
    devices = problem.platform.devices
    largest = 0
    for size in range(1, len(devices) + 1):
        for group in itertools.combinations(devices, size):
            clash = any(set(a.cores) & set(b.cores) for a, b in itertools.combinations(group, 2))
            if not clash and name in [device.name for device in group]:
                largest = size
    factor = problem.profile.devices[name].busy_factor
    return 1 + (factor - 1) * (working - 1) / (largest - 1) if largest > 1 else 1.0


def push_frames(
    problem: Problem,
    stages: Sequence[Stage],
    frames: int,
    *,
    busy: bool = True,
    taking: Mapping[int, str] | None = None,
) -> Run:
    """Pushes frames through, all waiting at the door from the start; a free device takes the oldest it may take.

    Args:
        busy: whether the devices slow each other down.
        taking: the replica that takes the frames of a stage, where it is forced.
    """
    graph, groups = problem.graph, [stage.operators for stage in stages]
    sizes = {
        tensor.name: _bytes(tensor) for tensor in (*graph.inputs, *(t for o in graph.operators for t in o.outputs))
    }
    received = [sum(sizes[name] for name in naive_crossing(graph, groups, k)) for k in range(len(stages))]
    place = {operator.name: index for index, operator in enumerate(graph.operators)}
    used = {name for stage in stages for name in stage.devices}
    watts = {device.name: device.active_w for device in problem.platform.devices}

    def service(stage: int, device: str, came_from: str | None) -> tuple[float, float]:
        """Seconds and joules of one frame."""
        profile = problem.profile.devices[device]
        factor = slowdown(problem, device, len(used)) if busy else 1.0
        compute = sum(profile.seconds[place[name]] for name in groups[stage]) * factor
        transfer = link_s(problem, came_from, device, received[stage]) * factor if came_from else 0.0
        if profile.joules is None:
            return compute + transfer, (compute + transfer) * (watts[device] or 0.0)
        return compute + transfer, sum(profile.joules[place[n]] for n in groups[stage]) + transfer * (
            watts[device] or 0.0
        )

    waiting: list[list[tuple[int, str | None]]] = [[] for _ in stages]  # heaps of (frame, where it lies)
    waiting[0] = [(frame, None) for frame in range(frames)]
    idle = sorted(used)
    events: list[tuple[float, int, str, int, int]] = []  # (end, sequence, device, stage, frame)
    order = itertools.count()
    done: list[float] = []
    now = joules = 0.0
    while len(done) < frames:
        for device in list(idle):
            may = [
                (waiting[k][0][0], k)
                for k, stage in enumerate(stages)
                if waiting[k] and device in stage.devices and (taking or {}).get(k, device) == device
            ]
            if may:
                frame, stage = min(may)
                _, came_from = heapq.heappop(waiting[stage])
                seconds, energy = service(stage, device, came_from)
                joules += energy
                heapq.heappush(events, (now + seconds, next(order), device, stage, frame))
                idle.remove(device)
        now, _, device, stage, frame = heapq.heappop(events)
        idle.append(device)
        if stage + 1 == len(stages):
            done.append(now)
        else:
            heapq.heappush(waiting[stage + 1], (frame, device))
    return Run(tuple(done), joules)


def single_frame(problem: Problem, stages: Sequence[Stage]) -> tuple[float, float]:
    """The worst seconds of a frame that meets an empty pipeline, over the replicas it may meet, and its joules."""
    runs = [
        push_frames(problem, stages, 1, busy=False, taking=dict(enumerate(taken)))
        for taken in itertools.product(*(stage.devices for stage in stages))
    ]
    worst = max(runs, key=lambda run: run.done_s[0])
    return worst.done_s[0], worst.joules
