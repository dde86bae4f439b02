"""Host work: the operators of an application around its model, such as reading, decoding, drawing and encoding.

They are operators of the graph that is planned, and run in the workers of their stages, each on one device and in the
order of the frames. What they hand on to one another is a Python object, the tag of the frame. The model's inputs and
outputs are arrays in the frame's slot. A worker runs its stage in this order: the host operators before the model's,
the model's operators, the host operators after these.

Read next: worker.py, which runs a stage. The plug-in tvm_pipeline_video makes host work of a source, a decoder and a
sink.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tvm_pipeline.backends.contract import Array, Port, StageRunner
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlanError


class EndOfStream(Exception):  # noqa: N818 - it is no error
    """What the first host operator raises where no frame is left."""


class Entry(NamedTuple):
    """What the first host operator returns of the frame that it took from outside.

    Attributes:
        entered_s: clock time (`time.perf_counter`) from which the latency of the frame counts.
        waited_s: seconds that the operator waited for the frame, in which its device was free.
        elsewhere_s: seconds that another thread on the same device spent on the frame.
    """

    entered_s: float
    waited_s: float = 0.0
    elsewhere_s: float = 0.0


# A host operator: it takes the tag of a frame, and a function that returns a tensor of the model by name in its logical
# order: an input, to be written to, or an output, to be read.
HostFunction = Callable[[Any, Callable[[str], Array]], "Entry | None"]


@dataclass(frozen=True, slots=True)
class HostWork:
    """The host operators of an application.

    Attributes:
        graph: the model's operators with the host operators around them.
        functions: the host operators by name, each ordered in `graph`. The first one takes frames from outside, and
            raises EndOfStream where none is left.
        place: is called with the device of the first operator before it runs there, to move threads of the source.
        known_as: what stands behind an operator, for messages, such as the name of a decoder.
    """

    graph: OperatorGraph
    functions: Mapping[str, HostFunction]
    place: Callable[[Device], None] = field(default=lambda _: None)
    known_as: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageWork:
    """The operators of one stage in the order in which they run."""

    before: tuple[str, ...]
    model: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def host(self) -> tuple[str, ...]:
        """The host operators."""
        return *self.before, *self.after

    def shares(self, other: StageWork) -> bool:
        """Return whether both hold the same host operator."""
        return not set(self.host).isdisjoint(other.host)


def stage_work(operators: Sequence[str], host: HostWork | None) -> StageWork:
    """Return the operators of a stage, parted into host operators and the model's.

    Raises:
        PlanError: a host operator stands between two of the model's.
    """
    if host is None:
        return StageWork((), tuple(operators), ())
    model = tuple(name for name in operators if name not in host.functions)
    index = host.graph.edges.index
    own = sorted((name for name in operators if name in host.functions), key=index.__getitem__)
    if not model:
        return StageWork(tuple(own), (), ())
    first, last = min(map(index.__getitem__, model)), max(map(index.__getitem__, model))
    before, after = (name for name in own if index[name] < first), (name for name in own if index[name] > last)
    work = StageWork(tuple(before), model, tuple(after))
    if len(work.host) < len(own):
        between = next(name for name in own if name not in work.host)
        raise PlanError(f"host operator {between} stands between operators of the model in one stage; cut there")
    return work


class HostStage(StageRunner):
    """A stage of host operators alone: it binds a thread to the cores of its device.

    Raises:
        PlanError: the device has no cores of this machine.
    """

    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    def __init__(self, operators: Sequence[str], device: Device) -> None:
        if not device.cores:
            raise PlanError(
                f"host operator {operators[0]} cannot run on device {device.name}, which has no cores of this machine; "
                "plan again"
            )
        self._cores = device.cores

    def bind(self) -> None:
        os.sched_setaffinity(0, self._cores)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Do nothing: the host operators are run by the worker."""
