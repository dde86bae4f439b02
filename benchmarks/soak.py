"""Run an hour of video with switches and failures, and check that nothing grows, leaks or gets lost.

    nice -n 5 python benchmarks/soak.py   # an hour
    python benchmarks/soak.py --short     # ten seconds, for CI: memory is not judged

A video is played again and again at its rate, as a camera would send it (each time is a new connection), through the
policy `latest`, a resize and squeezenet on small pictures. Every few seconds another plan takes over; every 20 seconds
a device raises, is gone for a while, or hangs past its watchdog; once a second the metrics and the state are asked for.
What comes out is compared, bit for bit, with what the unsplit network makes of that picture of the video.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rig import Answer, Breakable, Fault, random_plan, same, unsplit

from tvm_pipeline import Problem, detect_platform, load, profile_model, settle_platform
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.runtime import Adaptation, LivePipeline
from tvm_pipeline.video import (
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
from tvm_pipeline.video.decoding import Picture
from tvm_pipeline.watch import LiveWatch, WatchServer

SIDE = 64
FPS = 30
PICTURES = 90  # of the video: three seconds, then it starts again
WATCHDOG_S = 3.0  # on a busy machine a frame may well take a second
COOL_DOWN_S = 0.5
SAMPLE_S = 10.0
MOST_GROWTH = 0.01
MOST_NEW_THREADS = 2  # more plans than ever before may be alive at one moment
CONSOLE = Console(width=150)


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
    """The events, and every `SAMPLE_S`: seconds since the start, resident bytes, native threads."""

    faults: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)
    frames: int = 0
    samples: list[tuple[float, int, int]] = field(default_factory=list)


def disturb(
    live: LivePipeline, model: Breakable, url: str, log: Log, over: threading.Event, every_s: float, sample_s: float
) -> None:
    """Switch, break, query and measure until the run is over."""
    draw = random.Random(0)
    faults = itertools.cycle(("raises", "vanishes", "hangs"))
    began_s = time.monotonic()
    switch_s, fault_s, scrape_s, sampled_s = draw.uniform(0, 1), every_s / 2, 0.0, 0.0
    while not over.wait(0.05):
        now_s = time.monotonic() - began_s
        if now_s >= scrape_s:
            scrape_s = now_s + 1.0
            for path in ("metrics", "state"):
                urllib.request.urlopen(url + path).read()
        if now_s >= sampled_s:
            sampled_s = now_s + sample_s
            gc.collect()  # what waits for the collector is no leak: TVM makes cycles, a hundred at each change of plan
            log.samples.append((now_s, resident_bytes(), native_threads()))
        try:
            problem = live.problem
        except PlatformError:
            continue
        if now_s >= switch_s:
            switch_s = now_s + draw.uniform(1, 5)
            live.switch(random_plan(problem, draw), "for the benchmark")
        if now_s >= fault_s and len(problem.platform.devices) == len(live.given.platform.devices):
            fault_s = now_s + every_s
            kind = next(faults)
            fault = Fault(kind, 2 * WATCHDOG_S if kind == "hangs" else draw.uniform(0.1, 2))
            model.faults.clear()
            model.faults[draw.choice(live.plan.devices)] = fault
            log.faults[kind] += fault.met.wait(1.0)


def soak(seconds: float, every_s: float, folder: Path) -> bool:
    backend, platform = settle_platform(detect_platform())
    whole = backend.compile(load("squeezenet", {"data": (1, 3, SIDE, SIDE)}), platform.devices, lambda _: None)
    model = Breakable(whole)
    problem = Problem(whole.graph, platform, profile_model(backend, whole, platform))
    settings = preprocessing_for(whole.graph)
    make_video(folder / "video.mp4")
    with open_source(str(folder / "video.mp4")) as video:
        answers = unsplit(whole, platform.devices[0], [preprocess(frame.image, settings) for frame in video])
    gc.collect()  # executors of the profile
    before = threading.active_count(), descriptors()
    log, over = Log(), threading.Event()
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
            target=disturb, args=(live, model, server.url, log, over, every_s, sample_s), name="disturber"
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
    return judge(live, source, log, before, seconds >= 600)


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


def judge(live: LivePipeline, source: LiveSource, log: Log, before: tuple[int, int], long: bool) -> bool:
    """Print the findings; return whether all requirements hold."""
    gc.collect()
    counts, after = source.statistics(), (threading.active_count(), descriptors())
    lost = counts.delivered - log.frames
    unexplained = counts.read - counts.delivered - counts.waiting - sum(counts.dropped.values())
    settled = log.samples[len(log.samples) // 6 :]
    growth, new_threads = grown(settled)
    CONSOLE.print(
        f"{log.frames} frames, {live.version} plans, faults {dict(log.faults)}, reopened {counts.reconnects} times\n"
        f"lost {lost}, wrong {len(log.mistakes)}; of {counts.read} read, dropped {dict(counts.dropped)}, "
        f"unexplained {unexplained}\n"
        f"after the warm-up: resident memory {growth:+.2%}, at most {max(s[1] for s in settled) / 1e6:.1f} MB; "
        f"native threads {new_threads:+d}, at most {max(s[2] for s in settled)}\n"
        f"before and after: {before[0]} and {after[0]} threads of Python, {before[1]} and {after[1]} descriptors",
        highlight=False,
    )
    for mistake in log.mistakes[:5]:
        CONSOLE.print(mistake)
    kept = after[0] <= before[0] and after[1] <= before[1]
    steady = growth < MOST_GROWTH and new_threads <= MOST_NEW_THREADS
    return not (lost or log.mistakes or unexplained) and kept and (steady or not long)


def grown(samples: list[tuple[float, int, int]]) -> tuple[float, int]:
    """Return by what share memory grew, and by how many the threads.

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
    parser.add_argument("--short", action="store_true", help="ten seconds, for CI")
    arguments = parser.parse_args()
    logging.getLogger("tvm_pipeline").setLevel(logging.ERROR)  # it would say each time that the video ended
    seconds, every_s = (8.0, 2.0) if arguments.short else (60 * arguments.minutes, 20.0)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if soak(seconds, every_s, Path(folder)) else 1)


if __name__ == "__main__":
    main()
