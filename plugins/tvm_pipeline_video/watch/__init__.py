"""Watching a running pipeline from outside: metrics, health, traces and a page, over HTTP.

    with WatchServer(live, port=9600) as server:
        print(server.url)  # /metrics  /health  /state  /trace  /cut.svg  /frame.jpg  and a page at /

A running pipeline does no extra work per frame. A request is answered from what the run records anyway.

snapshot.py    Snapshot, a pipeline at one moment; WatchedPipeline, what a pipeline must offer to be watched
state.py       the same, as it is sent to `top` and to the page
live_watch.py  LiveWatch: a LivePipeline as WatchedPipeline
metrics.py     a snapshot as Prometheus metrics
trace.py       the work of each device as a Chrome trace, for ui.perfetto.dev
site.py        Site: who may make requests over HTTP, and within which limits
server.py      WatchServer: what is answered
cut.py         the cut drawn on the operator graph
picture.py     Preview: the latest frame as JPEG
page.html      the page that shows all of this
"""

from tvm_pipeline_video.watch.live_watch import LiveWatch
from tvm_pipeline_video.watch.server import WatchServer
from tvm_pipeline_video.watch.snapshot import Snapshot, WatchedPipeline
from tvm_pipeline_video.watch.trace import chrome_trace, stage_bars

__all__ = ["LiveWatch", "Snapshot", "WatchServer", "WatchedPipeline", "chrome_trace", "stage_bars"]
