"""The error of sources and sinks."""

from __future__ import annotations

from tvm_pipeline import PipelineError


class VideoError(PipelineError):
    """A source that gives no frames, or a sink that cannot take them."""
