"""Watching a running pipeline from outside: metrics, health, traces and a page, over HTTP.

    with WatchServer(live, port=9600) as server:
        print(server.url)  # /metrics  /health  /state  /trace  /cut.svg  /frame.jpg  and a page at /

A running pipeline does nothing for it, frame by frame: whoever asks, pays, by reading what the run writes down anyway.

snapshot.py  Snapshot, and Watched: what a pipeline must tell of itself
live.py      LiveWatch: that of a LivePipeline
metrics.py   a snapshot as Prometheus metrics
trace.py     what each device did as a Chrome trace, for ui.perfetto.dev
server.py    WatchServer: who may ask, and what is answered
cut.py       the cut drawn on the operator graph
picture.py   a frame as JPEG
page.html    the page, which shows them
"""

from tvm_pipeline.watch.live_watch import LiveWatch
from tvm_pipeline.watch.server import WatchServer
from tvm_pipeline.watch.snapshot import Snapshot, Watched
from tvm_pipeline.watch.trace import chrome_trace, stage_bars

__all__ = ["LiveWatch", "Snapshot", "WatchServer", "Watched", "chrome_trace", "stage_bars"]
