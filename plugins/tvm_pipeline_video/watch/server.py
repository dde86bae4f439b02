"""A running pipeline over HTTP: what is answered to requests.

    /metrics            for Prometheus
    /health             200, or 503 if no frame has come out for too long; JSON tells why
    /state              everything that a screen shows, as JSON (state.py)
    /trace?seconds=10   the latest work of each device, as a Chrome trace
    /cut.svg            the operator graph as the present plan cuts it
    /frame.jpg          the last frame, or that of ?source=TAG, if there is a picture
    /                   a page that draws these

Read next: site.py, who may make requests; snapshot.py, the data of the answers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers

from tvm_pipeline import Stage
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.watch.cut import cut_svg
from tvm_pipeline_video.watch.metrics import new_registry
from tvm_pipeline_video.watch.site import Reply, Site, json_reply, metrics_reply, page_reply, text_reply
from tvm_pipeline_video.watch.snapshot import Snapshot, WatchedPipeline
from tvm_pipeline_video.watch.trace import chrome_trace

LONGEST_TRACE_S = 600.0


class WatchServer(Site):
    """Answers requests about a running pipeline, in its own threads. Use it as a context manager, which stops them.

    Args:
        address: where to listen; an address that is not loopback needs a token.
        port: 0 takes any free one; `url` says which.
        token: the secret that a client must send; at least 16 characters of ASCII, no blanks.
        unhealthy_after_s: seconds without a result after which the pipeline is unhealthy.
        picture: returns the last frame of a source, or of any (empty), as JPEG; None if there is none yet.

    Raises:
        OptionError: it cannot listen there, or the token is missing or unfit.
    """

    def __init__(
        self,
        watched: WatchedPipeline,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        unhealthy_after_s: float = 10.0,
        picture: Callable[[str], bytes | None] | None = None,
    ) -> None:
        if not 0 < unhealthy_after_s < math.inf:
            raise OptionError(f"unhealthy after {unhealthy_after_s:g} s: give seconds above 0")
        self._watched, self._picture = watched, picture
        self._unhealthy_after_s = unhealthy_after_s
        self._registry = new_registry(watched)
        self._drawing = threading.Lock()  # one request draws, the others wait for it
        self._drawn: tuple[tuple[Stage, ...], bytes] | None = None
        super().__init__(address, port, token=token)

    def answer(self, path: str, query: str, headers: Headers) -> Reply:
        match path:
            case "/":
                return page_reply(__package__, "page.html")
            case "/metrics":
                return metrics_reply(self._registry, headers)
            case "/health":
                return self._health()
            case "/state":
                snapshot, statistics = self._watched.snapshot(), self._watched.statistics()
                has_picture = self._picture is not None
                return json_reply(
                    HTTPStatus.OK, snapshot.state(statistics, self._unhealthy_after_s, picture=has_picture)
                )
            case "/trace":
                return self._trace(query)
            case "/cut.svg":
                return self._cut()
            case "/frame.jpg":
                source = parse_qs(query).get("source", [""])[0]
                picture = self._picture(source) if self._picture else None
                if picture:
                    return HTTPStatus.OK, "image/jpeg", picture
                return text_reply(HTTPStatus.NOT_FOUND, "there is no picture of a frame")
        return text_reply(
            HTTPStatus.NOT_FOUND, "there are /metrics /health /state /trace?seconds=10 /cut.svg /frame.jpg and /"
        )

    def _health(self) -> Reply:
        facts: dict[str, Any] = {}
        try:
            snapshot: Snapshot = self._watched.snapshot()
        except Exception as error:  # a pipeline without a snapshot is not healthy
            why = f"the pipeline cannot tell how it is: {type(error).__name__}: {error}"
        else:
            why = snapshot.health(self._unhealthy_after_s)
            facts = {"frames": snapshot.frames, "since_last_frame_s": snapshot.since_last_frame_s}
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        return json_reply(status, {"healthy": not why, "why": why, **facts})

    def _cut(self) -> Reply:
        plan = self._watched.snapshot().plan
        with self._drawing:
            if self._drawn is None or self._drawn[0] != plan.stages:
                self._drawn = plan.stages, cut_svg(self._watched.graph, plan)
            return HTTPStatus.OK, "image/svg+xml", self._drawn[1]

    def _trace(self, query: str) -> Reply:
        text = parse_qs(query).get("seconds", ["10"])[0]
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= LONGEST_TRACE_S:
            return text_reply(
                HTTPStatus.BAD_REQUEST, f"seconds={text!r}: give a number above 0, up to {LONGEST_TRACE_S:g}"
            )
        since_s, snapshot = time.perf_counter() - seconds, self._watched.snapshot()
        times = [(snapshot.began_s + event["time_s"], event) for event in snapshot.events]
        marks = [(time_s, f"{event['kind']}: {event['reason']}") for time_s, event in times if time_s >= since_s]
        trace = chrome_trace(self._watched.bars(since_s), snapshot.plan.graph, marks)
        return json_reply(HTTPStatus.OK, trace)
