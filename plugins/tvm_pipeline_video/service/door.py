"""What the engine's commands ask of this plug-in, as `tvm_pipeline.workflow.applications` describes it.

The entry point `tvm_pipeline.applications` names this module. It needs the libraries of the extra `video`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tvm_pipeline import Bundle, OperatorGraph, Profile
from tvm_pipeline.addresses import shown
from tvm_pipeline.errors import BundleError, OptionError
from tvm_pipeline.runtime.comparison import Run
from tvm_pipeline.workflow.applications import MeasuredApplication
from tvm_pipeline.workflow.steps import Compiled
from tvm_pipeline_video.service.host_planning import ApplicationRecord, rehearsed_application
from tvm_pipeline_video.service.settings import decoder_request
from tvm_pipeline_video.service.video_extra import (
    VIDEO_EXTENSIONS,
    Interpretation,
    Request,
    hardware_decoders,
    interpret,
    open_source,
    profile_host,
)


@dataclass(frozen=True, slots=True)
class _VideoModel:
    """A model with its decoder, to be measured on a source.

    Attributes:
        video: the extension of the annotated video that it writes; empty without one.
    """

    source: str
    video: str
    request: Request
    found: Interpretation

    @property
    def preprocessing(self) -> dict[str, Any]:
        return self.found.preprocessing.to_dict()

    @property
    def said(self) -> tuple[str, ...]:
        return self.found.said

    def measure(self, made: Compiled, profile: Profile) -> MeasuredApplication:
        """Measure reading, decoding and writing. A line for each frame is taken to be written, as by `run`.

        Raises what `rehearsed_application` and `profile_host` raise.
        """
        compiled, platform, request = made.compiled, made.platform, self.request
        rehearsal = rehearsed_application(
            compiled.graph, platform, self.source, self.found, video=self.video, lines=True
        )
        profile = profile_host(rehearsal, compiled, platform, profile)
        known = ApplicationRecord(
            shown(self.source), request.name, rehearsal.setting, request.labels, request.threshold, request.classes
        )
        return MeasuredApplication(rehearsal.graph, profile, rehearsal.runner(compiled, platform), asdict(known))


def read(graph: OperatorGraph, metadata: Mapping[str, str], options: Mapping[str, Any]) -> _VideoModel:
    """Return the application of a model.

    Raises what `interpret` and `open_source` raise, and OptionError where labels cannot be read or no video has this
    extension.
    """
    source, video = options["source"] or "", options["video"] or ""
    if video and video.lower() not in VIDEO_EXTENSIONS:
        raise OptionError(
            f"`video` {video}: a video needs one of the extensions {', '.join(VIDEO_EXTENSIONS)}", option="video"
        )
    if source and "://" not in source:  # a stream may serve one client, once
        open_source(source).close()
    request = decoder_request(options["decoder"], options["labels"], options["threshold"], options["classes"])
    found = interpret(graph, metadata, request, options["preprocessing"])
    return _VideoModel(source, video, request, found)


def again(bundle: Bundle, source: str) -> Run:
    """Return what runs a plan of the bundle's application on a source, or its own; raise as ApplicationRecord does."""
    described = ApplicationRecord.of(bundle)
    if described is None:
        raise BundleError(f"the bundle of {bundle.graph.name} holds the model alone; compile it with `source`")
    return described.rehearsal(bundle, source).runner(bundle.compiled, bundle.platform)


def seen() -> Iterator[str]:
    """Yield a line for each kind of hardware that FFmpeg could decode video with."""
    for kind, obstacle in hardware_decoders().items():
        yield f"video decoding by {kind}: {f'it does not open here ({obstacle})' if obstacle else 'it opens here'}"
