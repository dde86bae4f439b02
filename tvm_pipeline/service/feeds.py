"""Where the frames of a run come from, and how far each source got, so that a run can go on where one ended.

A run begins again when its settings are read anew, and after its process died. A camera is then opened again; a file
goes on at the frame after the last one whose result came out. Read next: running.py, which counts those frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.service.common import video_room
from tvm_pipeline.service.records import last_line

DECODING_FPS = 10.0  # slower than any file is decoded, to know how long skipping frames may take


class Progress:
    """Per model and source: the frame to go on at, and how many results came out.

    Two integers each; in memory, or in a folder as files that outlive a process which is killed between two frames.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.last: dict[str, Any] = {}  # the last line of the results, which may be ahead by one frame
        self._counts: dict[tuple[str, str], NDArray[np.int64]] = {}

    def of(self, model: str, source: str, every: int = 1) -> NDArray[np.int64]:
        """[next frame, results], to be written to; `every` frames stand between two."""
        key = model, source
        if key not in self._counts:
            self._counts[key] = np.zeros(2, np.int64) if self._folder is None else self._mapped(self._folder, key)
        counts, last = self._counts[key], self.last
        if (last.get("model", ""), last.get("source")) == key and last["frame"] >= counts[0]:
            counts[:] = last["frame"] + every, counts[1] + 1
        return counts

    def recall(self, results: Path) -> None:
        """Takes what was written as the truth: a process may have died after it wrote a line and before it counted."""
        if self._folder is None:
            return
        began = self.of("", str(results))  # 1 + how long the file was when this run first saw it
        if not began[0]:
            began[0] = 1 + (results.stat().st_size if results.is_file() else 0)
        elif results.is_file():
            self.last = last_line(results, int(began[0]) - 1)

    def _mapped(self, folder: Path, key: tuple[str, str]) -> NDArray[np.int64]:
        path = folder / hashlib.sha256("\n".join(key).encode()).hexdigest()[:32]
        return np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=(2,))

    @property
    def begun(self) -> bool:
        """Whether any result came out, of this process or one before it."""
        mapped = [np.fromfile(path, np.int64) for path in self._folder.iterdir()] if self._folder else []
        return any(counts[1] for counts in (*mapped, *self._counts.values()))


@dataclass(frozen=True, slots=True)
class Sources:
    """What feeds one model: one source as it is, or several that live; `damaged` counts undecodable pieces."""

    name: str
    fps: float | None
    frames: Iterable[Any]
    damaged: Callable[[], int]
    live: tuple[Any, ...] = ()
    progress: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    every: dict[str, int] = field(default_factory=dict)

    def summary(self) -> dict[str, dict[str, Any]]:
        """What became of the frames of each source that lives."""
        return {source.name: asdict(source.statistics()) for source in self.live}

    def close(self) -> None:
        """Ends those that live, which might wait long for a frame."""
        for source in self.live:
            source.close()

    def done(self, frame: Any) -> None:
        """Its result came out, and is written."""
        counts = self.progress[frame.source]
        counts[:] = frame.index + self.every.get(frame.source, 1), counts[1] + 1


def is_live(spec: str) -> bool:
    """Return whether a source films by itself, so that a frame that waits grows old."""
    return bool(video_room().source_kind(spec).live)


@contextmanager
def opened_sources(
    video: Any,
    specs: Sequence[str],
    policies: Sequence[str | None],
    stall_s: float,
    limit: int | None,
    progress: Callable[[str, int], NDArray[np.int64]],
) -> Iterator[Sources]:
    """With a policy, or where it lives or is one of several, a source is read ahead; else it is read as it comes."""
    with ExitStack() as stack:
        if len(specs) == 1 and policies[0] is None and not is_live(specs[0]):
            only = stack.enter_context(video.open_source(specs[0]))
            counts = progress(only.name, 1)
            _skip(only, int(counts[0]))
            frames = islice(only, _left(limit, counts))
            yield Sources(only.name, only.fps, frames, lambda: int(only.damaged), progress={only.name: counts})
            return
        live, counted, every = [], {}, {}
        for spec, text in zip(specs, policies, strict=True):
            policy = video.parse_policy(text or ("latest" if is_live(spec) else "block"))
            name = video.decoding.without_password(spec)
            counted[name], every[name] = progress(name, policy.every), policy.every
            skipped = int(counted[name][0])
            patience_s = stall_s if is_live(spec) else stall_s + skipped / DECODING_FPS
            opening = partial(_opened_at, video, skipped, 0.8 * stall_s) if skipped else None
            source = video.LiveSource(spec, policy, open=opening, stall_s=patience_s, first_index=skipped)
            live.append(stack.enter_context(source))
        yield Sources(
            ", ".join(source.name for source in live),
            live[0].fps,
            islice(video.merge(live), _left(limit, *counted.values())),
            lambda: sum(source.statistics().damaged for source in live),
            tuple(live),
            counted,
            every,
        )


def _left(limit: int | None, *counts: NDArray[np.int64]) -> int | None:
    return None if limit is None else max(0, limit - sum(int(count[1]) for count in counts))


def _opened_at(video: Any, frames: int, timeout_s: float, spec: str) -> Any:
    source = video.open_source(spec, timeout_s=timeout_s)
    _skip(source, frames)
    return source


def _skip(source: Any, frames: int) -> None:
    """Leaves out the first frames of what begins anew; a camera goes on by itself."""
    if not source.live:
        for _ in islice(source, frames):
            pass
