"""The machine: its devices, and the links between them with their costs.

A Platform is detected (`registry.detect_platform`) or read from a TOML file:

    name = "tx2"

    [[device]]
    name = "denver"
    cores = [1, 2]
    target = "llvm -mcpu=cortex-a57"

    [[device]]
    name = "a57"
    cores = [0, 3, 4, 5]

    [[link]]
    source = "denver"
    destination = "a57"
    latency_s = 2e-5
    bandwidth_bytes_per_s = 4e9

Devices may share cores: `cpu` may have all cores, beside `cpu0` and `cpu1` with half of them each. A plan never uses
two devices that share cores. Links that the file does not give are measured.

A device that cannot be measured, because it is on another machine, may have a `[device.model]`, see device_model.py;
its figures are called modelled. `profiles/platforms/` has such files. A machine that can be set to several power
modes may have a `[[power_mode]]` for each, see power_mode.py. Next: platform_text.py, which writes such a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path

import msgspec

from tvm_pipeline.core.device_model import LONGEST_S, SLOWEST_PER_S, DeviceModel, per_unit
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.documents import TomlFile, blamed
from tvm_pipeline.errors import OptionError, PlatformError

KINDS = {"edgetpu": "tpu"}  # the kinds of devices whose backend has another name
MOST_DEVICES = 1024
MOST_SETS = 200  # of devices that share no cores
_MOST_STEPS = 20_000  # of the search for them


@dataclass(frozen=True, slots=True)
class Device:
    """One processor that can run a stage.

    Attributes:
        name: unique on the platform, one word.
        backend: name of the backend that runs it.
        cores: the CPU cores that it occupies, with one thread each; empty for a device that is not a CPU.
        target: the target of the backend's compiler (for TVM a target string); empty lets the backend choose.
        memory_bytes: capacity for the parameters of all its stages and the activations of the stage that needs most;
            None for no limit. A device whose limit plans can reach serves one stage; see `problem.may_exceed`.
        active_w: power drawn while it computes, above idle; None where it is not known.
        cache_bytes: memory of its own in which parameters stay from frame to frame; the parameters of a stage beyond it
            are the stage's DRAM overflow. Only the objectives with `dram` use this figure.
        bus: name of the bus that carries its overflow, where several devices share the bus; else empty.
        model: the model of its speed, where it cannot be measured.
        layer_times: the file that predicts its operators' seconds from shapes, seen from the platform file's folder;
            profiles without the device get these (`workflow/predicted.py`).
        most_stages: the most stages that it serves, of all models; None for no limit. A DLA of NVIDIA holds 16 parts.
        concurrent_copies: whether it computes one frame while tensors of another one are copied to it or from it. Each
            stage then has two workers: one copies while the other computes.
        stand_in: the name of another processor that computes its stages, and the reason, where the device itself is
            missing; else empty. Platform files do not have it: a backend's `settle` finds it out, and every output
            repeats it.

    Examples:
        >>> big = Device("big", cores=(2, 3), memory_bytes=2**30)
        >>> big.overlaps(Device("cpu", cores=(0, 1, 2, 3))), big.overlaps(Device("little", cores=(0, 1)))
        (True, False)
    """

    name: str
    backend: str = "host"
    cores: tuple[int, ...] = ()
    target: str = ""
    memory_bytes: int | None = None
    active_w: float | None = None
    cache_bytes: int | None = None
    bus: str = ""
    model: DeviceModel | None = None
    layer_times: str = ""
    most_stages: int | None = None
    concurrent_copies: bool = False
    stand_in: str = ""

    @property
    def label(self) -> str:
        """The name beside measured figures: a figure of a stand-in must not be taken for one of the device."""
        return f"{self.name} (stand-in)" if self.stand_in else self.name

    @property
    def kind(self) -> str:
        """What it is, in one word: `cpu` where it occupies cores, `tpu` for an Edge TPU, else as its backend is."""
        return "cpu" if self.cores else KINDS.get(self.backend, self.backend)

    def overlaps(self, other: Device) -> bool:
        """Return whether the two cannot work at the same time: they are one device, or they share cores."""
        return self.name == other.name or not set(self.cores).isdisjoint(other.cores)


def core_ranges(cores: Iterable[int]) -> list[str]:
    """Return cores as texts of their ranges.

    >>> core_ranges((0, 3, 4, 5))
    ['0', '3-5']
    """
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The cost of a transfer: `latency_s + bytes / bandwidth_bytes_per_s` seconds.

    With a bandwidth of None bytes cost nothing.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None

    @property
    def is_possible(self) -> bool:
        """Whether a transfer can have these figures: a time up to LONGEST_S, a rate from SLOWEST_PER_S, and no NaN."""
        bandwidth = self.bandwidth_bytes_per_s
        return 0 <= self.latency_s <= LONGEST_S and (bandwidth is None or bandwidth >= SLOWEST_PER_S)

    @property
    def s_per_byte(self) -> float:
        return per_unit(self.bandwidth_bytes_per_s)

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds of transferring so many bytes."""
        if self.bandwidth_bytes_per_s is None:
            return self.latency_s
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a transfer from one device to another, see `Transfer`.

    Attributes:
        source, destination: names of devices.
        latency_s: seconds that a transfer takes beside those of its bytes.
        bandwidth_bytes_per_s: bytes a second; None where bytes cost nothing.
        r2: the quality of the fit where the link was measured.
        bus: links and devices that name the same bus take turns on it: the seconds that a frame needs of the bus, in
            all, bound the throughput.

    Examples:
        >>> usb = Link("cpu", "tpu", latency_s=0.001, bandwidth_bytes_per_s=4e8, bus="hub")
        >>> usb.seconds(400_000)
        0.002
    """

    source: str
    destination: str
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None
    r2: float | None = None
    bus: str = ""

    @property
    def transfer(self) -> Transfer:
        return Transfer(self.latency_s, self.bandwidth_bytes_per_s)

    @property
    def is_possible(self) -> bool:
        """Whether its figures can be those of a transfer."""
        return self.transfer.is_possible

    def seconds(self, size_bytes: int) -> float:
        return self.transfer.seconds(size_bytes)


@dataclass(frozen=True, slots=True)
class Platform:
    """The devices and links of one machine. Raise PlatformError where they contradict each other.

    Attributes:
        idle_w: power that the machine draws while no device computes; None where it is not known. The `active_w` of
            devices come on top.
        power_modes: what the machine can be set to. Then `idle_w` and `active_w` above are those of none of them.

    Examples:
        >>> platform = Platform("box", (Device("cpu"), Device("gpu")), (Link("cpu", "gpu", latency_s=0.001),))
        >>> platform.device("gpu").backend
        'host'
        >>> platform.device("npu")
        Traceback (most recent call last):
            ...
        tvm_pipeline.errors.PlatformError: box has no device npu; it has cpu, gpu
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    idle_w: float | None = None
    power_modes: tuple[PowerMode, ...] = ()

    def __post_init__(self) -> None:
        if self.idle_w is not None and not 0 <= self.idle_w < math.inf:
            raise PlatformError(f"platform {self.name}: idle_w is {self.idle_w}; it must not be negative")
        if not self.devices:
            raise PlatformError(f"platform {self.name} has no devices; give it at least one [[device]]")
        if len(self.devices) > MOST_DEVICES:
            raise PlatformError(f"platform {self.name} has {len(self.devices)} devices; give it {MOST_DEVICES} at most")
        names = [device.name for device in self.devices]
        for name in names:
            if names.count(name) > 1:
                raise PlatformError(f"platform {self.name}: two devices are called {name}")
            if name.split() != [name] or not name.isprintable():
                raise PlatformError(f"platform {self.name}: a device is called {name!r}; its name must be one word")
        for device in self.devices:
            if device.target != device.target.strip() or not device.target.isprintable():
                raise PlatformError(
                    f"platform {self.name}, device {device.name}: target {device.target!r} has blanks around it or "
                    "cannot be printed; leave it out for the backend's choice, or give one such as llvm"
                )
            for figure in (device.memory_bytes, device.active_w, device.cache_bytes, device.most_stages):
                if figure is not None and not (figure > 0 and math.isfinite(figure)):
                    raise PlatformError(
                        f"platform {self.name}, device {device.name}: memory_bytes, active_w, cache_bytes and "
                        "most_stages must be positive"
                    )
            if device.model is not None and not device.model.is_possible:
                raise PlatformError(
                    f"platform {self.name}, device {device.name}: in its model a time is negative, or a rate not "
                    f"positive (up to {LONGEST_S:g} s, from {SLOWEST_PER_S:g}): {device.model}"
                )
            if len(set(device.cores)) != len(device.cores) or any(core < 0 for core in device.cores):
                raise PlatformError(f"platform {self.name}, device {device.name}: cores {list(device.cores)}")
        for link in self.links:
            for end in (link.source, link.destination):
                if end not in names:
                    raise PlatformError(f"platform {self.name}: a link names {end}, which is not a device")
            if not link.is_possible:
                raise PlatformError(
                    f"platform {self.name}, link {link.source} -> {link.destination}: "
                    "latency_s must not be negative and bandwidth_bytes_per_s must be positive "
                    f"(up to {LONGEST_S:g} s, from {SLOWEST_PER_S:g})"
                )
        if len({(link.source, link.destination) for link in self.links}) != len(self.links):
            raise PlatformError(f"platform {self.name}: two links join the same source and destination")
        modes = [mode.name for mode in self.power_modes]
        for mode in self.power_modes:
            if modes.count(mode.name) > 1:
                raise PlatformError(f"platform {self.name}: two power modes are called {mode.name}")

    @property
    def stand_ins(self) -> dict[str, str]:
        """The devices that are missing, by name, with the processors that compute in their place."""
        return {device.name: device.stand_in for device in self.devices if device.stand_in}

    def with_devices(self, chosen: str) -> Platform:
        """Return the platform with only some of its devices.

        Args:
            chosen: names or kinds (`Device.kind`) of devices, separated by commas, such as `cpu,gpu`; empty for all.

        Raises:
            OptionError: a word names no device.

        Examples:
            >>> box = Platform("box", (Device("cpu0", cores=(0,)), Device("cpu1", cores=(1,)), Device("card", "gpu")))
            >>> [device.name for device in box.with_devices("gpu,cpu1").devices]
            ['cpu1', 'card']
        """
        if not chosen:
            return self
        words = [word.strip() for word in chosen.split(",")]
        for word in words:
            if not any(word in (device.name, device.kind) for device in self.devices):
                has = ", ".join(dict.fromkeys(word for each in self.devices for word in (each.kind, each.name)))
                raise OptionError(
                    f"`device` {word}: {self.name} has no such device; it has {has}. `tvm-pipeline devices` lists what "
                    "was found and what is missing",
                    option="device",
                    value=word,
                )
        kept = tuple(device for device in self.devices if {device.name, device.kind} & set(words))
        names = {device.name for device in kept}
        links = tuple(link for link in self.links if {link.source, link.destination} <= names)
        return replace(self, devices=kept, links=links)

    def device(self, name: str) -> Device:
        """Return the device of that name; raise PlatformError where there is none."""
        for device in self.devices:
            if device.name == name:
                return device
        known = ", ".join(device.name for device in self.devices)
        raise PlatformError(f"{self.name} has no device {name}; it has {known}")


def find_link(links: Iterable[Link], source: str, destination: str) -> Link:
    """Return the link between two devices; it is free within one device and where no link is known."""
    if source != destination:
        for link in links:
            if (link.source, link.destination) == (source, destination):
                return link
    return Link(source, destination)


def disjoint_sets(devices: Iterable[Device]) -> Iterator[tuple[Device, ...]]:
    """Yield all maximal sets of devices that can work at the same time.

    Raises:
        PlatformError: they share cores in so many ways that there are more than MOST_SETS, each of which is searched.
    """
    return iter(_disjoint(tuple(devices)))


@lru_cache(maxsize=64)
def _disjoint(devices: tuple[Device, ...]) -> tuple[tuple[Device, ...], ...]:
    found: list[tuple[Device, ...]] = []
    steps = count()

    def extend(chosen: tuple[Device, ...], rest: tuple[Device, ...]) -> None:
        if next(steps) > _MOST_STEPS or len(found) > MOST_SETS:
            raise PlatformError(
                f"the {len(devices)} devices share cores in more ways than can be searched; leave devices out "
                "of the platform file"
            )
        if not rest:
            if all(any(d.overlaps(c) for c in chosen) for d in devices):
                found.append(chosen)
            return
        head, *tail = rest
        extend((*chosen, head), tuple(d for d in tail if not d.overlaps(head)))
        if any(head.overlaps(d) for d in tail):
            extend(chosen, tuple(tail))

    extend((), devices)
    return tuple(found)


_STAND_IN = (
    "whether a device is here is found out on the machine; leave it out, since a backend may have a target that asks "
    "for its stand-in"
)


class _PlatformFile(msgspec.Struct):
    name: str
    device: list[Device] = []
    link: list[Link] = []
    idle_w: float | None = None
    power_mode: list[PowerMode] = []


def read_platform(path: Path | str) -> Platform:
    """Read a platform from a TOML file. Raise PlatformError, which names the file and the mistake.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        ...     _ = file.write('name = "desk"\\n[[device]]\\nname = "cpu0"\\ncores = [0]\\n')
        ...     file.flush()
        ...     print(read_platform(file.name).devices[0].cores)
        (0,)
    """
    remedy = "`tvm-pipeline devices -o FILE` writes one"
    with blamed(path, PlatformError, remedy):
        file = TomlFile(path, PlatformError, remedy).convert(_PlatformFile, {"stand_in": _STAND_IN})
        return Platform(file.name, tuple(file.device), tuple(file.link), file.idle_w, tuple(file.power_mode))
