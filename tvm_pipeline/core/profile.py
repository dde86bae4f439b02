"""The profile: the measured figures of one graph on one platform.

It has the seconds of each operator on each device, the seconds in which a device receives and sends tensors, the fitted
links, the factors by which the devices slow one another down, and the environment of the measurement. `profiling/`
makes profiles. Only `cost/` reads their figures: it decides which of them count for a stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from tvm_pipeline.core.device_model import LONGEST_S
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_limits import MOST_FILE_BYTES
from tvm_pipeline.core.platform import Link, Platform, Transfer
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.files import read_bytes

FigureT = TypeVar("FigureT")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The measured figures of one device.

    Attributes:
        seconds: median seconds of each operator, by its name; None where the device cannot run it.
        spread: interquartile range over median of each operator, by its name; empty where it is not known.
        busy_factor: how many times slower the device is while every other device works too.
        joules: energy of each operator above that of the idle machine, by its name; None where there is no sensor.
        receive: the transfer by which the device receives the tensors of a stage from the host's memory; None where
            the device works on the host's memory itself.
        send: the transfer by which it sends the tensors of a stage back to the host's memory; None as above.
        uncertainty: relative half-width of the 95 % confidence interval of each operator's seconds, by its name; empty
            where it is not known.
        joules_uncertainty: the same of each operator's joules.
        predicted_from: the layer times from which the seconds are predicted, see `profiling/layer_times.py`; empty
            where they were measured.

    Examples:
        >>> from tvm_pipeline.testing import example_graph
        >>> measured = DeviceProfile.in_order(example_graph(), [0.02, None])
        >>> measured.seconds, measured.runs
        ({'double': 0.02, 'increment': None}, 1)
    """

    seconds: Mapping[str, float | None]
    spread: Mapping[str, float] = field(default_factory=dict)
    busy_factor: float = 1.0
    joules: Mapping[str, float] | None = None
    receive: Transfer | None = None
    send: Transfer | None = None
    uncertainty: Mapping[str, float] = field(default_factory=dict)
    joules_uncertainty: Mapping[str, float] = field(default_factory=dict)
    predicted_from: str = ""

    @classmethod
    def in_order(
        cls,
        graph: OperatorGraph,
        seconds: Iterable[float | None],
        spread: Iterable[float] = (),
        busy_factor: float = 1.0,
        joules: Iterable[float] | None = None,
    ) -> DeviceProfile:
        """Return a profile from figures that are listed in the order of the graph's operators.

        Raises:
            ProfileError: a list is shorter or longer than the graph.
        """
        names = graph.operator_names

        def by_name(figures: Iterable[FigureT]) -> dict[str, FigureT]:
            listed = list(figures)
            if len(listed) != len(names):
                raise ProfileError(
                    f"{len(listed)} figures were listed for the {len(names)} operators of {graph.name}; measure again"
                )
            return dict(zip(names, listed, strict=True))

        spread = list(spread)
        return cls(
            by_name(seconds),
            by_name(spread) if spread else {},
            busy_factor,
            None if joules is None else by_name(joules),
        )

    @property
    def whole_s(self) -> float:
        """The seconds of all operators that the device can run."""
        return sum(seconds for seconds in self.seconds.values() if seconds is not None)

    @property
    def runs(self) -> int:
        """The number of operators that the device can run."""
        return sum(seconds is not None for seconds in self.seconds.values())

    @property
    def whole_j(self) -> float | None:
        """The joules of all operators above the idle machine's; None where there is no sensor."""
        return None if self.joules is None else math.fsum(self.joules.values())

    @property
    def whole_j_uncertainty(self) -> float:
        """The uncertainty of `whole_j` if all operators err alike; 0 where it is not known."""
        weighted = sum(doubt * (self.joules or {})[name] for name, doubt in self.joules_uncertainty.items())
        return weighted / self.whole_j if self.whole_j else 0.0

    @property
    def mean_spread(self) -> float:
        """The mean of the operators' spreads, weighted by their seconds; 0 where they are not known."""
        weighted = sum(spread * (self.seconds[name] or 0.0) for name, spread in self.spread.items())
        return weighted / self.whole_s if self.whole_s else 0.0

    @property
    def median_spread(self) -> float | None:
        """The median of the operators' spreads; None where they are not known."""
        known = [spread for name, spread in self.spread.items() if self.seconds[name] is not None]
        return median(known) if known else None


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """The median seconds of a whole stage on a device, with its transfers, and their spread.

    The times of operators do not add up on some devices, such as an Edge TPU with its parameter cache. There this
    figure is more exact than any model.
    """

    device: str
    operators: tuple[str, ...]
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class IdlePower:
    """What the machine drew while no device computed, and the sensor that measured it and the joules of operators.

    Attributes:
        sensor: its name.
        covers: what draws the joules that it counts, such as "the board".
        power_w: mean power of the idle machine.
        uncertainty: relative half-width of the 95 % confidence interval of `power_w`.
    """

    sensor: str
    covers: str
    power_w: float
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured figures of a graph, which its name and fingerprint tell, on the devices of a platform.

    Attributes:
        lock_s: seconds for which an operator holds the lock of the Python interpreter, by its name. All devices share
            that lock, so it bounds the throughput like a bus. Operators without an entry hardly hold it.
        idle: the power of the idle machine; None where no sensor measured it.
        power_mode: the power mode of the platform in which it was measured; empty where none was set for it.

    Examples:
        >>> from tvm_pipeline.testing import example_graph
        >>> graph = example_graph()
        >>> devices = {"d0": DeviceProfile.in_order(graph, [0.02, 0.04])}
        >>> profile = Profile(graph.name, graph.fingerprint, devices)
        >>> profile.device("d0").whole_s
        0.06
    """

    graph: str
    fingerprint: str
    devices: dict[str, DeviceProfile]
    links: tuple[Link, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    segments: tuple[SegmentProfile, ...] = ()
    lock_s: dict[str, float] = field(default_factory=dict)
    idle: IdlePower | None = None
    power_mode: str = ""

    def __post_init__(self) -> None:
        for segment in self.segments:
            if not 0 < segment.seconds <= LONGEST_S:
                raise ProfileError(
                    f"profile of {self.graph}: a stage of {len(segment.operators)} operators took {segment.seconds} s "
                    f"on device {segment.device}; measure again"
                )
        for name, device in self.devices.items():
            _check_device(f"profile of {self.graph}, device {name}", device)
        for name, seconds in self.lock_s.items():
            if not 0 <= seconds <= LONGEST_S:
                raise ProfileError(f"profile of {self.graph}: lock_s of operator {name} is {seconds}; measure again")
        if self.idle is not None and not 0 <= self.idle.power_w < math.inf:
            raise ProfileError(f"profile of {self.graph}: the idle machine drew {self.idle.power_w} W; measure again")
        if len({frozenset(device.seconds) for device in self.devices.values()}) > 1:
            raise ProfileError(f"profile of {self.graph}: its devices list different operators; measure again")
        for link in self.links:
            if not link.is_possible:
                raise ProfileError(
                    f"profile of {self.graph}, link {link.source} -> {link.destination}: latency_s "
                    f"{link.latency_s} and bandwidth_bytes_per_s {link.bandwidth_bytes_per_s}; measure again"
                )

    def check_graph(self, graph: OperatorGraph) -> None:
        """Raise ProfileError unless this profile was measured on `graph`."""
        if self.fingerprint != graph.fingerprint:
            raise ProfileError(
                f"this profile was measured on {self.graph} ({self.fingerprint}), not on {graph.name} "
                f"({graph.fingerprint}); measure it with `tvm-pipeline profile`"
            )
        names = set(graph.operator_names)
        for name, device in self.devices.items():
            if device.seconds.keys() != names:
                differing = sorted(device.seconds.keys() ^ names)
                raise ProfileError(
                    f"this profile of {self.graph} lists {len(device.seconds)} operators on device {name}, the graph "
                    f"has {len(graph)}; {differing[0]} stands in only one of the two. Measure it with "
                    "`tvm-pipeline profile`"
                )

    def check_platform(self, platform: Platform) -> None:
        """Raise ProfileError unless every device of the platform was measured, or has a model."""
        for device in platform.devices:
            if device.model is not None:
                continue
            if not self.devices:
                raise ProfileError(
                    f"nothing says how fast device {device.name} of platform {platform.name} runs {self.graph}: give a "
                    "`profile`, a platform with `layer_times` or a [device.model] (profiles/ has some of both), or an "
                    "`objective` of bytes"
                )
            self.device(device.name)

    def device(self, name: str) -> DeviceProfile:
        """Return the figures of a device; raise ProfileError where it was not measured."""
        try:
            return self.devices[name]
        except KeyError:
            known = ", ".join(self.devices)
            raise ProfileError(
                f"the profile of {self.graph} has no device {name} (it has {known}); measure it with "
                "`tvm-pipeline profile`"
            ) from None


def _check_device(where: str, device: DeviceProfile) -> None:
    listed: tuple[Mapping[str, float | None], ...] = (
        device.seconds,
        device.spread,
        device.joules or {},
        device.uncertainty,
        device.joules_uncertainty,
    )
    for figures in listed:
        for operator, figure in figures.items():
            if figure is not None and not 0 <= figure <= LONGEST_S:
                raise ProfileError(f"{where}: the figure of operator {operator} is {figure}; measure again")
    others = (
        ("spread", device.spread),
        ("joules", device.joules),
        ("uncertainty", device.uncertainty),
        ("joules_uncertainty", device.joules_uncertainty),
    )
    for name, other in others:
        if other and other.keys() != device.seconds.keys():
            raise ProfileError(f"{where}: seconds and {name} list different operators; measure again")
    if not (device.busy_factor > 0 and math.isfinite(device.busy_factor)):
        raise ProfileError(f"{where}: busy_factor is {device.busy_factor}; measure again")
    for direction, transfer in (("receive", device.receive), ("send", device.send)):
        if transfer is not None and not transfer.is_possible:
            raise ProfileError(
                f"{where}: {direction} has latency_s {transfer.latency_s} and bandwidth_bytes_per_s "
                f"{transfer.bandwidth_bytes_per_s}; measure again"
            )


def unmeasured(graph: OperatorGraph) -> Profile:
    """Return a profile without measurements, which is enough where the devices have models or bytes are planned."""
    return Profile(graph.name, graph.fingerprint, {})


def read_profile(path: Path | str) -> Profile:
    """Read a profile from its JSON file. Raise ProfileError, which names the file.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     _ = file.write('{"graph": "net", "fingerprint": "0", "devices": {"d0": {"seconds": {"conv": 0.02}}}}')
        ...     file.flush()
        ...     print(read_profile(file.name).device("d0").seconds)
        {'conv': 0.02}
    """
    content = read_bytes(path, ProfileError, MOST_FILE_BYTES)
    with blamed(path, ProfileError, "measure it with `tvm-pipeline profile`"):
        try:
            return msgspec.json.decode(content, type=Profile)
        except msgspec.ValidationError as error:
            if "Expected `object`, got `array`" not in str(error):
                raise
            raise ProfileError(
                f"{error}; it is of an earlier version, which listed figures by position: measure with `tvm-pipeline "
                "profile`"
            ) from error
