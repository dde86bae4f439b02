"""The Problem that a scheduler solves: a graph, a platform, a profile, the objective and the limits.

Next: `plan.py`, the Plan that solves it; `planning/planner.py`, which leads from the one to the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast, get_args

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device, Link, Platform, find_link
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import InfeasibleError, OptionError, nearest

Objective = Literal[
    "throughput",
    "latency",
    "energy",
    "memory,communication",
    "memory,dram,communication",
    "dram,memory,communication",
    "memory,edge_communication",
    "memory,dram,edge_communication",
    "dram,memory,edge_communication",
]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph that is to be planned on a platform by its profile.

    Attributes:
        objective: the figures that decide between plans. `throughput` is the most frames a second, `latency` the least
            seconds of a frame and `energy` the least joules of a frame, in which the machine's idle power counts for
            the seconds between frames. The objectives of bytes compare three figures in lexicographic order: the
            parameter bytes of the largest stage (`memory`), the bytes of parameters beyond the stages' caches (`dram`)
            and the bytes that cross the widest boundary. The three are from Yin et al., SEC 2022. The last counts
            tensors, as devices in a chain hand them on (`communication`, see `graph.handed_on_bytes`), or edges, as
            equations 9 and 10 of the paper do (`edge_communication`, see `graph.edge_communication_bytes`).
        stages: the number of stages of a plan; None lets the planner choose.
        children_together: whether all operators that read an operator's outputs must stand in one stage.
        min_throughput_fps: plans that are slower are not allowed (with objective latency or energy).
        max_latency_s: plans whose frames take longer are not allowed (with objective throughput); a full pipeline holds
            no more frames than keep it.
        time_limit_s: how long a scheduler may search; it then returns the best plan that it has, with its bound.
        activations: whether the `memory_bytes` of a device must hold the activations of its stages beside their
            parameters. Leave it True. The planner sets it to False for searches that count parameters alone: every
            plan of the problem is one of that relaxation, so the bound of the relaxation is a bound of the problem.
            `planner.py` then checks the plans that were found with their activations.

    Examples:
        >>> from tvm_pipeline.testing import example_graph
        >>> graph = example_graph()
        >>> platform = Platform("box", (Device("d0"), Device("d1")))
        >>> seconds = {"d0": [0.02, 0.04], "d1": [0.04, 0.02]}
        >>> devices = {name: DeviceProfile.in_order(graph, listed) for name, listed in seconds.items()}
        >>> problem = Problem(graph, platform, Profile(graph.name, graph.fingerprint, devices), "latency")
        >>> plan(problem).plan.predicted.latency_s
        0.04
    """

    graph: OperatorGraph
    platform: Platform
    profile: Profile
    objective: Objective = "throughput"
    stages: int | None = None
    children_together: bool = False
    min_throughput_fps: float | None = None
    max_latency_s: float | None = None
    time_limit_s: float | None = None
    activations: bool = True

    def __post_init__(self) -> None:
        checked_objective(self.objective)
        check_limits(self.objective, self.stages, self.min_throughput_fps, self.max_latency_s, self.time_limit_s)
        if self.stages is not None and self.stages > len(self.graph):
            raise InfeasibleError(
                f"{self.stages} stages: {self.graph.name} has only {len(self.graph)} operators, "
                "and every stage needs one"
            )
        self.profile.check_graph(self.graph)
        if not self.is_lexicographic:
            self.profile.check_platform(self.platform)

    @property
    def is_lexicographic(self) -> bool:
        """Whether the objective counts bytes, so that no seconds need be known."""
        return is_lexicographic(self.objective)

    @property
    def counts_activations(self) -> bool:
        """Whether activations must fit into the memory of a device, which plans of the graph can exceed."""
        return self.activations and any(may_exceed(self.graph, device) for device in self.platform.devices)

    def link(self, source: str, destination: str) -> Link:
        """Return the link between two devices: that of the platform, else the measured one, else a free one."""
        return find_link((*self.platform.links, *self.profile.links), source, destination)


def check_limits(
    objective: str,
    stages: int | None,
    min_throughput_fps: float | None,
    max_latency_s: float | None,
    time_limit_s: float | None,
) -> None:
    """Raise OptionError where a limit can be kept by no plan, or is none of the objective's."""
    if stages is not None and stages < 1:
        raise OptionError(f"`stages` {stages}: a plan has at least one stage", option="stages", value=stages)
    limits = {
        "min_throughput_fps": min_throughput_fps,
        "max_latency_s": max_latency_s,
        "time_limit_s": time_limit_s,
    }
    for option, limit in limits.items():
        if limit is not None and (math.isnan(limit) or limit < 0 or (limit == 0 and option != "time_limit_s")):
            what = "not be negative" if option == "time_limit_s" else "be positive"
            raise OptionError(f"`{option}` {limit:g}: it must {what}", option=option, value=limit)
    if min_throughput_fps is not None and objective not in ("latency", "energy"):
        raise OptionError(
            f"`min_throughput_fps` goes with objective latency or energy, not with {objective}",
            option="min_throughput_fps",
            value=min_throughput_fps,
        )
    if max_latency_s is not None and objective != "throughput":
        raise OptionError(
            f"`max_latency_s` goes with objective throughput, not with {objective}",
            option="max_latency_s",
            value=max_latency_s,
        )


def checked_objective(text: str) -> Objective:
    """Return the objective of this name; raises OptionError where there is none."""
    for objective in OBJECTIVES:
        if text == objective:
            return objective
    advice = nearest(text, OBJECTIVES, f"there are {'; '.join(OBJECTIVES)}")
    raise OptionError(f"there is no `objective` {text!r}; {advice}", option="objective", value=text)


def may_exceed(graph: OperatorGraph, device: Device) -> bool:
    """Return whether stages of the graph can need more than the device's `memory_bytes`.

    Where they cannot, the limit restricts nothing: the device may serve several stages, and nothing need be counted.

    Examples:
        >>> from tvm_pipeline.testing import example_graph
        >>> graph = example_graph()
        >>> most = most_bytes(graph)
        >>> [may_exceed(graph, Device("gpu", memory_bytes=size)) for size in (most - 1, most, None)]
        [True, False, False]
    """
    return device.memory_bytes is not None and most_bytes(graph) > device.memory_bytes


@lru_cache(maxsize=64)
def most_bytes(graph: OperatorGraph) -> int:
    """Return a bound of the bytes that one device holds for any plan of the graph, whatever stages it serves.

    It is all parameters, and every tensor once for its writer and once for each operator that reads it. Each operator
    stands in one stage, and a device is one replica of it at most, so its parameters are held once. A stage has its own
    copy of each tensor that its operators read or write, and all stages of the device at once have the most copies
    where every operator is a stage: one in the stage of the writer, and one in that of each reader. Frames inside take
    no more: they wait in slots, which are memory of the host, and a stage computes one frame at a time. What a device
    keeps of them beyond that takes no more than the rest (`runtime/slots.py`).
    """
    readers = graph.edges.readers
    copies = sum(tensor.bytes * (1 + len(readers[name])) for name, tensor in graph.tensors.items())
    return copies + sum(operator.param_bytes for operator in graph.operators)


def is_lexicographic(objective: Objective) -> bool:
    """Return whether the objective counts bytes: memory, DRAM overflow and communication in some order."""
    return "communication" in objective


def counts_edges(objective: Objective) -> bool:
    """Return whether the objective counts communication by edges, at the boundary in front of each edge's reader."""
    return "edge_communication" in objective


def by_tensors(objective: Objective) -> Objective:
    """Return the objective with communication counted by tensors, where it is counted by edges."""
    return cast(Objective, objective.replace("edge_communication", "communication"))
