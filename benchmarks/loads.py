"""Load this machine as Table 5 of Velasco-Montero et al. (IEEE Access 2023) does, with real programs.

The paper's loads are a video player that shows an MP4 on a monitor (a), glmark2 (b), stress (c) and glxgears (d). Each
load here says what it stands for, and what it is on this machine: a substitute is named as one, and a load that cannot
run says why. A load has processes of its own, which the kernel places unless cores are given, and which end with the
block, or with the process that started them.

    with LOADS["stress"].prepared() as load:  # nothing is loaded yet
        load.start()
        ...

    python benchmarks/loads.py                          # what there is here
    python benchmarks/loads.py video --seconds 20
    python benchmarks/loads.py stress --cores 1
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tvm_pipeline.errors import PipelineError, PlatformError
from tvm_pipeline.files import cache_folder, replacing

PLAYED = (1920, 1080, 30, 90)  # width, height, frames a second, frames
CAME_S = WENT_S = 2.0
PR_SET_PDEATHSIG = 1

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Load:
    """A load of the machine.

    Attributes:
        stands_for: what it is in the paper.
        here: returns what it is on this machine; raises PlatformError where it cannot run.
        prepare: returns what loads, for ever, the cores that its process may use.
        on_gpu: whether it loads a GPU, where there is one.
    """

    name: str
    stands_for: str
    here: Callable[[], str]
    prepare: Callable[[], Work] | None
    on_gpu: bool = False

    def available(self) -> str:
        """Return why it cannot run here; empty if it can."""
        try:
            self.here()
        except PlatformError as reason:
            return str(reason)
        return ""

    @contextmanager
    def prepared(self, cores: Sequence[int] = ()) -> Iterator[Running]:
        """Yield the load, which `start` begins and the end of the block ends; its processes stay on `cores` if given.

        Raises PipelineError where its program ended by itself.
        """
        if self.prepare is None:
            yield Running(None)
            return
        command = [sys.executable, __file__, self.name, "--held", *(["--cores", *map(str, cores)] if cores else [])]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            if not ready:
                raise PipelineError(f"the load {self.name} could not be prepared; its error stands above")
            yield Running(process)
            if process.poll() is not None:
                raise PipelineError(f"the load {self.name} has ended by itself; its error stands above")
        finally:
            _end(process)


class Running:
    """A load whose program waits for its start."""

    def __init__(self, process: subprocess.Popen[str] | None) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        """The leader of the load's process group; None for no load."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Begin to load; it returns at once."""
        if self._process and self._process.stdin:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """End every process of the load."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


def _die_with_parent() -> None:
    """Let the kernel end this process, also after `exec`, when the thread that made it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _program(*command: str) -> Work:
    def work() -> NoReturn:
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.execvp(command[0], command)

    return work


def _on_each_core(work: Work) -> Work:
    """Return what does the work in one process for each core that this one may use."""

    def all_of_them() -> None:
        parent = os.getpid()
        for _ in range(len(os.sched_getaffinity(0)) - 1):
            if os.fork() == 0:
                _die_with_parent()
                if os.getppid() == parent:
                    work()
                os._exit(1)
        work()

    return all_of_them


def _has_display() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _installed(*programs: str) -> str:
    return next((program for program in programs if shutil.which(program)), "")


def _player() -> str:
    return _installed("mpv", "ffplay") if _has_display() else ""


def _video_here() -> str:
    width, height, fps, _ = PLAYED
    if player := _player():
        return f"{player} shows a generated H.264 file of {width}x{height} at {fps} frames a second"
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise PlatformError(
            "no player with a display, and PyAV is not installed: pip install 'tvm-pipeline[video]'"
        ) from error
    return (
        f"substitute: no display with mpv or ffplay, so PyAV decodes {width}x{height} H.264 on the CPU at {fps} frames "
        "a second, converts to RGB and scales to 1280x720"
    )


def _film() -> Path:
    """Return an H.264 file of a moving texture, which is made once."""
    import av

    width, height, fps, frames = PLAYED
    path = cache_folder() / "loads" / f"played-{width}x{height}-{fps}-{frames}.mp4"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(0).integers(0, 255, (height // 8, width // 8, 3), np.uint8)
    texture = np.kron(coarse, np.ones((8, 8, 1), np.uint8))
    with replacing(path) as unfinished, av.open(str(unfinished), "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=fps, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture = np.ascontiguousarray(np.roll(texture, (3 * number, 5 * number), (0, 1)))
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        file.mux(stream.encode(None))
    return path


def _video() -> Work:
    film, player = str(_film()), _player()
    if player == "mpv":
        return _program("mpv", "--really-quiet", "--no-audio", "--hwdec=auto", "--loop-file=inf", film)
    if player == "ffplay":
        return _program("ffplay", "-loglevel", "quiet", "-an", "-loop", "0", film)
    import av

    def play() -> None:
        due_s = time.monotonic()
        while True:
            with av.open(film) as file:
                stream = file.streams.video[0]
                stream.thread_type = "AUTO"  # as players do
                for frame in file.decode(stream):
                    frame.reformat(1280, 720, "rgb24").to_ndarray()
                    due_s = max(due_s + 1 / PLAYED[2], time.monotonic())
                    time.sleep(max(0.0, due_s - time.monotonic()))

    return play


def _display_gpu() -> str:
    return _installed("glmark2", "glxgears") if _has_display() else ""


def _gpu() -> tuple[str, bool, str]:
    """Return the target of TVM for this machine's GPU, whether it is a real one, and its name; raises PlatformError."""
    try:
        from tvm_pipeline_tvm.gpu.detection import survey
        from tvm_pipeline_tvm.gpu.targets import target_for
    except ImportError as error:
        raise PlatformError(f"the GPU backend cannot be used: {error}") from error
    found = survey().gpus
    real = [gpu for gpu in found if not gpu.is_software]
    if real:
        return target_for(real[0]), True, str(real[0])
    if found:
        return target_for(found[0]), False, str(found[0])
    raise PlatformError("no GPU, and no PoCL to stand in for one (Debian and Ubuntu: apt install pocl-opencl-icd)")


def _gpu_here() -> str:
    _, is_real, name = _gpu()
    if is_real and (program := _display_gpu()):
        return f"{program} on {name}"
    work = "a convolution (0.1 billion MACs) runs again and again by this project's GPU backend"
    if is_real:
        return f"substitute: no display with glmark2 or glxgears, so {work} on {name}"
    return f"substitute, and a load of the CPU: no GPU is here, so {work} on {name}"


def _gpu_work() -> Work:
    target, is_real, _ = _gpu()
    program = _display_gpu() if is_real else ""
    if program:
        return _program(program, *(["--run-forever"] if program == "glmark2" else []))
    from tvm import relay
    from tvm.relay.testing import create_workload

    from tests.support.networks import as_model
    from tvm_pipeline import Device, Platform, settle_platform

    data, weight = relay.var("data", shape=(1, 64, 56, 56)), relay.var("weight", shape=(64, 64, 3, 3))
    body = relay.nn.relu(relay.nn.conv2d(data, weight, padding=(1, 1)))
    network = relay.Function(relay.analysis.free_vars(body), body)
    backend, platform = settle_platform(Platform("load", (Device("gpu", "gpu", (), target),)))
    compiled = backend.compile(as_model("load", *create_workload(network)), platform.devices)
    runner = compiled.stage(compiled.graph.operator_names, platform.devices[0])
    runner.bind()
    inputs, outputs = [port.buffer() for port in runner.inputs], [port.buffer() for port in runner.outputs]
    runner.run(inputs, outputs)  # OpenCL compiles its kernels when they first run

    def compute() -> None:
        while True:
            runner.run(inputs, outputs)

    return compute


def _stress_here() -> str:
    if shutil.which("stress-ng"):
        return "stress-ng --cpu, a process for each core that it may use"
    return "substitute: stress-ng is not installed (apt install stress-ng), so a Python process computes on each core"


def _stress() -> Work:
    if shutil.which("stress-ng"):
        return _program("stress-ng", "--quiet", "--cpu", str(len(os.sched_getaffinity(0))))
    return _on_each_core(_compute)


def _compute() -> None:
    while True:
        sum(range(10_000))


def _stream() -> None:
    data = np.zeros(1 << 26, np.uint8)
    while True:
        data += 1


def _come_and_go() -> None:
    while True:
        end_s = time.monotonic() + CAME_S
        while time.monotonic() < end_s:
            sum(range(10_000))
        time.sleep(WENT_S)


LOADS = {
    load.name: load
    for load in (
        Load("nothing", "(0) no load", lambda: "nothing", None),
        Load("video", "(a) a video player shows an MP4 on a monitor, with hardware acceleration", _video_here, _video),
        Load("gpu", "(b) glmark2 and (d) glxgears, which load the GPU", _gpu_here, _gpu_work, on_gpu=True),
        Load("stress", "(c) stress, which loads the CPU", _stress_here, _stress),
        Load("memory", "no load of the paper", lambda: "one process streams 64 MiB", lambda: _stream),
        Load(
            "comes-and-goes",
            "no load of the paper",
            lambda: f"a process for each core computes for {CAME_S:g} s and sleeps for {WENT_S:g} s",
            lambda: _on_each_core(_come_and_go),
        ),
    )
}


def _hold(load: Load, cores: Sequence[int]) -> None:
    """Be the load's program: prepare, say so, wait for the start, load."""
    _die_with_parent()
    if cores:
        os.sched_setaffinity(0, cores)
    work = load.prepare() if load.prepare else lambda: None
    print("ready", flush=True)
    if sys.stdin.readline():
        work()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", nargs="?", choices=LOADS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--cores", type=int, nargs="+", default=[], help="what its processes may use; all if left out")
    parser.add_argument("--held", action="store_true", help="wait for a line on the standard input, then load for ever")
    arguments = parser.parse_args()
    if not arguments.load:
        for load in LOADS.values():
            here = f"not here: {load.available()}" if load.available() else load.here()
            print(f"{load.name}: stands for {load.stands_for}\n    {here}")
    elif arguments.held:
        _hold(LOADS[arguments.load], arguments.cores)
    else:
        with LOADS[arguments.load].prepared(arguments.cores) as load:
            load.start()
            time.sleep(arguments.seconds)


if __name__ == "__main__":
    main()
