"""Frames in, results out: where pictures come from, what a model takes of them, and where results go.

The package decodes, resizes and encodes (all by PyAV, that is FFmpeg). Only analysis.py uses pipelines.

errors.py         VideoError: a source or a sink of frames fails
sources.py        Source: an open source of frames, and Frame
kinds.py          the table of the kinds of sources: file, camera, address and so on
decoding.py       compressed video becomes pictures; what happens to damaged video
hardware.py       which devices decode video here, in place of software
live_source.py    LiveSource: a source that stalls, comes back and may be late
live_sets.py      several of them at once, and a set of them that changes
policies.py       which frames of a live source are dropped, and how it is opened again
preprocessing.py  a frame becomes the tensor of a model, and coordinates lead back to the frame
analysis.py       a source through a running pipeline
cascade.py        two models in a row: the second one runs on crops of what the first one finds
application.py    reading, decoding and writing as operators of the pipeline, beside the model's
rehearsals.py     an application on a stretch of its source, to be run again and again
host_profile.py   how long these operators take on each device
presets.py        named forms of a model's input
decoders/         what the outputs of known families of models mean
interpret.py      what a model's input wants and its outputs mean: given, recognised, or assumed, and said
detections.py     annotations as those of the package supervision
tracking.py       objects over frames, zones and lines
annotations.py    what was found in a frame, drawn on it
sinks.py          results become JSON lines
video_file.py     frames become a video that plays while it is written
http_server.py    HTTP for what is watched and for inference: who may ask
watch/            a running pipeline seen from outside, over HTTP
gstreamer/        an element of GStreamer
service/          the application that runs bundles on sources of frames
commands/         `run` and `top`
"""

from __future__ import annotations

try:
    from tvm_pipeline_video.analysis import Analysis, Decoder, find_decoder, preprocessing_for, stream
    from tvm_pipeline_video.annotations import Annotation, Mask, draw
    from tvm_pipeline_video.application import Application, host_graph
    from tvm_pipeline_video.decoders import FAMILIES, Choice, Request, choose
    from tvm_pipeline_video.decoding import Picture
    from tvm_pipeline_video.detections import detections
    from tvm_pipeline_video.errors import VideoError
    from tvm_pipeline_video.host_profile import host_devices, profile_host
    from tvm_pipeline_video.interpret import Interpretation, interpret
    from tvm_pipeline_video.kinds import KINDS, Kind, SourceOptions, open_source, source_kind
    from tvm_pipeline_video.live_sets import LiveSet, merge
    from tvm_pipeline_video.live_source import LiveSource, LiveStatistics
    from tvm_pipeline_video.policies import Policy, Reconnect, parse_policy
    from tvm_pipeline_video.preprocessing import Preprocessing, Transform, default_for, preprocess
    from tvm_pipeline_video.presets import PRESETS
    from tvm_pipeline_video.rehearsals import HostSetting, Rehearsal
    from tvm_pipeline_video.sinks import JsonLines
    from tvm_pipeline_video.sources import Frame, LiveFrame, Source
    from tvm_pipeline_video.tracking import ObjectEvent, Trackers, Tracking
    from tvm_pipeline_video.video_file import VideoFile
except ModuleNotFoundError as error:  # without the extra `video` the commands are listed all the same
    _missing = error

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise _missing
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FAMILIES",
    "KINDS",
    "PRESETS",
    "Analysis",
    "Annotation",
    "Application",
    "Choice",
    "Decoder",
    "Frame",
    "HostSetting",
    "Interpretation",
    "JsonLines",
    "Kind",
    "LiveFrame",
    "LiveSet",
    "LiveSource",
    "LiveStatistics",
    "Mask",
    "ObjectEvent",
    "Picture",
    "Policy",
    "Preprocessing",
    "Reconnect",
    "Rehearsal",
    "Request",
    "Source",
    "SourceOptions",
    "Trackers",
    "Tracking",
    "Transform",
    "VideoError",
    "VideoFile",
    "choose",
    "default_for",
    "detections",
    "draw",
    "find_decoder",
    "host_devices",
    "host_graph",
    "interpret",
    "merge",
    "open_source",
    "parse_policy",
    "preprocess",
    "preprocessing_for",
    "profile_host",
    "source_kind",
    "stream",
]
