"""Cameras, which are not here: iterators behind a source's `open` that film, hang or die.

`explained` looks at the books of a live source.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from tvm_pipeline_video import LiveFrame, LiveSource, Reconnect, Source, parse_policy
from tvm_pipeline_video.decoding import Picture
from tvm_pipeline_video.errors import VideoError

QUICK = Reconnect(0.01, 0.05)
Film = Callable[[], Iterator[Picture]]


def picture(number: int, size: tuple[int, int] = (8, 6)) -> Picture:
    return Picture(number / 100, np.full((size[1], size[0], 3), number % 256, np.uint8))


def film(frames: int | None = None, period_s: float = 0.0, error: str = "", number: int = 0) -> Film:
    """A connection of so many frames; its pictures count up from `number`, and an error may end it."""

    def pictures() -> Iterator[Picture]:
        for index in itertools.count() if frames is None else range(frames):
            time.sleep(period_s)
            yield picture(number + index)._replace(time_s=index / 100)
        if error:
            raise VideoError(error)

    return pictures


@contextmanager
def hanging_after(frames: int) -> Iterator[Film]:
    """A camera that does not answer any more after some frames, until the test is over."""
    over = threading.Event()

    def pictures() -> Iterator[Picture]:
        yield from film(frames)()
        over.wait(60)
        yield picture(99)  # too late

    try:
        yield pictures
    finally:
        over.set()


def camera(*connections: Film) -> Callable[[str], Source]:
    """What each opening in turn gives; afterwards it is unplugged."""
    following = iter(connections)

    def open_(spec: str) -> Source:
        pictures = next(following, None)
        if pictures is None:
            raise VideoError(f"there is no camera {spec}")
        return Source(spec, pictures(), fps=None, frames=None, limit=None, live=True)

    return open_


def live(*connections: Film, policy: str = "block", **options: object) -> LiveSource:
    options = {"reconnect": QUICK, "spec": "cam", **options}
    return LiveSource(policy=parse_policy(policy), open=camera(*connections), **options)  # type: ignore[arg-type]


def numbers(frames: list[LiveFrame]) -> list[int]:
    return [int(frame.image[0, 0, 0]) for frame in frames]


def explained(source: LiveSource) -> Counter[str]:
    """The drops by reason, after a look at the books: every frame read is accounted for."""
    counts = source.statistics()
    assert counts.read == counts.delivered + counts.waiting + sum(counts.dropped.values())
    return Counter(counts.dropped)
