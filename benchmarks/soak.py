"""Run an hour of video with switches and failures, and check that nothing grows, leaks or gets lost.

    nice -n 5 python benchmarks/soak.py                          # an hour
    nice -n 5 python benchmarks/soak.py --minutes 10 --times 15  # 15 times as many changes and failures
    python benchmarks/soak.py --short                            # eight seconds of a tiny network, for CI: no memory

A video is played again and again at its rate, as a camera would send it (each time is a new connection), through the
policy `latest`, a resize and squeezenet on small pictures. Every few seconds another plan takes over; every 20 seconds
a device raises, is gone for a while, or hangs past its watchdog; once a second the metrics and the state are asked for.
What comes out is compared, bit for bit, with what the unsplit network makes of that picture of the video.

Memory is that of the command `tvm-pipeline`: one heap of malloc, and what ended plans freed goes back to the system.
`--untouched` leaves malloc as it is, to see what that does.

Required: resident memory grows by less than 1 % after the warm-up (the first sixth); the process has no more native
threads (TVM's pools among them) towards the end than after the warm-up; when all is closed, no more of Python's threads
and of descriptors than before; every frame that the source delivered comes out. The exit status is 1 if one does not
hold.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from resident import Resident, resident
from rich.console import Console
from rig import Answer, Breakable, Fault, random_plan, same, unsplit

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import Problem, detect_platform, load, profile_model, settle_platform
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.runtime import Adaptation, LivePipeline, freed_memory
from tvm_pipeline.workflow.steps import REPEATS
from tvm_pipeline_command import use_one_heap
from tvm_pipeline_video import (
    LiveSource,
    Reconnect,
    Source,
    VideoFile,
    open_source,
    parse_policy,
    preprocess,
    preprocessing_for,
    stream,
)
from tvm_pipeline_video.decoding import Picture
from tvm_pipeline_video.watch import LiveWatch, WatchServer

SIDE = 64
FPS = 30
PICTURES = 90  # of the video: three seconds, then it starts again
WATCHDOG_S = 3.0  # on a busy machine a frame may well take a second
COOL_DOWN_S = 0.5
SWITCH_S = 1.0, 5.0  # the least and the most between two changes of plan
FAULT_S = 20.0
SAMPLE_S = 10.0
MOST_GROWTH = 0.01
MOST_NEW_THREADS = 2  # more plans than ever before may be alive at one moment
CONSOLE = Console(width=150)


class Sample(NamedTuple):
    """The process at one moment: seconds since the start, resident bytes in all and by place, native threads."""

    time_s: float
    resident_bytes: int
    threads: int
    where: Resident


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def make_video(path: Path) -> None:
    with open_source(f"synthetic:320x240@{FPS}:{PICTURES}") as source, VideoFile(path, FPS) as video:
        for frame in source:
            video.write(frame.image)


def player(path: Path) -> Callable[[str], Source]:
    """Open the video as a live source: at its own rate, and from the start again where it ends."""

    def open_(spec: str) -> Source:
        def pictures() -> Iterator[Picture]:
            began_s = time.monotonic()
            with open_source(str(path)) as video:
                for frame in video:
                    time.sleep(max(0.0, began_s + frame.index / FPS - time.monotonic()))
                    yield Picture(frame.time_s, frame.image)

        return Source(spec, pictures(), fps=FPS, frames=None, limit=None, live=True)

    return open_


@dataclass
class Log:
    """What happened, and the samples of the process."""

    faults: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)
    frames: int = 0
    samples: list[Sample] = field(default_factory=list)
    given_back_s: list[float] = field(default_factory=list)  # CPU seconds of each time

    def time_giving_back(self) -> None:
        give_back = freed_memory.give_freed_memory_back

        def timed() -> bool:
            began_s = time.thread_time()
            done = give_back()
            self.given_back_s.append(time.thread_time() - began_s)
            return done

        freed_memory.give_freed_memory_back = timed


def disturb(
    live: LivePipeline, model: Breakable, url: str, log: Log, over: threading.Event, times: float, sample_s: float
) -> None:
    """Switch, break, query and measure until the run is over; `times` as often as usual."""
    draw = random.Random(0)
    faults = itertools.cycle(("raises", "vanishes", "hangs"))
    began_s = time.monotonic()
    switch_s, fault_s, scrape_s, sampled_s = draw.uniform(0, 1), FAULT_S / times / 2, 0.0, 0.0
    while not over.wait(0.02):
        now_s = time.monotonic() - began_s
        if now_s >= scrape_s:
            scrape_s = now_s + 1.0
            for path in ("metrics", "state"):
                urllib.request.urlopen(url + path).read()
        if now_s >= sampled_s:
            sampled_s = now_s + sample_s
            gc.collect()  # what waits for the collector is no leak: TVM makes cycles, a hundred at each change of plan
            log.samples.append(Sample(now_s, resident_bytes(), native_threads(), resident()))
        try:
            problem = live.problem
        except PlatformError:
            continue
        if now_s >= switch_s:
            switch_s = now_s + draw.uniform(*SWITCH_S) / times
            live.switch(random_plan(problem, draw), "for the benchmark")
        if now_s >= fault_s and len(problem.platform.devices) == len(live.given.platform.devices):
            fault_s = now_s + FAULT_S / times
            kind = next(faults)
            fault = Fault(kind, 2 * WATCHDOG_S if kind == "hangs" else draw.uniform(0.1, 2))
            model.faults.clear()
            model.faults[draw.choice(live.plan.devices)] = fault
            log.faults[kind] += fault.met.wait(1.0)


def soak(seconds: float, times: float, folder: Path, short: bool) -> bool:
    backend, platform = settle_platform(detect_platform())
    tiny = write_picture_net(folder / "net.onnx") if short else None
    network = load(tiny) if tiny else load("squeezenet", {"data": (1, 3, SIDE, SIDE)})
    whole = backend.compile(network, platform.devices)
    model = Breakable(whole)
    problem = Problem(whole.graph, platform, profile_model(backend, whole, platform, 4 if short else REPEATS))
    settings = preprocessing_for(whole.graph)
    make_video(folder / "video.mp4")
    with open_source(str(folder / "video.mp4")) as video:
        answers = unsplit(whole, platform.devices[0], [preprocess(frame.image, settings) for frame in video])
    gc.collect()  # executors of the profile
    before = threading.active_count(), descriptors()
    log, over = Log(), threading.Event()
    log.time_giving_back()
    live = LivePipeline(
        model,
        problem,
        random_plan(problem, random.Random(1)),
        adaptation=Adaptation(),
        watchdog_s=WATCHDOG_S,
        cool_down_s=COOL_DOWN_S,
    )
    source = LiveSource(
        "the video", parse_policy("latest"), open=player(folder / "video.mp4"), reconnect=Reconnect(0.01, 0.01)
    )
    with source, live, WatchServer(LiveWatch(live)) as server:
        sample_s = min(SAMPLE_S, seconds / 20)
        disturber = threading.Thread(
            target=disturb, args=(live, model, server.url, log, over, times, sample_s), name="disturber"
        )
        disturber.start()
        ending = threading.Timer(seconds, source.close)
        ending.start()
        try:
            watch(live, stream(live, source, settings), answers, log)
        finally:
            over.set()
            ending.cancel()
            disturber.join()
            ending.join()
    end_s = time.monotonic() + 3 * WATCHDOG_S
    while threading.active_count() > before[0] and time.monotonic() < end_s:
        time.sleep(0.1)  # what hung comes back and ends
    return judge(live, source, log, before, long=seconds >= 600, often=times > 1)


def watch(live: LivePipeline, results: Iterator, answers: list[Answer], log: Log) -> None:
    """Compare every result with the expected one, and print a line a minute."""
    minute_s = began_s = time.monotonic()
    for seen in results:
        log.frames += 1
        if not same(seen.result.outputs, answers[seen.frame.index % PICTURES]):
            log.mistakes.append(f"frame {seen.frame.index} of the video has other outputs than the unsplit network's")
        if time.monotonic() >= minute_s + 60:
            minute_s += 60
            CONSOLE.print(
                f"{(minute_s - began_s) / 60:.0f} min: {log.frames} frames, {live.version} plans, "
                f"faults {dict(log.faults)}, {resident_bytes() / 1e6:.1f} MB, {native_threads()} threads, "
                f"{descriptors()} descriptors",
                highlight=False,
            )


def judge(
    live: LivePipeline, source: LiveSource, log: Log, before: tuple[int, int], *, long: bool, often: bool
) -> bool:
    """Print the findings; return whether all requirements hold.

    Args:
        before: Python's threads and descriptors before the run.
        long: whether memory and native threads are judged.
        often: whether plans change so often that ever more of them may be alive at one moment: then threads are not.
    """
    gc.collect()
    counts, after = source.statistics(), (threading.active_count(), descriptors())
    lost = counts.delivered - log.frames
    unexplained = counts.read - counts.delivered - counts.waiting - sum(counts.dropped.values())
    settled = log.samples[len(log.samples) // 6 :]
    growth, new_threads = grown(settled)
    given_s = log.given_back_s or [0.0]
    kept = after[0] <= before[0] and after[1] <= before[1]
    steady = growth < MOST_GROWTH and (new_threads <= MOST_NEW_THREADS or often)
    holds = not (lost or log.mistakes or unexplained) and kept and (steady or not long)
    CONSOLE.print(
        f"{log.frames} frames, {live.version} plans, faults {dict(log.faults)}, reopened {counts.reconnects} times\n"
        f"lost {lost}, wrong {len(log.mistakes)}; of {counts.read} read, dropped {dict(counts.dropped)}, "
        f"unexplained {unexplained}\n"
        f"after the warm-up: resident memory {growth:+.2%}, from {settled[0].resident_bytes / 1e6:.1f} to "
        f"{settled[-1].resident_bytes / 1e6:.1f} MB, at most {max(s.resident_bytes for s in settled) / 1e6:.1f}; "
        f"native threads {new_threads:+d}, at most {max(s.threads for s in settled)}\n"
        f"after the warm-up: {settled[0].where}\nat the end:        {settled[-1].where}\n"
        f"memory was given back {len(log.given_back_s)} times, in {1e3 * statistics.median(given_s):.2f} ms "
        f"of CPU time (median), at most {1e3 * max(given_s):.2f}\n"
        f"before and after: {before[0]} and {after[0]} threads of Python, {before[1]} and {after[1]} descriptors\n"
        + ("all holds" if holds else "NOT ALL HOLDS")
        + ("" if long else "; too short to judge memory"),
        highlight=False,
    )
    for mistake in log.mistakes[:5]:
        CONSOLE.print(mistake)
    return holds


def grown(samples: Sequence[tuple[float, int, int]] | Sequence[Sample]) -> tuple[float, int]:
    """Return by what share memory grew, and by how many the threads; a sample is seconds, bytes, threads.

    Of memory the slope of Theil and Sen, which spikes do not move, times the seconds; of threads the fewest in the last
    third less the fewest in the first.
    """
    slope = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(samples, 2))
    share = slope * (samples[-1][0] - samples[0][0]) / statistics.median(sample[1] for sample in samples)
    third = len(samples) // 3
    return share, min(s[2] for s in samples[-third:]) - min(s[2] for s in samples[:third])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=1.0, help="how many times as often plans change and fail")
    parser.add_argument("--untouched", action="store_true", help="leave malloc as it is")
    parser.add_argument("--short", action="store_true", help="eight seconds of a tiny network, for CI")
    arguments = parser.parse_args()
    logging.getLogger("tvm_pipeline").setLevel(logging.ERROR)  # it would say each time that the video ended
    seconds, times = (8.0, 20.0) if arguments.short else (60 * arguments.minutes, arguments.times)
    if arguments.untouched:
        freed_memory.FreedMemory.look = lambda *_: None  # type: ignore[method-assign]
    else:
        use_one_heap()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if soak(seconds, times, Path(folder), arguments.short) else 1)


if __name__ == "__main__":
    main()
