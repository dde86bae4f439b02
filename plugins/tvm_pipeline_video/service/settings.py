"""The options of a run, wherever they come from: the command line, a service's file, or a program.

`Settings.check` refuses what contradicts itself; files are opened when the run begins. Read next: file.py (settings
from a file), running.py (what is done with them).
"""

# ruff: noqa: RUF009 -- `setting` makes a field
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

from tvm_pipeline.addresses import has_secret, shown
from tvm_pipeline.cost.under_load import frame_deadline
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import check_distinct
from tvm_pipeline.option_names import HELP, SAME_NAMES
from tvm_pipeline.runtime import STRATEGIES
from tvm_pipeline.runtime.adaptation import check_strategy
from tvm_pipeline_video.service.mqtt_results import is_broker, parse_broker

if TYPE_CHECKING:
    from tvm_pipeline_video.service.video_extra import Request, Tracking

LONGEST_TAG = 200  # characters
MOST_S = 1e9  # what waits takes no more than 9e9 seconds
MOST_FPS = 1e9

T = TypeVar("T")


def setting(default: T, help: str, **about: Any) -> T:
    """Declare a field of `Settings`.

    Args:
        help: for the command and the pages; a field in backticks stands for its name there.
        about: `letter`, its short option; `variable` of the environment, which gives it as well; `panel`, the group in
            the help that it stands in; `is_of_model`, whether the file of a fleet sets it for each model.
    """
    metadata = {"help": help, **about}
    made: Any = (
        field(default_factory=list, metadata=metadata) if default == [] else field(default=default, metadata=metadata)
    )
    return cast(T, made)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, each declared here and nowhere else.

    The options of `tvm-pipeline run`, the keys of a service's file, and those that a fleet's file sets for a model come
    from this table. Lists hold one value for each model (bundle, decoder, labels, threshold, classes, plan) or source
    (source, tag, policy). Nothing is checked before `check`, so that settings from several places can be put together.
    `bundle` may name model files, too.
    """

    bundle: list[Path] = setting(
        [],
        "Bundles of `compile`, or model files (.onnx, .tflite), which are compiled into the cache first. Where there "
        "are several, each takes one `source`, in their order.",
    )
    source: list[str] = setting(
        [], "File, folder of pictures, http/rtsp URL, camera:0, synthetic:640x480; several take turns."
    )
    output: Path | None = setting(None, "Annotated video to write; it plays while it is written.", letter="o")
    results: str | None = setting(
        None,
        "JSON lines to write, one for each frame, as they come; - is standard output. With `config` or `supervise` "
        "they are appended to the file, which is replaced otherwise. mqtt://user:password@host:port/topic (or mqtts) "
        "sends each to a broker, once and in order.",
        variable="TVM_PIPELINE_RESULTS",
    )
    decoder: list[str] = setting([], f"{HELP['decoder']} One, or one for each model.", is_of_model=True)
    device: str = setting(
        "",
        "For a model file: use only these devices: cpu, gpu, tpu, or names that `devices` lists; several with commas.",
    )
    watch: str | int | None = setting(
        None,
        "PORT or ADDRESS:PORT: metrics, health, traces and a page; beyond loopback it needs `token`. A second model "
        "has the next port, and so on.",
    )
    # Input
    tag: list[str] = setting(
        [],
        "A text for each source, which its lines carry under this name; as many as there are sources.",
        panel="Input",
    )
    policy: list[str] = setting(
        [],
        "Read the sources ahead, open them again where they break, and drop frames by this rule: block, latest, "
        "every=N, max-age=SECONDS, fps=N, or several with commas; one, or one for each source. Without it, cameras "
        "and rtsp, rtmp and udp streams have latest, all others block.",
        panel="Input",
    )
    rate: float | None = setting(
        None,
        "Frames a second that come: plan for the least latency that keeps up with them and 10 % more. A file is then "
        "read at this rate. Without it, what all cameras give by their policies, each as fast as the first.",
        panel="Input",
    )
    limit: int | None = setting(None, "Stop each model after this number of frames.", panel="Input")
    hardware_decoding: str = setting(
        "auto",
        "auto: video is decoded by the first device that `devices` lists for that, in software where there is none; "
        "off: in software; or the kind of device, such as cuda or vaapi.",
        panel="Input",
    )
    stall: float = setting(
        10.0, "Seconds without a frame after which a source that is read ahead counts as broken.", panel="Input"
    )
    wait: bool = setting(
        False,
        "With `config`: load the model, run one frame of noise, and wait for sources. They come and go with source, "
        "tag and policy of the file on SIGHUP, while those that stay lose no frame; a source that breaks or ends does "
        "not end the run.",
        panel="Input",
    )
    # Output
    segment: float | None = setting(
        None,
        "Seconds of each source after which `output` and `results` go on in another file: out-0001.mp4, out-0002.mp4 "
        "and so on. None that is there is overwritten.",
        panel="Output",
    )
    report: Path | None = setting(
        None,
        "Folder for report.md and its pictures: which plan ran and why, predicted beside measured figures, what each "
        "device did.",
        panel="Output",
    )
    home_assistant: bool = setting(
        False,
        "With `results` of a broker: each source becomes a device of Home Assistant there, with what was found, how "
        "many, its rate and its latency.",
        panel="Output",
    )
    tracking: Path | None = setting(
        None,
        "TOML with how objects are followed over frames, and with zones and lines: `results` then gets a line for each "
        "event of an object, such as that it enters a zone.",
        panel="Output",
    )
    overlay: bool = setting(
        False, "Draw the frame rate and the latency of the moment into the video of `output`.", panel="Output"
    )
    json: bool = setting(False, HELP["json"], panel="Output")
    # Model
    platform: Path | None = setting(
        None,
        "For a model file: the TOML file of devices and links; without it, this machine is detected.",
        panel="Model",
    )
    input_shapes: str | None = setting(None, HELP["input_shapes"], is_of_model=True, panel="Model")
    preprocessing: str | None = setting(
        None,
        f"{HELP['preprocessing']} Without it, that of the bundle or MODEL.toml, else that of the model's family or "
        "metadata, else what the shape of the input suggests; a line tells which of these it is.",
        is_of_model=True,
        panel="Model",
    )
    labels: list[str] = setting([], f"{HELP['labels']} One, or one for each model.", is_of_model=True, panel="Model")
    threshold: list[float] = setting(
        [], f"{HELP['threshold']} One, or one for each model.", is_of_model=True, panel="Model"
    )
    classes: list[str] = setting([], f"{HELP['classes']} One list for each model.", is_of_model=True, panel="Model")
    fresh: bool = setting(
        False,
        "Compile a model file, measure and plan anew, also if that was done before for this source and decoder.",
        panel="Model",
    )
    # Planning
    objective: str | None = setting(
        None,
        "What to plan for: throughput, latency or energy; without it, that of the bundle.",
        panel="Planning",
    )
    min_throughput: float | None = setting(None, HELP["min_throughput"], panel="Planning")
    max_latency: float | None = setting(None, HELP["max_latency"], panel="Planning")
    deadline: str | None = setting(None, HELP["deadline"], panel="Planning")
    miss: float = setting(0.001, HELP["miss"], panel="Planning")
    late: str = setting(
        "keep",
        "With `deadline`: drop lets a frame of a camera or stream go, before any work, that cannot be in time any more "
        "by the predicted latency; keep runs it.",
        panel="Planning",
    )
    plan: list[Path] = setting(
        [], "Run this plan instead of the bundle's own; one, or one for each model.", panel="Planning"
    )
    plan_first: bool = setting(
        False,
        "Measure, and choose the plan, before the first frame. Without it, a video file runs at once, each frame on "
        "one core; if it lasts so long that a measured plan pays, its frames wait once until all is measured.",
        panel="Planning",
    )
    verify: float = setting(
        8.0,
        "Seconds, at most, in which plans too close to tell apart by prediction run side by side, and half as many "
        "more to find how few frames inside keep the rate; 0 chooses by prediction.",
        panel="Planning",
    )
    adapt: str | None = setting(
        None,
        "replan: change to another plan if devices become slower or faster, without stopping; off: keep the plan. "
        f"Without it, replan, but off with a plan that you give. Installed: {', '.join(STRATEGIES)}.",
        panel="Planning",
    )
    control: Path | None = setting(
        None,
        "TOML with objective, min-throughput, max-latency: it is read whenever it changes.",
        panel="Planning",
    )
    allow_power_modes: bool = setting(
        False,
        "Set the power mode that the plan is for, if it is for one, and put back at the end what was before; this "
        "takes the rights of root. Without it, such a plan runs only where its mode is set.",
        panel="Planning",
    )
    # Robustness
    isolate: bool | None = setting(
        None,
        "Run each stage in its own process, whose crash costs no frame. Without it, each Edge TPU has a process.",
        panel="Robustness",
    )
    watchdog: float = setting(30.0, "Seconds at one frame after which a stage counts as failed.", panel="Robustness")
    supervise: bool = setting(
        False, "Start it again where it crashes, to go on where it was; after ever longer waits.", panel="Robustness"
    )
    # Monitoring
    status: Path | None = setting(
        None,
        "With `wait`: a JSON file with the sources and their counts, replaced when they change.",
        panel="Monitoring",
    )
    events: Path | None = setting(None, "JSON lines to append: each change of plan and its reason.", panel="Monitoring")
    power_sensor: str = setting("", HELP["power_sensor"], panel="Monitoring")
    unhealthy_after: float = setting(
        10.0, "With `watch`: seconds without a result before /health says no.", panel="Monitoring"
    )
    token: str | None = setting(
        None, "With `watch`: the token that a client must send.", variable="TVM_PIPELINE_TOKEN", panel="Monitoring"
    )

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
        from tvm_pipeline_video.service.video_extra import check_hardware  # not for who reads the table alone

        self._check_sources()
        self._check_tags()
        self._check_tracking()
        self._check_waiting()
        check_hardware(self.hardware_decoding)
        if self.limit is not None and self.limit < 1:
            raise _refusal("limit", self.limit, "at least one frame must run")
        if self.limit is not None and self.limit >= 1 << 63:
            raise _refusal("limit", self.limit, "no source has so many frames; leave it out")
        if self.rate is not None and not 1 / MOST_S <= self.rate <= MOST_FPS:
            raise _refusal("rate", f"{self.rate:g}", f"it must be positive, from {1 / MOST_S:g} to {MOST_FPS:g}")
        if self.late not in ("drop", "keep"):
            raise _refusal("late", self.late, "it is drop or keep")
        if self.deadline is not None:
            frame_deadline(self.deadline, self.miss, self.rate or 1.0)  # that of a camera is not known yet
        elif self.late == "drop":
            raise OptionError("`late` drop goes with `deadline`", option="late")
        if not 0 <= self.verify < float("inf"):
            raise _refusal("verify", f"{self.verify:g}", "it must be a number of seconds, or 0")
        if self.json and self.results == "-":
            raise OptionError(
                "`json` and `results` - both want standard output; write the results to a file", option="results"
            )
        if self.platform and not self.platform.is_file():
            raise _refusal("platform", self.platform, "there is no such file")
        check_strategy(self.strategy)
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
        read = (
            *self.bundle,
            *self.source,
            *self.labels,
            *self.plan,
            self.platform,
            self.preprocessing,
            self.control,
            self.tracking,
            config,
        )
        code = (name.rpartition(":")[0] for name in self.decoder)
        check_distinct((self.output, self.results_file, self.events, self.status), (*read, *code))
        return self

    @property
    def strategy(self) -> str:
        """The name of the strategy that changes plans while the model runs; `off` keeps a plan that was given."""
        return self.adapt or ("off" if self.plan else "replan")

    def followed(self) -> Tracking | None:
        """Return how objects are followed, None where they are not; raise OptionError where the file is wrong."""
        from tvm_pipeline_video.service.video_extra import Tracking

        return Tracking.from_toml(self.tracking) if self.tracking else None

    def _check_output(self) -> None:
        from tvm_pipeline_video.service.video_extra import VIDEO_EXTENSIONS

        if self.output and self.output.suffix.lower() not in VIDEO_EXTENSIONS:
            raise _refusal("output", self.output, f"a video needs one of the extensions {', '.join(VIDEO_EXTENSIONS)}")
        if self.results and is_broker(self.results):
            parse_broker(self.results)
        elif self.home_assistant:
            raise OptionError(
                "`home_assistant` needs `results` of a broker, such as mqtt://localhost/cameras",
                option="home_assistant",
            )
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
        for path in (self.output, self.results_file):
            if path and path.parent != self.report and not path.parent.is_dir():
                raise OptionError(f"cannot write {path}: there is no folder {path.parent}; make it first")
        if self.overlay and not self.output:
            raise OptionError("`overlay` goes with `output`", option="overlay")
        if self.segment is None:
            return
        if not 0 < self.segment < float("inf"):
            raise _refusal("segment", f"{self.segment:g}", "it must be positive")
        if self.results == "-":
            raise OptionError("`segment` with `results` -: standard output has no segments", option="segment")
        if not self.output and not self.results_file:
            raise OptionError("`segment` is of files; give `output` or `results`", option="segment")

    def _check_sources(self) -> None:
        from tvm_pipeline_video.service.video_extra import parse_policy, source_kind

        if not self.bundle or not (self.source or self.wait):
            raise OptionError("give a model file, or a bundle of `compile`, and at least one `source`")
        if "" in self.source:  # which is this folder for Python
            raise OptionError("`source` is an empty text; give a file, an address or a camera", option="source")
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

    def _check_tracking(self) -> None:
        followed = self.followed()
        if followed and not self.wait:
            followed.check_sources(self.tag or [shown(spec) for spec in self.source])

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
        policies = for_each("policy", self.policy, len(self.source), "sources")
        if self.deadline and any("fps=" not in (policy or "") for policy in policies):
            raise OptionError(
                "`deadline` with `wait`: each source needs a `policy` with fps=N, since their rates say which can come",
                option="policy",
            )

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


SAME_NAMES.update({"config", *(one.name for one in fields(Settings))} - {"bundle"})
# The keys of a service's file, and those of a fleet's file for a model, which has one value of each; with their types.
KINDS: dict[str, Any] = {name.replace("_", "-"): kind for name, kind in get_type_hints(Settings).items()}
MODEL_KINDS: dict[str, Any] = {
    key: get_args(KINDS[key])[0]
    for key, one in zip(KINDS, fields(Settings), strict=True)
    if one.metadata.get("is_of_model")
}


def is_secret(key: str, value: object) -> bool:
    """Return whether a setting is a token, or an address with a password or the like."""
    values = value if isinstance(value, list) else [value]
    return any(isinstance(one, str) and (key == "token" or has_secret(one)) for one in values)


def decoder_request(
    decoder: str | None, labels: str | None = None, threshold: float | None = None, classes: str | None = None
) -> Request:
    """Return what is wanted of a decoder, with the labels read and the list of classes taken apart.

    Raises OptionError where the labels cannot be read.
    """
    from tvm_pipeline_video.service.video_extra import Request, read_labels

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
