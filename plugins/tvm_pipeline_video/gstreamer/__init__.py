"""A GStreamer element, `tvmpipeline`: pictures in, the same pictures out with what was found on them.

    eval "$(python -m tvm_pipeline_video.gstreamer)"
    gst-launch-1.0 filesrc location=street.mp4 ! decodebin ! videoconvert ! tvmpipeline model=model.tar ! \
        videoconvert ! autovideosink

element.py  the element

Running this package as a program prints what tells GStreamer where the element is, and python/tvmpipeline.py is what
its loader of Python elements reads. GStreamer and its Python loader come from the system (`apt install python3-gst-1.0
gstreamer1.0-python3-plugin-loader`), so this environment must be of the system's version of Python.
"""
