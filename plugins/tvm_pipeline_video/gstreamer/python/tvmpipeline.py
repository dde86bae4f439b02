"""What GStreamer's loader of Python elements reads: it looks into folders named `python` on GST_PLUGIN_PATH."""

# ruff: noqa: E402 -- the folders come first
import os
import site

from gi.repository import Gst

for folder in os.environ.get("PYTHONPATH", "").split(":"):
    site.addsitedir(folder)  # which follows what an installation in place leaves there

from tvm_pipeline_video.gstreamer.element import TvmPipeline

__gstelementfactory__ = ("tvmpipeline", Gst.Rank.NONE, TvmPipeline)
