"""The options of a run, wherever they come from: the command line, a service's file, or a program.

`Settings.check` refuses what contradicts itself; files are opened when the run begins. Read next: file.py (settings
from a file), running.py (what is done with them).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tvm_pipeline.addresses import shown
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import check_distinct
from tvm_pipeline.runtime.adaptation import check_strategy
from tvm_pipeline_video.service.mqtt_results import is_broker, parse_broker
from tvm_pipeline_video.service.video_extra import Request, check_hardware, parse_policy, read_labels, source_kind

LONGEST_TAG = 200  # characters
MOST_S = 1e9  # what waits takes no more than 9e9 seconds

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The options of `tvm-pipeline run`, under their own names; the help of the command explains them.

    Lists hold one value for each model (bundle, decoder, labels, threshold, classes, plan) or source (source, tag,
    policy).
    Nothing is checked before `check`, so that settings from several places can be put together. `bundle` may name
    model files, too.
    """

    bundle: list[Path] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    tag: list[str] = field(default_factory=list)
    wait: bool = False
    status: Path | None = None
    output: Path | None = None
    results: str | None = None
    segment: float | None = None
    decoder: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    threshold: list[float] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    plan: list[Path] = field(default_factory=list)
    preprocessing: str | None = None
    input_shapes: str | None = None
    limit: int | None = None
    policy: list[str] = field(default_factory=list)
    hardware_decoding: str = "auto"
    stall: float = 10.0
    rate: float | None = None
    verify: float = 10.0
    fresh: bool = False
    adapt: str = "replan"
    objective: str | None = None
    min_throughput: float | None = None
    max_latency: float | None = None
    control: Path | None = None
    allow_power_modes: bool = False
    isolate: bool = False
    watchdog: float = 30.0
    events: Path | None = None
    power_sensor: str = ""
    watch: str | int | None = None
    unhealthy_after: float = 10.0
    token: str | None = None
    supervise: bool = False
    json: bool = False

    @property
    def models(self) -> int:
        """The number of models."""
        return len(self.bundle)

    @property
    def results_file(self) -> Path | None:
        """The file of `results`, or the name from which its segments have theirs; None where they are not in files."""
        return None if self.results in (None, "-") or is_broker(self.results) else Path(str(self.results))

    def check(self, config: Path | None = None) -> Settings:
        """Return the settings; raise OptionError where two contradict each other or one is out of range.

        Args:
            config: the file that they stand in, if there is one, which no output may replace.
        """
        self._check_sources()
        self._check_tags()
        self._check_waiting()
        check_hardware(self.hardware_decoding)
        if self.limit is not None and self.limit < 1:
            raise _refusal("limit", self.limit, "at least one frame must run")
        if self.limit is not None and self.limit >= 1 << 63:
            raise _refusal("limit", self.limit, "no source has so many frames; leave it out")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise _refusal("rate", f"{self.rate:g}", "it must be positive")
        if not 0 <= self.verify < float("inf"):
            raise _refusal("verify", f"{self.verify:g}", "it must be a number of seconds, or 0")
        if self.json and self.results == "-":
            raise OptionError(
                "`json` and `results` - both want standard output; write the results to a file", option="results"
            )
        check_strategy(self.adapt)
        self._check_output()
        for name, seconds in (
            ("watchdog", self.watchdog),
            ("stall", self.stall),
            ("unhealthy_after", self.unhealthy_after),
        ):
            if not 0 < seconds <= MOST_S:
                raise _refusal(name, f"{seconds:g}", f"it must be positive, and up to {MOST_S:g} seconds")
        if self.token and self.watch is None:
            raise OptionError("`token` goes with `watch`", option="token")
        self.watch_port()
        read = (*self.bundle, *self.source, *self.labels, *self.plan, self.preprocessing, self.control, config)
        code = (name.rpartition(":")[0] for name in self.decoder)
        check_distinct((self.output, self.results_file, self.events, self.status), (*read, *code))
        return self

    def _check_output(self) -> None:
        if self.results and is_broker(self.results):
            parse_broker(self.results)
        if self.output and len(self.source) > 1:
            raise OptionError(
                "`output` is a video of one source; of several, write `results`, or run one for each", option="output"
            )
        if self.output and self.supervise and self.segment is None:
            raise OptionError(
                "`output` with `supervise`: a video cannot go on where a crash broke it off; give `segment`, so that "
                "the next process begins another file",
                option="output",
            )
        if self.segment is None:
            return
        if not 0 < self.segment < float("inf"):
            raise _refusal("segment", f"{self.segment:g}", "it must be positive")
        if self.results == "-":
            raise OptionError("`segment` with `results` -: standard output has no segments", option="segment")
        if not self.output and not self.results_file:
            raise OptionError("`segment` is of files; give `output` or `results`", option="segment")

    def _check_sources(self) -> None:
        if not self.bundle or not (self.source or self.wait):
            raise OptionError("give a model file, or a bundle of `compile`, and at least one `source`")
        if self.models > 1 and not self.wait and len(self.source) != self.models:
            raise OptionError(
                f"`source` is given {len(self.source)} times for {self.models} models; each takes one, in their order",
                option="source",
            )
        twice = {spec for spec in self.source if self.source.count(spec) > 1}
        if self.models == 1 and twice and not self.tag:
            raise OptionError("`source` names one source twice", option="source")
        names = [shown(spec) for spec in self.source]
        if not self.tag and len(set(names)) < len(set(self.source)):
            twin = next(name for name in names if names.count(name) > 1)
            raise OptionError(
                f"`source`: two sources are shown as {twin}, since the rest may be a secret; give each a `tag`",
                option="source",
            )
        if cameras := [spec for spec in twice if source_kind(spec).exclusive]:
            raise OptionError(f"`source` names {cameras[0]} twice; a camera can be opened once only", option="source")
        for index in range(self.models):
            self.request(index)
        for_each("plan", self.plan, self.models, "models")
        for policy in for_each("policy", self.policy, len(self.source), "sources"):
            if policy is not None:
                parse_policy(policy)

    def _check_tags(self) -> None:
        if self.tag and len(self.tag) != len(self.source):
            raise OptionError(
                f"`tag` is given {len(self.tag)} times for {len(self.source)} sources; give one for each",
                option="tag",
            )
        for tag in self.tag:
            if not tag.isprintable() or not 0 < len(tag) <= LONGEST_TAG:
                raise OptionError(
                    f"`tag` {tag[:LONGEST_TAG]!r}: give 1 to {LONGEST_TAG} characters that can be printed", option="tag"
                )
            if self.tag.count(tag) > 1:
                raise OptionError(f"`tag` {tag} is given twice; lines could not tell their sources apart", option="tag")

    def _check_waiting(self) -> None:
        if self.status and not self.wait:
            raise OptionError("`status` goes with `wait`", option="status")
        if not self.wait:
            return
        if self.models > 1:
            raise OptionError(
                "`wait` is of one model, whose sources come and go; run it once for each of the models", option="wait"
            )
        for name, value, reason in (
            ("output", self.output, "a video is of one source; write `results`"),
            ("limit", self.limit, "such a run ends when it is told to, by SIGTERM"),
            ("rate", self.rate, "sources come and go; give each a `policy` such as fps=10"),
        ):
            if value is not None:
                raise OptionError(f"`{name}` with `wait`: {reason}", option=name)

    def request(self, index: int) -> Request:
        """Return what is wanted of the decoder of a model; raise OptionError where its labels cannot be read."""
        models = self.models
        name = for_each("decoder", self.decoder, models, "models")[index] or ""
        labels = for_each("labels", self.labels, models, "models")[index]
        threshold = for_each("threshold", self.threshold, models, "models")[index]
        # Several lists of classes are one where there is one model.
        classes = for_each("classes", [",".join(self.classes)] if models == 1 else self.classes, models, "models")[
            index
        ]
        return decoder_request(name, labels, threshold, classes)

    def watch_port(self, index: int = 0) -> tuple[str, int] | None:
        """Return the address and the port where the model of that index is watched; None where it is not."""
        if self.watch is None:
            return None
        address, _, port = str(self.watch).rpartition(":")
        if not re.fullmatch("[0-9]+", port):
            raise _refusal("watch", self.watch, "give it as PORT or ADDRESS:PORT")
        return address or "127.0.0.1", int(port) and int(port) + index


def decoder_request(
    decoder: str | None, labels: str | None = None, threshold: float | None = None, classes: str | None = None
) -> Request:
    """Return what is wanted of a decoder, with the labels read and the list of classes taken apart.

    Raises OptionError where the labels cannot be read.
    """
    wanted = tuple(filter(None, (word.strip() for word in (classes or "").split(","))))
    return Request(decoder or "", read_labels(labels) if labels else (), threshold, wanted)


def for_each(option: str, given: Sequence[T], count: int, of: str) -> Sequence[T | None]:
    """Return the value of an option for each of `count` things: one value serves all, none gives None for each.

    Raises OptionError where it is given another number of times.
    """
    if not given:
        return [None] * count
    if len(given) not in (1, count):
        raise OptionError(
            f"`{option}` is given {len(given)} times for {count} {of}; give it once, or once for each in their order",
            option=option,
        )
    return list(given) * (count if len(given) == 1 else 1)


def _refusal(option: str, value: object, reason: str) -> OptionError:
    return OptionError(f"`{option}` {value}: {reason}", option=option, value=value)
