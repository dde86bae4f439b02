"""The names that a service takes from the video room, whose libraries (PyAV, Pillow) are an extra.

All modules of a service import video from here, so that the types are known and a missing extra is one clear error:
importing this module without the extra raises a PipelineError that names what to install. The command line therefore
imports a service only when a command needs it.
"""

from __future__ import annotations

from tvm_pipeline import PipelineError

try:
    from tvm_pipeline_video import (
        Analysis,
        Annotation,
        Decoder,
        Frame,
        JsonLines,
        LiveSet,
        LiveSource,
        LiveStatistics,
        Policy,
        Preprocessing,
        Reconnect,
        Source,
        VideoFile,
        draw,
        merge,
        open_source,
        parse_policy,
        source_kind,
        stream,
    )
    from tvm_pipeline_video.analysis import Outputs, decoder_name
    from tvm_pipeline_video.annotations import Overlay, jpeg
    from tvm_pipeline_video.application import Application
    from tvm_pipeline_video.decoders import FAMILIES, Request, check_name, choose, is_known, read_labels
    from tvm_pipeline_video.decoding import USUAL_FPS
    from tvm_pipeline_video.errors import VideoError
    from tvm_pipeline_video.hardware import check_hardware, hardware_decoders
    from tvm_pipeline_video.host_profile import host_devices, profile_host
    from tvm_pipeline_video.interpret import Interpretation, interpret
    from tvm_pipeline_video.preprocessing import Transform, picture_input, preprocess
    from tvm_pipeline_video.rehearsals import HostSetting, Rehearsal
    from tvm_pipeline_video.sinks import json_line, naming
    from tvm_pipeline_video.tracking import Follow, ObjectEvent, Trackers, Tracking
    from tvm_pipeline_video.video_file import VIDEO_EXTENSIONS
except ImportError as error:
    raise PipelineError(f"video needs an extra: pip install 'tvm-pipeline[video]' ({error})") from error

__all__ = [
    "FAMILIES",
    "USUAL_FPS",
    "VIDEO_EXTENSIONS",
    "Analysis",
    "Annotation",
    "Application",
    "Decoder",
    "Follow",
    "Frame",
    "HostSetting",
    "Interpretation",
    "JsonLines",
    "LiveSet",
    "LiveSource",
    "LiveStatistics",
    "ObjectEvent",
    "Outputs",
    "Overlay",
    "Policy",
    "Preprocessing",
    "Reconnect",
    "Rehearsal",
    "Request",
    "Source",
    "Trackers",
    "Tracking",
    "Transform",
    "VideoError",
    "VideoFile",
    "check_hardware",
    "check_name",
    "choose",
    "decoder_name",
    "draw",
    "hardware_decoders",
    "host_devices",
    "interpret",
    "is_known",
    "jpeg",
    "json_line",
    "merge",
    "naming",
    "open_source",
    "parse_policy",
    "picture_input",
    "preprocess",
    "profile_host",
    "read_labels",
    "source_kind",
    "stream",
]
