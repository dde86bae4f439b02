"""The live picture: how often it is drawn, and that nobody who looks holds up another."""

from __future__ import annotations

import socket
import threading
import time
from io import BytesIO
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest

from tests.support.parts import needs

needs("prometheus_client")
needs("PIL")

from PIL import Image

from tests.plugins.video.watch.watched import watching
from tvm_pipeline_video.watch import WatchServer, picture
from tvm_pipeline_video.watch.picture import MOST_WORK, PERIOD_S, Preview


class Run:
    """Frames that come at every look, each of one colour, and the times at which they were drawn."""

    def __init__(self, work_s: float = 0.0, side: int = 16) -> None:
        self.drawn: list[tuple[float, float]] = []
        self._work_s, self._side, self.frames = work_s, side, 0

    def latest(self, _: str) -> list[int] | None:
        self.frames += 1
        return [self.frames] if self.frames > 1 else None

    def draw(self, seen: list[int]) -> np.ndarray:
        began_s = time.monotonic()
        time.sleep(self._work_s)
        self.drawn.append((began_s, time.monotonic()))
        return np.random.default_rng(seen[0]).integers(0, 255, (self._side, self._side, 3), np.uint8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("work_s", [0.0, 0.04])
def test_all_who_look_share_a_few_pictures_a_second(work_s):
    run = Run(work_s)
    preview = Preview(run.latest, run.draw)
    assert preview() is None
    until_s, pictures = time.monotonic() + 0.7, []

    def look() -> None:
        while time.monotonic() < until_s or len(run.drawn) < 2:  # a busy machine draws late
            pictures.append(preview())

    viewers = [threading.Thread(target=look) for _ in range(4)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert len(pictures) > 50
    assert len(set(pictures)) == len(run.drawn) >= 2
    for (began_s, ended_s), (next_s, _) in zip(run.drawn, run.drawn[1:], strict=False):
        assert next_s - began_s >= max(PERIOD_S, (ended_s - began_s) / MOST_WORK) * 0.999


def test_a_frame_is_drawn_once_and_none_while_nobody_looks():
    run, frame = Run(), [7]
    preview = Preview(lambda _: frame, run.draw)
    assert run.drawn == []
    first = preview()
    time.sleep(PERIOD_S)
    assert preview() is first
    assert len(run.drawn) == 1
    with Image.open(BytesIO(first)) as picture:
        assert picture.size == (16, 16)


def test_sources_have_pictures_of_their_own_and_one_at_which_nobody_looks_is_forgotten(monkeypatch):
    run, frames = Run(), {"gate": [1], "yard": [2]}
    preview = Preview(frames.get, run.draw)
    assert preview("gate") != preview("yard")
    assert preview("hall") is None
    monkeypatch.setattr(picture, "FORGOTTEN_S", -1.0)
    frames["yard"] = [3]
    time.sleep(2 * PERIOD_S)
    preview("yard")
    assert set(preview._shown) == {"yard"}


def test_a_viewer_that_takes_nothing_holds_up_no_other():
    run = Run(side=900)  # noise of this size does not fit into a socket
    run.frames = 1
    with WatchServer(watching(), picture=Preview(run.latest, run.draw)) as server:
        slow = []
        for _ in range(5):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
            connection.sendall(b"GET /frame.jpg HTTP/1.0\r\n\r\n")
            slow.append(connection)
        for _ in range(3):
            with urlopen(server.url + "frame.jpg", timeout=5) as answer:
                assert answer.read(2) == b"\xff\xd8"
        for connection in slow:
            connection.close()
