"""What a run was asked for, from whichever side: options of the command line, or keys of a service's file.

Only what contradicts itself is refused here; files are opened when the run begins. Read next: service.py (the file),
running.py (what is done with it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tvm_pipeline.errors import OptionError
from tvm_pipeline.runtime import Adaptation, HillClimb
from tvm_pipeline.runtime.strategy import Strategy
from tvm_pipeline.service.common import video_room

# What may propose another plan while one runs; `off` has nothing that does.
STRATEGIES: dict[str, Callable[[], Strategy | None]] = {
    "replan": Adaptation,
    "hill-climb": HillClimb,
    "off": lambda: None,
}

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """All that `run` takes, under the options' names; the options' help says what each is.

    Raises OptionError, its message beginning with an option, where two contradict each other or one is out of range.
    """

    bundle: list[Path]
    source: list[str]
    output: Path | None
    results: str | None
    decoder: list[str]
    plan: list[Path]
    preprocessing: Path | None
    limit: int | None
    policy: list[str]
    stall: float
    adapt: str
    objective: str | None
    min_throughput: float | None
    max_latency: float | None
    control: Path | None
    isolate: bool
    watchdog: float
    events: Path | None
    watch: str | int | None
    unhealthy_after: float
    token: str | None
    supervise: bool
    json: bool

    def __post_init__(self) -> None:
        self._check_sources()
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"--limit {self.limit}: at least one frame must run")
        if self.json and self.results == "-":
            raise OptionError("--json and --results - both want standard output; write the results to a file")
        if self.adapt not in STRATEGIES:
            raise OptionError(f"--adapt {self.adapt!r} is none of {', '.join(STRATEGIES)}")
        if self.output and len(self.source) > 1:
            raise OptionError("--output is a video of one source; of several, write --results, or run one for each")
        if self.output and self.supervise:
            raise OptionError(
                "--output with --supervise: a video cannot go on where a crash broke it off; write --results"
            )
        for name in ("watchdog", "stall", "unhealthy_after"):
            if not 0 < getattr(self, name) < float("inf"):
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name):g}: it must be positive")
        if self.token and self.watch is None:
            raise OptionError("--token goes with --watch")
        self.watch_port()

    def _check_sources(self) -> None:
        if not self.bundle or not self.source:
            raise OptionError("give a bundle of `compile` and at least one --source")
        if self.models > 1 and len(self.source) != self.models:
            raise OptionError(
                f"--source is given {len(self.source)} times for {self.models} models; each takes one, in their order"
            )
        twice = {spec for spec in self.source if self.source.count(spec) > 1}
        if self.models == 1 and twice:
            raise OptionError("--source names one source twice")
        if cameras := [spec for spec in twice if video_room().source_kind(spec).exclusive]:
            raise OptionError(f"--source names {cameras[0]} twice; a camera can be opened once only")
        each("--decoder", self.decoder, self.models, "models")
        each("--plan", self.plan, self.models, "models")
        for policy in each("--policy", self.policy, len(self.source), "sources"):
            if policy is not None:
                video_room().parse_policy(policy)

    @property
    def models(self) -> int:
        return len(self.bundle)

    def watch_port(self, place: int = 0) -> tuple[str, int] | None:
        """Where the model at that place is watched: an address and a port."""
        if self.watch is None:
            return None
        address, _, port = str(self.watch).rpartition(":")
        if not re.fullmatch("[0-9]+", port):
            raise OptionError(f"--watch {self.watch}: give it as PORT or ADDRESS:PORT")
        return address or "127.0.0.1", int(port) and int(port) + place


def each(option: str, given: Sequence[T], count: int, of: str) -> Sequence[T | None]:
    """What an option says for each of so many: given once for all, once for each in order, or not at all.

    Raises OptionError where it is given another number of times.
    """
    if not given:
        return [None] * count
    if len(given) not in (1, count):
        raise OptionError(
            f"{option} is given {len(given)} times for {count} {of}; give it once, or once for each in their order"
        )
    return list(given) * (count if len(given) == 1 else 1)
