"""What is counted of a duty: lines, their rate, the longest gap between two, and what was lost by reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

HOST_LOST = "host lost"
LATE = "late"
RATE_OVER = 5  # seconds over which lines make a rate
_EPOCHS = 8  # of which is known what they dropped


class DutyCounts:
    """Counters of one duty over all its epochs; none of them ever falls.

    Attributes:
        lines: that were taken.
        last_s: when the last one was, by the coordinator's clock.
        lost: reason -> frames.
    """

    __slots__ = ("_dropped", "_heard", "_kept", "_lost_s", "_samples", "last_s", "lines", "longest_gap_s", "lost")

    def __init__(self) -> None:
        self.lines = 0
        self.last_s: float | None = None
        self.longest_gap_s = 0.0
        self.lost: dict[str, int] = {}
        self._lost_s: float | None = None
        self._kept = 0  # lines since then that are of the time before or during the loss
        self._dropped: dict[int, Mapping[str, int]] = {}
        self._heard: dict[int, int] = {}  # epoch -> the last frame of which is known what became of it
        self._samples: deque[tuple[float, int]] = deque(maxlen=RATE_OVER + 1)

    def took(self, epoch: int, frame: int, lines: int, now_s: float, rate_fps: float | None) -> None:
        """Count lines of an epoch that came together, up to this frame.

        The first ones of another epoch after a loss tell how many frames it has cost; those of the same epoch, which
        the host had kept, are not among them.
        """
        goes_on = epoch in self._heard
        self._hear(epoch, frame)
        if self._lost_s is not None and goes_on:
            self._kept += lines
        elif self._lost_s is not None:
            self._count(HOST_LOST, self._unseen(now_s, rate_fps))
            self.host_back()
        if self.last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.lines += lines
        self.last_s = now_s

    def late(self, epoch: int, frame: int) -> None:
        """Count a line of an epoch that is not accepted, unless it is sent again or was taken before."""
        if frame > self._heard.get(epoch, -1):
            self._hear(epoch, frame)
            self._count(LATE, 1)

    def dropped(self, epoch: int, dropped: Mapping[str, int]) -> None:
        """Hear what the service has dropped in this epoch so far; a service that began again counts from 0."""
        before = self._dropped.get(epoch)
        if dropped == before:
            return
        for reason, frames in dropped.items():
            known = before.get(reason, 0) if before else 0
            self._count(reason, frames - known if frames >= known else frames)
        self._dropped[epoch] = dropped
        if len(self._dropped) > _EPOCHS:
            del self._dropped[min(self._dropped)]

    def host_lost(self, now_s: float) -> None:
        """Begin to estimate the frames that nobody sees: from the last line, or from now where there was none."""
        if self._lost_s is None:
            self._lost_s = now_s if self.last_s is None else self.last_s

    def host_back(self) -> None:
        """End the estimate: the host still has the camera, and what it has seen meanwhile comes."""
        self._lost_s, self._kept = None, 0

    def sample(self, now_s: float) -> None:
        """Remember the count for the rate; to be called once a second."""
        self._samples.append((now_s, self.lines))

    def fps(self) -> float:
        """Return the lines a second of the last seconds that `sample` saw."""
        if len(self._samples) < 2:
            return 0.0
        (begin_s, begin), (end_s, end) = self._samples[0], self._samples[-1]
        return (end - begin) / (end_s - begin_s) if end_s > begin_s else 0.0

    def lost_until(self, now_s: float, rate_fps: float | None) -> dict[str, int]:
        """Return reason -> frames, with those that a loss which is not over has cost until now."""
        if self._lost_s is None:
            return self.lost
        return self.lost | {HOST_LOST: self.lost.get(HOST_LOST, 0) + self._unseen(now_s, rate_fps)}

    def gap_until(self, now_s: float) -> float:
        """Return the longest gap between two lines in seconds, that since the last one included."""
        return self.longest_gap_s if self.last_s is None else max(self.longest_gap_s, now_s - self.last_s)

    def _unseen(self, now_s: float, rate_fps: float | None) -> int:
        assert self._lost_s is not None
        return max(0, round((self.fps() if rate_fps is None else rate_fps) * (now_s - self._lost_s)) - self._kept)

    def _count(self, reason: str, frames: int) -> None:
        if frames > 0:
            self.lost[reason] = self.lost.get(reason, 0) + frames

    def _hear(self, epoch: int, frame: int) -> None:
        self._heard[epoch] = frame
        if len(self._heard) > _EPOCHS:
            del self._heard[min(self._heard)]
