"""Frames in, frames out: where pictures come from, how a model wants them, and where results go.

This room decodes, resizes and encodes (all by PyAV, that is FFmpeg) and only stream.py knows of pipelines.
Read next: sources.py (a file, a camera, a URL -> frames), live.py (several of them that stall, come back and
may be late), preprocessing.py (a frame -> the tensor of a model, and the way back), sinks.py (results -> JSON
lines, or a video with the results drawn on it).
"""

from __future__ import annotations

from tvm_pipeline.video.analysis import Analysed, Decoder, find_decoder, preprocessing_for, stream
from tvm_pipeline.video.live_source import LiveFrame, LiveSource, LiveStatistics, merge
from tvm_pipeline.video.policies import Policy, Reconnect, parse_policy
from tvm_pipeline.video.preprocessing import Preprocessing, Transform, default_for, preprocess
from tvm_pipeline.video.sinks import Annotation, JsonLines, VideoFile, draw
from tvm_pipeline.video.sources import Frame, Source, open_source

__all__ = [
    "Analysed",
    "Annotation",
    "Decoder",
    "Frame",
    "JsonLines",
    "LiveFrame",
    "LiveSource",
    "LiveStatistics",
    "Policy",
    "Preprocessing",
    "Reconnect",
    "Source",
    "Transform",
    "VideoFile",
    "default_for",
    "draw",
    "find_decoder",
    "merge",
    "open_source",
    "parse_policy",
    "preprocess",
    "preprocessing_for",
    "stream",
]
