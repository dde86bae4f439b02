"""The options of a live source: which frames are dropped, and how it is opened again.

Read next: live_source.py, which carries them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_pipeline.errors import OptionError


@dataclass(frozen=True, slots=True)
class Policy:
    """Which frames are dropped; the default keeps every frame and makes the source wait. See `parse_policy`."""

    every: int = 1
    latest: bool = False
    max_age_s: float | None = None
    fps: float | None = None


def parse_policy(text: str) -> Policy:
    """Return the queue policy of a text: one of these, or several with commas between.

    - `block`: keeps every frame, and makes the source wait if the pipeline is slower; right for files. A
      camera that waits long drops frames by itself, and these are not counted.
    - `latest`: only the newest frame waits.
    - `every=N`: the first frame of every N. Alone it makes the source wait, as `block` does.
    - `max-age=S`: no frame older than S seconds is delivered.
    - `fps=N`: at most N frames a second, by the times of the source. Where frames come by the clock only the newest
      waits, as with `latest`; a file that is read as fast as its frames are taken is thinned, and waits.

    Raises:
        OptionError: the text is none of these, a number is not above 0, or two parts contradict each other.
    """
    takes = (
        "it takes block, latest, every=N, max-age=SECONDS, fps=N (above 0), or several with commas, as every=2,latest"
    )
    given: dict[str, str] = {}
    for part in text.split(","):
        form = re.fullmatch(r"(block|latest)|(every)=(\d{1,18})|(max-age|fps)=(\d{1,18}\.?\d*|\.\d+)", part.strip())
        if not form or (form[2] and int(form[3]) == 0) or (form[4] and float(form[5]) == 0):
            raise OptionError(
                f"`policy` {text}: cannot use {part.strip() or 'nothing'!r}; {takes}", option="policy", value=text
            )
        key = form[1] or form[2] or form[4]
        if key in given:
            raise OptionError(f"`policy` {text}: {key} is given twice; keep one", option="policy", value=text)
        given[key] = form[3] or form[5] or ""
    if "block" in given and (clash := [key for key in ("latest", "max-age", "fps") if key in given]):
        raise OptionError(
            f"`policy` {text}: block keeps every frame, {clash[0]} lets some go; choose one",
            option="policy",
            value=text,
        )
    max_age_s, fps = (float(given[key]) if key in given else None for key in ("max-age", "fps"))
    return Policy(int(given.get("every", 1)), "latest" in given, max_age_s, fps)


@dataclass(frozen=True, slots=True)
class Reconnect:
    """The back-off: wait `first_s`, then twice as long each time up to `longest_s`; a frame resets it.

    `attempts` in a row are made; None means for ever.

    Raises:
        OptionError: a wait is not above 0, the longest is shorter than the first, or `attempts` is less than one.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    attempts: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.longest_s < float("inf") or (self.attempts is not None and self.attempts < 1):
            raise OptionError(f"{self}: it needs 0 < first_s <= longest_s, and attempts of at least 1 or None")

    def waits(self) -> Iterator[float]:
        """Yield the seconds to wait before each attempt in a row."""
        made, wait_s = 0, self.first_s
        while self.attempts is None or made < self.attempts:
            yield wait_s
            made, wait_s = made + 1, min(2 * wait_s, self.longest_s)


BLOCK = Policy()
RECONNECT = Reconnect()
