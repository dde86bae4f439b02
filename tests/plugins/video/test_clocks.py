"""Live streams whose clock falls, stands, jumps or is missing: no frame is lost by it, and no result is odd.

Most streams are real: MPEG-TS over HTTP, with such times in its packets. Arrival has a clock of its own here.
"""

from __future__ import annotations

import io
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import av
import msgspec
import numpy as np
import pytest

from tests.plugins.video.cameras import camera
from tests.plugins.video.test_sources import serving
from tvm_pipeline.runtime import Result
from tvm_pipeline_video import LiveFrame, LiveSource, Reconnect, parse_policy
from tvm_pipeline_video.analysis import Analysis
from tvm_pipeline_video.decoding import Picture
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.service.log_files import segment_numbers, segment_path
from tvm_pipeline_video.service.result_files import ResultFiles
from tvm_pipeline_video.service.result_lines import ResultLine, result_line
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.sources import JUMP_S

PERIOD_S = 1 / 25
DAY_S = 86400.0
WRAP_S = 2**33 / 90000  # the times of MPEG-TS begin again after 26.5 hours

Times = Sequence[float]  # of the pictures of a connection
Opened = Callable[[str], LiveSource]  # by its policy
Clock = Callable[[], AbstractContextManager[tuple[Opened, int]]]  # how the source is opened, and how many pictures come


def play(start_s: float, count: int, step_s: float = PERIOD_S) -> list[float]:
    return [start_s + step_s * index for index in range(count)]


def stream(*connections: Times, ends: str = "breaks", stall_s: float = 20.0) -> Clock:
    """A camera that is reached by HTTP: one connection after the other, each of which breaks, ends well or hangs."""
    return partial(_streamed, connections, ends, stall_s)


@contextmanager
def _streamed(connections: Sequence[Times], ends: str, stall_s: float) -> Iterator[tuple[Opened, int]]:
    contents = [mpegts(times_s) for times_s in connections]
    with ExitStack() as stack:

        def opened(policy: str) -> LiveSource:
            waiting, done = iter(contents), threading.Event()
            stack.callback(done.set)
            url = stack.enter_context(serving(partial(_answer, waiting, ends, done)))
            once = Reconnect(0.01, 0.01, attempts=1)
            return LiveSource(url, parse_policy(policy), reconnect=once, stall_s=stall_s)

        yield opened, sum(map(len, connections))


def _answer(waiting: Iterator[bytes], ends: str, done: threading.Event, handler: BaseHTTPRequestHandler) -> None:
    content = next(waiting, None)
    if content is None:
        handler.send_error(404)
        return
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
    if ends == "well":
        handler.wfile.write(b"0\r\n\r\n")
    if ends == "hangs":
        done.wait(60)
    handler.close_connection = True


def mpegts(times_s: Times) -> bytes:
    """MPEG-TS with a picture at each of these times, which are written over those of the muxer."""
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as container:
        made = container.add_stream("libx264", rate=25, options={"preset": "ultrafast", "tune": "zerolatency"})
        made.width, made.height, made.pix_fmt = 32, 16, "yuv420p"
        for _ in times_s:
            container.mux(made.encode(av.VideoFrame.from_ndarray(np.zeros((16, 32, 3), np.uint8))))
        container.mux(made.encode(None))
    content, following = bytearray(file.getvalue()), iter(times_s)
    for at in range(0, len(content), 188):
        payload = at + 4 + (content[at + 4] + 1 if content[at + 3] & 0x20 else 0)
        if content[at + 1] & 0x40 and content[payload : payload + 4] == b"\0\0\1\xe0":  # where a picture begins
            ticks = round(next(following) * 90000) % 2**33
            stamps = 2 if content[payload + 7] & 0x40 else 1  # of the display alone, or of the decoder, too
            for place in range(stamps):
                begin = payload + 9 + 5 * place
                content[begin : begin + 5] = _stamp(stamps + 1 if place == 0 else 1, ticks)
    assert next(following, None) is None
    return bytes(content)


def _stamp(mark: int, ticks: int) -> bytes:
    """The 33 bits of a time in the header of a packet, ISO/IEC 13818-1, table 2-21."""
    high, middle, low = ticks >> 30, ticks >> 15 & 0x7FFF, ticks & 0x7FFF
    return bytes((mark << 4 | high << 1 | 1, middle >> 7, middle << 1 & 0xFE | 1, low >> 7, low << 1 & 0xFE | 1))


def pictures(*connections: Times) -> Clock:
    """A camera of an installed kind, whose connections state these times."""
    return partial(_filmed, connections)


@contextmanager
def _filmed(connections: Sequence[Times]) -> Iterator[tuple[Opened, int]]:
    def opened(policy: str) -> LiveSource:
        image = np.zeros((16, 32, 3), np.uint8)
        films = [partial(map, partial(Picture, image=image), times_s) for times_s in connections]
        once = Reconnect(0.01, 0.01, attempts=1)
        return LiveSource("cam", parse_policy(policy), open=camera(*films), reconnect=once)

    yield opened, sum(map(len, connections))


CLOCKS = {
    "falls to 0": stream(play(1000, 12) + play(0, 24)),
    "jumps by a day": stream(play(0, 12) + play(DAY_S, 24)),
    "loops": stream(play(0, 8) * 5),
    "breaks and begins again": stream(play(50, 12), play(0, 24)),
    "is no number": pictures([math.nan] * 30),
    "stalls, then begins again": stream(play(50, 12), play(0, 24), ends="hangs", stall_s=0.5),
    "runs": stream(play(0, 40)),
    "begins late": stream(play(5000, 30)),
    "falls by a second": stream(play(5, 12) + play(4, 24)),
    "falls by a picture": stream(play(1, 12) + play(1 + 10 * PERIOD_S, 24)),
    "falls again and again": stream(play(400, 8) + play(300, 8) + play(200, 8) + play(100, 8) + play(0, 8)),
    "runs backwards": stream(play(10, 30, -PERIOD_S)),
    "stands": stream([7.0] * 30),
    "is coarse": stream([7.0 + index // 25 for index in range(60)]),
    "stands for a while": stream(play(7, 10) + [7.36] * 10 + play(7.4, 12)),
    "loops over two pictures": stream(play(0, 2) * 15),
    "goes to and fro": stream([1 + PERIOD_S * (index ^ 1) for index in range(30)]),
    "jumps by 11 s": stream(play(0, 12) + play(11.5, 24)),
    "jumps by 9 s": stream(play(0, 12) + play(9.5, 24)),
    "jumps by a day and back": stream(play(0, 12) + play(DAY_S, 6) + play(0.5, 24)),
    "jumps at each picture": stream(play(0, 30, 20.0)),
    "runs fast": stream(play(0, 30, 4 * PERIOD_S)),
    "wraps": stream(play(WRAP_S - 0.5, 36)),
    "wraps in a loop": stream(play(WRAP_S - 0.2, 10) * 4),
    "breaks and goes on": stream(play(0, 12), play(0.5, 24)),
    "breaks and jumps": stream(play(0, 12), play(DAY_S, 24)),
    "breaks after it fell": stream(play(100, 8) + play(0, 8), play(200, 8) + play(0, 12)),
    "breaks five times": stream(*[play(3, 6)] * 6),
    "ends and begins again": stream(play(50, 12), play(0, 24), ends="well"),
    "stalls twice": stream(*[play(9, 12)] * 3, ends="hangs", stall_s=0.5),
    "stalls, then jumps": stream(play(0, 12), play(DAY_S, 24), ends="hangs", stall_s=0.5),
    "is infinite": pictures([0, 1, math.inf, 2, -math.inf, 3, *play(4, 20)]),
    "is now and then no number": pictures([0, 0.04, math.nan, 0.12, math.nan, *play(0.2, 20)], [math.nan] * 9),
}


@pytest.fixture(autouse=True)
def arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each picture arrive 40 ms after the one before, however fast the test is."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + PERIOD_S * next(ticks))
    monkeypatch.setattr("tvm_pipeline_video.sources.time", clock)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("clock", CLOCKS)
def test_each_frame_is_counted_once_each_line_keeps_the_schema_and_segments_end(clock: str, tmp_path: Path) -> None:
    with CLOCKS[clock]() as (opened, count):
        frames, source = taken(opened("block"))
        assert [frame.index for frame in frames] == list(range(count))
        assert source.statistics().dropped == {}
        times_s = [frame.time_s for frame in frames]
        assert np.isfinite(times_s).all()
        assert (np.diff(times_s) >= 0).all()
        assert np.diff(times_s).max() < JUMP_S + 1
        check_segments(frames, tmp_path)

        # At 5 frames a second, the clock may fall and the frames go on.
        thinned, source = taken(opened("fps=5"))
        counts = source.statistics()
        passed = counts.delivered + counts.dropped.get("latest", 0)
        assert counts.read == passed + counts.dropped.get("fps", 0) == count
        assert passed >= count / 6
        assert thinned[-1].index >= count - 6


def taken(source: LiveSource) -> tuple[list[LiveFrame], LiveSource]:
    frames: list[LiveFrame] = []
    with source, pytest.raises(VideoError, match="did not come back in 1 attempts"):
        frames.extend(source)
    return frames, source


def check_segments(frames: list[LiveFrame], folder: Path) -> None:
    """Four segments or so by the arrival of the frames; a search from the beginning finds where each ends."""
    segment_s = (frames[-1].captured_s - frames[0].captured_s) / 4
    segments: list[list[LiveFrame]] = [[]]
    for frame in frames:
        if segments[-1] and frame.captured_s - segments[-1][0].captured_s >= segment_s - 1e-6:
            segments.append([])
        segments[-1].append(frame)
    lines = folder / "lines.jsonl"
    with ResultFiles(Settings(results=str(lines), segment=segment_s), 25.0, keeps=False) as files:
        for frame in frames:
            seen = Analysis(frame, Result(frame.index, {}, 0.01, frame), ())
            files.write(seen, result_line(seen, decoded=True), "", None)
    written = [segment_path(lines, number).read_bytes().splitlines() for number in segment_numbers(lines)]
    found = [[msgspec.json.decode(line, type=ResultLine) for line in segment] for segment in written]
    assert [[line.frame for line in segment] for segment in found] == [[frame.index for frame in s] for s in segments]
    assert len(found) > 1
