"""An application of GStreamer, run by the system's Python: it builds a pipeline for each scene, does what the scene
says, and prints JSON.

python3 gstreamer_application.py MODEL SCENE [SCENE ...]
"""

import json
import sys

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstVideo", "1.0")
from gi.repository import Gst, GstVideo

Gst.init(None)


def play(scene, model):
    """Return what happened, as a dictionary."""
    told = {"pts": [], "sizes": [], "regions": []}

    def seen(pad, info):
        buffer = info.get_buffer()
        told["pts"].append(buffer.pts)
        caps = pad.get_current_caps().get_structure(0)
        told["sizes"].append([caps.get_value("width"), caps.get_value("height")])
        region = GstVideo.buffer_get_video_region_of_interest_meta_id(buffer, 0)
        if region:
            score = region.get_param("detection").get_value("confidence")
            told["regions"].append([region.x, region.y, region.w, region.h, round(score, 3)])
        return Gst.PadProbeReturn.OK

    def ended(pipeline):
        message = pipeline.get_bus().timed_pop_filtered(60 * Gst.SECOND, Gst.MessageType.EOS | Gst.MessageType.ERROR)
        told["end"] = "timeout" if message is None else str(message.type.first_value_nick)
        if message and message.type == Gst.MessageType.ERROR:
            told["error"] = message.parse_error()[0].message

    source = "videotestsrc num-buffers=40 ! video/x-raw,width=64,height=48,framerate=20/1"
    live = source.replace("videotestsrc", "videotestsrc is-live=true")
    element = f"videoconvert qos=false ! tvmpipeline name=t {model}"
    pipeline = Gst.parse_launch(f"{live if scene in ('live', 'late') else source} ! {element} ! fakesink name=s")
    t = pipeline.get_by_name("t")
    t.get_static_pad("src").add_probe(Gst.PadProbeType.BUFFER, seen)
    if scene == "live":
        pipeline.set_state(Gst.State.PLAYING)
        query = Gst.Query.new_latency()
        while not told["pts"]:  # the model is opened meanwhile
            pipeline.get_state(Gst.SECOND)
        told["has_latency"] = t.get_static_pad("src").query(query)
        told["latency"] = list(query.parse_latency())
        ended(pipeline)
    elif scene == "late":
        pipeline.set_state(Gst.State.PLAYING)
        while len(told["pts"]) < 5:
            pipeline.get_state(Gst.SECOND // 10)
        told["before"] = len(told["pts"])
        far = Gst.Event.new_qos(Gst.QOSType.UNDERFLOW, 2.0, 3600 * Gst.SECOND, 0)
        told["took"] = t.get_static_pad("src").send_event(far)
        ended(pipeline)
        told["dropped"] = t.get_property("dropped")
    elif scene == "seek":
        pipeline.set_state(Gst.State.PAUSED)
        pipeline.get_state(60 * Gst.SECOND)
        told["pts"].clear()
        told["sought"] = pipeline.seek_simple(Gst.Format.TIME, Gst.SeekFlags.FLUSH, Gst.SECOND)
        pipeline.set_state(Gst.State.PLAYING)
        ended(pipeline)
    elif scene == "restart":
        for _ in range(2):
            pipeline.set_state(Gst.State.PLAYING)
            ended(pipeline)
            pipeline.set_state(Gst.State.READY)
            pipeline.set_state(Gst.State.NULL)
    elif scene == "stop":
        pipeline.set_state(Gst.State.PAUSED)  # the sink takes one picture, and the others wait
        pipeline.get_state(60 * Gst.SECOND)
    else:
        pipeline.set_state(Gst.State.PLAYING)
        ended(pipeline)
    told["stopped"] = pipeline.set_state(Gst.State.NULL) == Gst.StateChangeReturn.SUCCESS
    return told


model, *scenes = sys.argv[1:]
sys.stdout.write(json.dumps({scene: play(scene, model) for scene in scenes}) + "\n")
