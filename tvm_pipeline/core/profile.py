"""The profile: what was measured of one graph on one platform.

Seconds per operator and device, the fitted links, how much the devices slow one another down, and the
environment all this was measured in. `profiling/` makes profiles, the schedulers and `evaluate.py` read them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Link
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.files import read_bytes


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What one device was measured to do.

    Attributes:
        seconds: median seconds of each operator, in the graph's order; None where the device cannot run it.
        spread: interquartile range over median, for each operator.
        busy_factor: how many times slower the device is while every other device works too.
        joules: energy of each operator where a sensor exists.
    """

    seconds: tuple[float | None, ...]
    spread: tuple[float, ...] = ()
    busy_factor: float = 1.0
    joules: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """What a device was measured to take for a whole stage: median seconds, its transfers included, and their spread.

    Where times do not add up, as on an Edge TPU with its parameter cache, it is worth more than any model.
    """

    device: str
    operators: tuple[str, ...]
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured figures of a graph (by name and fingerprint) on the devices of a platform."""

    graph: str
    fingerprint: str
    devices: dict[str, DeviceProfile]
    links: tuple[Link, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    segments: tuple[SegmentProfile, ...] = ()

    def __post_init__(self) -> None:
        for segment in self.segments:
            if not (segment.seconds > 0 and math.isfinite(segment.seconds)):
                raise ProfileError(
                    f"profile of {self.graph}: a stage of {len(segment.operators)} operators took {segment.seconds} s "
                    f"on device {segment.device}; measure again"
                )
        for name, device in self.devices.items():
            where = f"profile of {self.graph}, device {name}"
            figures = [*device.seconds, *device.spread, *(device.joules or ())]
            for position, figure in enumerate(figures):
                if figure is not None and not (figure >= 0 and math.isfinite(figure)):
                    raise ProfileError(f"{where}: entry {position} is {figure}; measure again")
            if not (device.busy_factor > 0 and math.isfinite(device.busy_factor)):
                raise ProfileError(f"{where}: busy_factor is {device.busy_factor}; measure again")
            lists = (device.seconds, device.spread or device.seconds, device.joules or device.seconds)
            if len(set(map(len, lists))) > 1:
                raise ProfileError(f"{where}: seconds, spread and joules list different numbers of operators")
        if len({len(device.seconds) for device in self.devices.values()}) > 1:
            raise ProfileError(f"profile of {self.graph}: its devices list different numbers of operators")
        for link in self.links:
            if not link.is_possible:
                raise ProfileError(
                    f"profile of {self.graph}, link {link.source} -> {link.destination}: latency_s "
                    f"{link.latency_s} and bandwidth_bytes_per_s {link.bandwidth_bytes_per_s}; measure again"
                )

    def segment_s(self, device: str, operators: Sequence[str]) -> float | None:
        """Seconds of a whole stage on the device, where just that was measured."""
        for segment in self.segments:
            if segment.device == device and set(segment.operators) == set(operators):
                return segment.seconds
        return None

    def check_graph(self, graph: OperatorGraph) -> None:
        """Raises ProfileError unless this was measured on `graph`."""
        if self.fingerprint != graph.fingerprint:
            raise ProfileError(
                f"this profile was measured on {self.graph} ({self.fingerprint}), not on {graph.name} "
                f"({graph.fingerprint}); measure it with `tvm-pipeline profile`"
            )
        for name, device in self.devices.items():
            if len(device.seconds) != len(graph):
                raise ProfileError(
                    f"this profile of {self.graph} lists {len(device.seconds)} operators on device {name}, "
                    f"the graph has {len(graph)}; measure it with `tvm-pipeline profile`"
                )

    def device(self, name: str) -> DeviceProfile:
        try:
            return self.devices[name]
        except KeyError:
            known = ", ".join(self.devices)
            raise ProfileError(
                f"the profile of {self.graph} has no device {name} (it has {known}); measure it with "
                "`tvm-pipeline profile`"
            ) from None


def unmeasured(graph: OperatorGraph) -> Profile:
    """A profile without a measurement: enough where the devices have models, or only bytes are planned."""
    return Profile(graph.name, graph.fingerprint, {})


def read_profile(path: Path | str) -> Profile:
    """Reads a profile from its JSON file; raises ProfileError naming the file."""
    content = read_bytes(path, ProfileError)
    try:
        return msgspec.json.decode(content, type=Profile)
    except (msgspec.DecodeError, ProfileError) as error:
        raise ProfileError(f"{path}: {error}") from error
