"""How well objects keep their numbers over frames, whether zones and lines count them, and what following costs.

    python benchmarks/tracking.py            # 20 walks of a minute, a quarter of an hour of film: some seconds
    python benchmarks/tracking.py --short    # one walk of 100 frames: proves that it works

People walk straight through a picture of 1280 x 720, ten at a time, at 2 to 6 pixels a frame. A detector is played by
their true boxes with noise of 2 pixels, scores of 0.3 to 1, and one box in ten missing. What is true is known: who each
box is of, and how often the middle of the picture is crossed.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import numpy as np
from rich.console import Console

from tvm_pipeline_video import Annotation, Frame, Trackers, Tracking
from tvm_pipeline_video.tracking import Line

WIDTH, HEIGHT, FPS, PEOPLE = 1280, 720, 25.0, 10
IMAGE = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
DOOR = Line(name="door", start=(0.5, 0.0), end=(0.5, 1.0))


def walk(seed: int, frames: int) -> tuple[Counter[str], list[float]]:
    """Return the counts of one film, and the seconds that following takes for each frame."""
    random = np.random.default_rng(seed)
    trackers = Trackers(Tracking(line=[DOOR], appears_after=0.2))
    people: list[tuple[int, np.ndarray, np.ndarray]] = []  # who, where the feet are, and the step
    number_of: dict[int, int] = {}
    counts: Counter[str] = Counter()
    seconds, names = [], 0
    for index in range(frames):
        while len(people) < PEOPLE:
            side, speed = random.integers(2), random.uniform(2, 6)
            feet = np.array([40.0 if side == 0 else WIDTH - 40.0, random.uniform(150, HEIGHT)])
            people.append((names, feet, np.array([speed if side == 0 else -speed, random.uniform(-0.3, 0.3)])))
            names += 1
        found, whose = [], []
        for who, feet, step in people:
            counts["crossings"] += int((feet[0] < WIDTH / 2) != (feet[0] + step[0] < WIDTH / 2))
            feet += step
            if random.random() < 0.9:
                x, y = feet + random.normal(0, 2, 2)
                box = (float(x - 25), float(y - 120), float(x + 25), float(y))
                found.append(Annotation("person", float(random.uniform(0.3, 1.0)), box))
                whose.append(who)
        people = [one for one in people if -30 < one[1][0] < WIDTH + 30]
        began_s = time.perf_counter()
        followed, events = trackers(Frame(index, index / FPS, IMAGE, "street"), found)
        seconds.append(time.perf_counter() - began_s)
        counts["told"] += sum(event.kind == "crosses" for event in events)
        for who, annotation in zip(whose, followed, strict=True):
            if annotation.track is not None:
                counts["boxes"] += 1
                counts["switches"] += number_of.get(who, annotation.track) != annotation.track
                number_of[who] = annotation.track
    return counts, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one walk of 100 frames: proves that it works")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    seconds: list[float] = []
    for seed in range(1 if options.short else 20):
        found, taken_s = walk(seed, 100 if options.short else 1500)
        counts += found
        seconds += taken_s
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    console = Console(width=150)
    console.print(f"{counts['boxes']} boxes with a number, {counts['switches']} of them with another than before")
    console.print(f"{counts['crossings']} crossings, {counts['told']} told")
    console.print(f"a frame with {PEOPLE} people: {p50:.2f} ms p50, {p99:.2f} p99")


if __name__ == "__main__":
    main()
