"""How long the host operators of an application take on each CPU device, and for how long they hold Python's lock.

A device runs the whole application, on a stretch of the real source, in a real pipeline of one stage; so every operator
meets the caches as the model left them. The mean counts, not the median: frames differ (a key frame takes longer to
encode), and all of them pass the same device. Equal devices are measured one after the
other, and each begins at other places of a file. The samples of equal devices count together.

The interpreter's lock is measured by a probe: a thread on another core that takes the lock and gives it back all the
time. While it has to wait, the operator holds the lock.

Read next: application.py, whose operators these are.
"""

from __future__ import annotations

import logging
import math
import os
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline import Device, DeviceProfile, OperatorGraph, Pipeline, Plan, Platform, Prediction, Profile, Stage
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.errors import PipelineTimeoutError, ProfileError
from tvm_pipeline.runtime.host_work import Entry, HostFunction, HostWork
from tvm_pipeline_video.application import READ, Payload, host_errors
from tvm_pipeline_video.rehearsals import Rehearsal
from tvm_pipeline_video.sources import Frame

_log = logging.getLogger(__name__)

SECONDS = 3.0  # of measuring, on all devices together
ROUNDS = 2
LEAST_FRAMES = 12  # of a device in a round
COLD_FRAMES = 2  # of each round; they do not count
STANDARD_ERROR = 0.01  # of the seconds of a frame, relative; a round with less ends early
LOCK_FRAMES = 12
# The probe gets the lock within this time where nobody holds it.
PROBE_S = 20e-6
PATIENCE_S = 60.0  # for one frame, before what hangs counts as failed
LOOK_S = 0.5  # between two looks at that

Samples = dict[str, list[float]]
Figure = TypeVar("Figure")


def profile_host(
    rehearsal: Rehearsal, compiled: CompiledModel, platform: Platform, profile: Profile, *, seconds: float = SECONDS
) -> Profile:
    """Return the profile of the model with the host operators, measured on each CPU device of the platform.

    Args:
        profile: of the model on the same platform; host operators of another application in it are left out.
        seconds: of measuring, at least some frames on each device.

    Raises:
        ProfileError: no device of the platform has cores of this machine that can run the whole model.
        PipelineError: the source broke, or the decoder failed.
    """
    profile = _of_model(profile, compiled.graph)
    devices = host_devices(platform, profile)
    if not devices:
        raise ProfileError(
            f"no device of platform {platform.name} is a CPU that runs the whole of {compiled.graph.name}, so host "
            "work cannot be measured with it; add a CPU device to the platform"
        )
    pooled: dict[str, Samples] = {}
    each_s = seconds / (ROUNDS * len(devices))
    for round_ in range(ROUNDS):
        for device in devices:
            _log.info(f"host work on {device.name}, round {round_ + 1} of {ROUNDS}")
            samples = pooled.setdefault(device.target, defaultdict(list))
            equal = [other for other in devices if other.target == device.target]
            start = (round_ + equal.index(device) / len(equal)) / ROUNDS
            for name, found in _timed(rehearsal, compiled, platform, device, each_s, start).items():
                samples[name] += found
    _log.info("how long host work holds the interpreter's lock")
    lock_s = _lock_seconds(rehearsal, compiled, platform, devices[0])
    if rehearsal.recorded_read_s:
        for samples in pooled.values():
            samples[READ] = [seconds + rehearsal.recorded_read_s for seconds in samples[READ]]
    batch = rehearsal.graph.batch  # a profile has the seconds of calls
    for samples in pooled.values():
        samples |= {name: [batch * seconds for seconds in found] for name, found in samples.items()}
    lock_s = {name: batch * seconds for name, seconds in lock_s.items()}
    return _with_host(profile, rehearsal.graph, platform, pooled, lock_s)


def host_devices(platform: Platform, profile: Profile) -> list[Device]:
    """Return the CPU devices on which host work is measured: for each target those with the fewest cores.

    They run the whole model, since an application is measured in one stage.
    """
    able = [
        device
        for device in platform.devices
        if device.cores and device.name in profile.devices and None not in profile.devices[device.name].seconds.values()
    ]
    fewest = {d.target: min(len(o.cores) for o in able if o.target == d.target) for d in able}
    return [device for device in able if len(device.cores) == fewest[device.target]]


def _timed(
    rehearsal: Rehearsal, compiled: CompiledModel, platform: Platform, device: Device, most_s: float, start: float
) -> Samples:
    """Return the seconds of each host operator for each frame of a run on one device, from `start` of the file on."""
    samples: Samples = defaultdict(list)

    def timed(name: str, function: HostFunction) -> HostFunction:
        def run(passage: Any, tensor: Callable[[str], Array]) -> Entry | None:
            began = time.perf_counter()
            entry = function(passage, tensor)
            samples[name].append(time.perf_counter() - began)
            return entry

        return run

    until_s = time.perf_counter() + most_s

    def is_known() -> bool:
        if len(samples[READ]) < COLD_FRAMES + LEAST_FRAMES:
            return False
        frames_s = np.sum(list(samples.values()), axis=0)[COLD_FRAMES:]
        error_s = frames_s.std() / math.sqrt(len(frames_s))
        return bool(error_s < STANDARD_ERROR * frames_s.mean()) or time.perf_counter() > until_s

    with rehearsal.host(start=start) as host:
        wrapped = {name: timed(name, function) for name, function in host.functions.items()}
        _run(replace(host, functions=wrapped), compiled, platform, device, is_known)
    return {name: found[COLD_FRAMES:] for name, found in samples.items()}


def _run(
    host: HostWork, compiled: CompiledModel, platform: Platform, device: Device, is_enough: Callable[[], bool]
) -> None:
    """Run the whole application on one device, frame by frame, until it is enough."""
    stage = Stage((device.name,), tuple(host.graph.operator_names))
    plan = Plan(host.graph.name, "by hand", "throughput", (stage,), Prediction())
    with host_errors(), Pipeline(compiled, plan, platform, in_flight=1, host=host) as pipeline:
        while not is_enough():
            pipeline.submit({}, tag=Payload[Frame]())
            until_s = time.monotonic() + PATIENCE_S
            while True:
                try:
                    pipeline.result(LOOK_S)
                except PipelineTimeoutError:
                    if time.monotonic() > until_s:
                        pipeline.overdue(PATIENCE_S)  # of what hangs, the error comes from `result`
                else:
                    break


def _lock_seconds(
    rehearsal: Rehearsal, compiled: CompiledModel, platform: Platform, device: Device
) -> dict[str, float]:
    """Return the seconds for which each host operator holds the interpreter's lock; none on a single core."""
    others = sorted(os.sched_getaffinity(0) - set(device.cores))
    if not others:
        return {}
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def marked(name: str, function: HostFunction) -> HostFunction:
        def run(passage: Any, tensor: Callable[[str], Array]) -> Entry | None:
            began = time.perf_counter()
            try:
                return function(passage, tensor)
            finally:
                spans[name].append((began, time.perf_counter()))

        return run

    with rehearsal.host() as host, _LockProbe(others[:1]) as probe:
        wrapped = {name: marked(name, function) for name, function in host.functions.items()}
        counted = iter(range(COLD_FRAMES + LOCK_FRAMES))
        _run(replace(host, functions=wrapped), compiled, platform, device, lambda: next(counted, None) is None)
    waits = np.array(probe.waits).reshape(-1, 2)
    return {
        name: float(np.mean([_overlap_s(waits, *span) for span in found[COLD_FRAMES:]]))
        for name, found in spans.items()
    }


def _overlap_s(waits: NDArray[np.float64], began: float, ended: float) -> float:
    """Return for how long of a span the probe waited."""
    return float(np.clip(np.minimum(waits[:, 1], ended) - np.maximum(waits[:, 0], began), 0, None).sum())


class _LockProbe:
    """A thread on other cores that takes the interpreter's lock and gives it back, and notes when it had to wait.

    While it lasts, no thread is made to give the lock to another, so that one that needs it for long keeps it.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self.waits: list[tuple[float, float]] = []
        self._cores = cores
        self._ended = False
        self._thread = threading.Thread(target=self._probe, name="lock probe", daemon=True)

    def __enter__(self) -> _LockProbe:
        self._interval_s = sys.getswitchinterval()
        sys.setswitchinterval(60.0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        sys.setswitchinterval(self._interval_s)
        self._thread.join()

    def _probe(self) -> None:
        os.sched_setaffinity(0, self._cores)
        clock, give = time.perf_counter, select.select
        while not self._ended:
            began = clock()
            give([], [], [], 0)  # gives the lock, and takes it back
            ended = clock()
            if ended - began > PROBE_S:
                self.waits.append((began, ended))


def _of_model(profile: Profile, graph: OperatorGraph) -> Profile:
    """Return the profile with the model's operators alone."""

    def kept(figures: Mapping[str, Figure]) -> dict[str, Figure]:
        return {name: figure for name, figure in figures.items() if name in graph.edges.index}

    devices = {
        name: replace(
            device,
            seconds=kept(device.seconds),
            spread=kept(device.spread),
            uncertainty=kept(device.uncertainty),
            joules=None if device.joules is None else kept(device.joules),
            joules_uncertainty=kept(device.joules_uncertainty),
        )
        for name, device in profile.devices.items()
    }
    return replace(profile, fingerprint=graph.fingerprint, devices=devices, lock_s={})


def _with_host(
    profile: Profile, graph: OperatorGraph, platform: Platform, pooled: Mapping[str, Samples], lock_s: dict[str, float]
) -> Profile:
    """Return the profile with the host operators on the devices that have cores."""
    names = [operator.name for operator in graph.operators if operator.is_host]
    targets = {device.name: device.target for device in platform.devices if device.cores}
    devices = {
        name: _device_with_host(device, names, pooled.get(targets[name]) if name in targets else None)
        for name, device in profile.devices.items()
    }
    return replace(profile, fingerprint=graph.fingerprint, devices=devices, lock_s=lock_s)


def _device_with_host(device: DeviceProfile, names: Sequence[str], samples: Samples | None) -> DeviceProfile:
    """Return the figures of a device with those of the host operators; without samples it cannot run them.

    Where the joules of the model were measured, those of host operators are their seconds times the mean power of it.
    """
    nothing = dict.fromkeys(names, 0.0)
    spread, uncertainty, mean_s = nothing, nothing, None
    if samples is not None:
        rows = {name: np.array(samples[name]) for name in names}
        mean_s = {name: float(row.mean()) for name, row in rows.items()}
        quartiles = {name: np.quantile(row, [0.25, 0.5, 0.75]) for name, row in rows.items()}
        spread = {name: float((high - low) / max(middle, 1e-12)) for name, (low, middle, high) in quartiles.items()}
        # 95 % of the means of so many samples lie within 1.96 standard errors.
        error_s = {name: 1.96 * float(row.std()) / math.sqrt(len(row)) for name, row in rows.items()}
        uncertainty = {name: error_s[name] / max(mean_s[name], 1e-12) for name in names}
    joules, doubt = None, {}
    if device.joules is not None:
        mean_w = math.fsum(device.joules.values()) / max(device.whole_s, 1e-12)
        joules = {**device.joules, **{name: mean_w * (mean_s or nothing)[name] for name in names}}
        doubt = {**device.joules_uncertainty, **nothing} if device.joules_uncertainty else {}
    return replace(
        device,
        seconds={**device.seconds, **(mean_s or dict.fromkeys(names))},
        spread={**device.spread, **spread} if device.spread else {},
        uncertainty={**device.uncertainty, **uncertainty} if device.uncertainty else {},
        joules=joules,
        joules_uncertainty=doubt,
    )
