"""How long the host operators of an application take on each CPU device, and for how long they hold Python's lock.

A device runs the whole application, on a stretch of the real source, in a real pipeline of one stage; so every operator
meets the caches as the model left them. The mean counts, not the median: frames differ (a key frame takes longer to
encode), and all of them pass the same device. Equal devices are measured in turns, and their samples count together.

The interpreter's lock is measured by a probe: a thread on another core that takes the lock and gives it back all the
time. While it has to wait, the operator holds the lock.

Read next: application.py, whose operators these are.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.runtime import Pipeline
from tvm_pipeline.runtime.host_work import Entry, HostFunction, HostWork
from tvm_pipeline.video.analysis import Decoder
from tvm_pipeline.video.application import Application, host_graph
from tvm_pipeline.video.kinds import open_source
from tvm_pipeline.video.preprocessing import Preprocessing
from tvm_pipeline.video.sources import Frame
from tvm_pipeline.video.video_file import VideoFile

SECONDS = 3.0  # of measuring, on all devices together
ROUNDS = 2
LEAST_FRAMES = 12  # of a device in a round
COLD_FRAMES = 2  # of each round; they do not count
# A live source is recorded, for its frames cannot be had again.
RECORDED_FRAMES, RECORDED_BYTES, RECORDED_S = 48, 256 << 20, 3.0
LOCK_FRAMES = 12
# The probe gets the lock within this time where nobody holds it.
PROBE_S = 20e-6
USUAL_FPS = 25.0  # of a video to write, where the source does not say

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class HostSetting:
    """All that the cost of the host operators depends on, apart from the machine.

    Attributes:
        width, height, codec, live: of the source.
        decoder: the name of the function that reads the outputs; empty without one.
        video: the extension of the video to write; empty without one.
    """

    width: int
    height: int
    codec: str
    live: bool
    decoder: str = ""
    video: str = ""

    def differences(self, other: HostSetting) -> str:
        """Return in words what differs, for messages; empty if nothing does."""
        names = {"width": "frame width", "height": "frame height", "video": "video to write", "live": "live source"}
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in HostSetting.__slots__)
        return ", ".join(f"{names.get(n, n)} {a or 'none'} instead of {b or 'none'}" for n, a, b in pairs if a != b)


class Rehearsal:
    """An application on a stretch of its source that can be run again and again, writing to a scratch file.

    A file is opened anew for each run, and again where it ends. A live source is recorded once; its frames then come
    from memory, and the seconds of reading are those of the recording.

    Args:
        spec: the source, as `open_source` takes it.
        decoder: the name of `decode`, as the user gave it.
        video: the name of the video that the application is to write; None without one.
    """

    def __init__(
        self,
        model: OperatorGraph,
        spec: str,
        preprocessing: Preprocessing,
        decode: Decoder | None = None,
        decoder: str = "",
        video: Path | None = None,
    ) -> None:
        self._model, self._spec, self._preprocessing, self._decode = model, spec, preprocessing, decode
        self._video = video
        self._recorded: list[tuple[Frame, float]] = []
        with open_source(spec) as source:
            self.fps = source.fps
            suffix = video.suffix.lower() if video else ""
            self.setting = HostSetting(source.width, source.height, source.codec, source.live, decoder, suffix)
            if source.live:
                self._recorded = list(_recorded(source))
        self.graph = host_graph(model, self.setting.width, self.setting.height, writes_video=video is not None)

    @contextmanager
    def host(self) -> Iterator[HostWork]:
        """Yield host work for one run; its source does not end while the block lasts."""
        with ExitStack() as stack:
            sink = None
            if self._video is not None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tvm-pipeline-")))
                sink = stack.enter_context(VideoFile(folder / f"scratch{self._video.suffix}", self.fps or USUAL_FPS))
            frames = stack.enter_context(self._frames())
            yield Application(self._model, self.graph, frames, self._preprocessing, self._decode, sink).host

    @contextmanager
    def _frames(self) -> Iterator[Iterator[Frame]]:
        closing = ExitStack()

        def repeated() -> Iterator[Frame]:
            while True:
                if self._recorded:
                    yield from (frame for frame, _ in self._recorded)
                else:
                    yield from closing.enter_context(open_source(self._spec))

        with closing:
            yield repeated()

    @property
    def recorded_read_s(self) -> float:
        """Return the mean seconds in which a recorded frame was read; 0 where the source is read anew."""
        return float(np.mean([seconds for _, seconds in self._recorded])) if self._recorded else 0.0


def _recorded(source: Any) -> Iterator[tuple[Frame, float]]:
    """Yield the next frames of a live source, and the seconds that the thread computed for each."""
    began_s, size = time.monotonic(), 0
    computed_s = time.thread_time()
    for count, frame in enumerate(source, 1):
        yield frame, time.thread_time() - computed_s
        size += frame.image.nbytes
        if count >= RECORDED_FRAMES or size >= RECORDED_BYTES or time.monotonic() - began_s > RECORDED_S:
            return
        computed_s = time.thread_time()


def profile_host(
    rehearsal: Rehearsal,
    compiled: CompiledModel,
    platform: Platform,
    profile: Profile,
    *,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Return the profile of the model with the host operators, measured on each CPU device of the platform.

    Args:
        profile: of the model on the same platform.
        seconds: of measuring, at least some frames on each device.
        progress: is told in a few words what is being measured.

    Raises:
        ProfileError: no device of the platform has cores of this machine that can run the whole model.
        PipelineError: the source broke, or the decoder failed.
    """
    devices = _measured_devices(platform, profile)
    if not devices:
        raise ProfileError(
            f"no device of platform {platform.name} is a CPU that runs the whole of {compiled.graph.name}, so host "
            "work cannot be measured with it; add a CPU device to the platform"
        )
    pooled: dict[str, Samples] = {}
    each_s = seconds / (ROUNDS * len(devices))
    for round_ in range(ROUNDS):
        for device in devices:
            progress(f"host work on {device.name}, round {round_ + 1} of {ROUNDS}")
            samples = pooled.setdefault(device.target, defaultdict(list))
            for name, found in _timed(rehearsal, compiled, platform, device, each_s).items():
                samples[name] += found
    progress("how long host work holds the interpreter's lock")
    lock_s = _lock_seconds(rehearsal, compiled, platform, devices[0])
    if rehearsal.recorded_read_s:
        for samples in pooled.values():
            samples["host/read"] = [seconds + rehearsal.recorded_read_s for seconds in samples["host/read"]]
    return _with_host(profile, rehearsal.graph, platform, pooled, lock_s)


def _measured_devices(platform: Platform, profile: Profile) -> list[Device]:
    """Return for each target the CPU devices with the fewest cores, which run the whole model."""
    able = [
        device
        for device in platform.devices
        if device.cores and device.name in profile.devices and None not in profile.devices[device.name].seconds.values()
    ]
    fewest = {d.target: min(len(o.cores) for o in able if o.target == d.target) for d in able}
    return [device for device in able if len(device.cores) == fewest[device.target]]


def _timed(
    rehearsal: Rehearsal, compiled: CompiledModel, platform: Platform, device: Device, seconds: float
) -> Samples:
    """Return the seconds of each host operator for each frame of a run on one device."""
    samples: Samples = defaultdict(list)

    def timed(name: str, function: HostFunction) -> HostFunction:
        def run(passage: Any, tensor: Callable[[str], Array]) -> Entry | None:
            began = time.perf_counter()
            entry = function(passage, tensor)
            samples[name].append(time.perf_counter() - began)
            return entry

        return run

    with rehearsal.host() as host:
        wrapped = {name: timed(name, function) for name, function in host.functions.items()}
        _run(replace(host, functions=wrapped), compiled, platform, device, LEAST_FRAMES + COLD_FRAMES, seconds)
    return {name: found[COLD_FRAMES:] for name, found in samples.items()}


def _run(
    host: HostWork, compiled: CompiledModel, platform: Platform, device: Device, frames: int, seconds: float = 0.0
) -> None:
    """Run the whole application on one device: at least so many frames, and for at least so long."""
    stage = Stage((device.name,), tuple(operator.name for operator in host.graph.operators))
    plan = Plan(host.graph.name, "by hand", "throughput", (stage,), Prediction())
    with Pipeline(compiled, plan, platform, in_flight=1, host=host) as pipeline:
        until_s, done = time.perf_counter() + seconds, 0
        while done < frames or time.perf_counter() < until_s:
            pipeline.submit({}, tag=new_passage())
            pipeline.result()
            done += 1


def new_passage() -> Any:
    """Return the tag of a frame for `Application.host`."""
    from tvm_pipeline.video.application import Passage

    return Passage()


def _lock_seconds(
    rehearsal: Rehearsal, compiled: CompiledModel, platform: Platform, device: Device
) -> dict[str, float]:
    """Return the mean seconds for which each host operator holds the interpreter's lock; none on a single core."""
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
        _run(replace(host, functions=wrapped), compiled, platform, device, LOCK_FRAMES + COLD_FRAMES)
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
        clock, sleep = time.perf_counter, time.sleep
        while not self._ended:
            began = clock()
            sleep(0)  # gives the lock, and takes it back
            ended = clock()
            if ended - began > PROBE_S:
                self.waits.append((began, ended))


def _with_host(
    profile: Profile, graph: OperatorGraph, platform: Platform, pooled: Mapping[str, Samples], lock_s: dict[str, float]
) -> Profile:
    """Return the profile with the host operators on the devices that have cores."""
    names = [operator.name for operator in graph.operators if operator.ordered]
    devices = {
        name: _device_with_host(device, names, pooled.get(platform.device(name).target))
        for name, device in profile.devices.items()
    }
    return replace(profile, fingerprint=graph.fingerprint, devices=devices, lock_s=lock_s)


def _device_with_host(device: DeviceProfile, names: Sequence[str], samples: Samples | None) -> DeviceProfile:
    """Return the figures of a device with those of the host operators; without samples it cannot run them."""
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
    return replace(
        device,
        seconds={**device.seconds, **(mean_s or dict.fromkeys(names))},
        spread={**device.spread, **spread} if device.spread else {},
        uncertainty={**device.uncertainty, **uncertainty} if device.uncertainty else {},
        joules=None if device.joules is None else {**device.joules, **nothing},
    )
