"""Streams over http, HLS and UDP that are cut off, fall silent and come back; servers and senders are real."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import av
import numpy as np
import pytest

from tests.plugins.video.cameras import QUICK, explained
from tests.plugins.video.test_sources import FRAMES, answer, encode, serving
from tvm_pipeline_video import LiveSource, open_source, parse_policy


def test_an_http_stream_that_is_killed_and_comes_back(clip: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = clip.read_bytes()
    served = itertools.count()

    def send(handler: BaseHTTPRequestHandler) -> None:
        number = next(served)
        if number == 1:  # the server is up before its camera is
            handler.send_error(503)
        else:
            answer(handler, content if number else content[: len(content) // 2])

    with caplog.at_level(logging.WARNING), serving(send) as url, LiveSource(url, reconnect=QUICK) as source:
        frames = list(itertools.islice(source, FRAMES + 15))
        counts = source.statistics()
    assert [frame.index for frame in frames] == list(range(FRAMES + 15))
    assert [frame.time_s for frame in frames] == sorted(frame.time_s for frame in frames)
    assert counts.reconnects >= 2
    assert "5XX Server Error" in caplog.text
    assert "secret" not in caplog.text + source.name + frames[0].source


def test_a_stream_that_says_its_length_ends_there(clip: Path) -> None:
    content = clip.read_bytes()
    with serving(lambda handler: answer(handler, content, len(content))) as url, LiveSource(url) as source:
        assert len(list(source)) == FRAMES
        assert source.statistics().reconnects == 0


@pytest.mark.thorough
def test_an_http_server_that_falls_silent_is_asked_again(clip: Path) -> None:
    content, done, served = clip.read_bytes(), threading.Event(), itertools.count()

    def send(handler: BaseHTTPRequestHandler) -> None:
        number = next(served)
        answer(handler, content if number else content[: len(content) // 2])
        if not number:
            done.wait(20)

    with serving(send) as url, LiveSource(url, stall_s=1.0, reconnect=QUICK) as source:
        frames = list(itertools.islice(source, FRAMES))
        done.set()
    assert [frame.index for frame in frames] == list(range(FRAMES))
    assert source.statistics().reconnects >= 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ends", [True, False])
def test_a_playlist_lives_until_it_says_its_end(tmp_path: Path, ends: bool) -> None:
    encode(tmp_path / "live.m3u8", hls_list_size="0")
    playlist = (tmp_path / "live.m3u8").read_text()
    assert "#EXT-X-ENDLIST" in playlist
    if not ends:
        (tmp_path / "live.m3u8").write_text(playlist.replace("#EXT-X-ENDLIST\n", ""))

    def send(handler: BaseHTTPRequestHandler) -> None:
        name = Path(handler.path).name
        content = (tmp_path / name).read_bytes()
        answer(handler, content, len(content))

    with serving(send) as url, open_source(url.replace("live.ts", "live.m3u8")) as source:
        assert next(source).image.shape == (120, 160, 3)
        assert source.live is not ends
    with open_source("synthetic") as synthetic:
        assert not synthetic.live


@pytest.mark.thorough
def test_a_sender_by_udp_that_stops_and_starts_again_with_another_size() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        url = f"udp://127.0.0.1:{free.getsockname()[1]}"

    @contextmanager
    def sending(size: tuple[int, int]) -> Iterator[None]:
        stop = threading.Event()

        def send() -> None:
            with av.open(f"{url}?pkt_size=1316", "w", format="mpegts") as container:
                stream = container.add_stream("libx264", rate=25, options={"tune": "zerolatency", "g": "5"})
                stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
                image = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
                while not stop.wait(0.02):
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(image)))

        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield
        finally:
            stop.set()
            sender.join()

    with ExitStack() as stack:
        with sending((160, 120)):
            source = stack.enter_context(LiveSource(url, parse_policy("latest"), stall_s=2.0, reconnect=QUICK))
            frames = iter(source)
            assert next(frames).image.shape == (120, 160, 3)
        while not source.statistics().reconnects:
            time.sleep(0.01)
        with sending((96, 64)):
            frame = next(frame for frame in frames if frame.image.shape == (64, 96, 3))
    assert frame.time_s > 1
    assert explained(source).keys() <= {"latest", "closed"}


def test_damage_is_counted_as_in_a_source(clip: Path, tmp_path: Path) -> None:
    content = bytearray(clip.read_bytes())
    middle = int(len(content) * 0.4)
    content[middle : middle + 1500] = np.random.default_rng(1).bytes(1500)
    damaged = tmp_path / "damaged.ts"
    damaged.write_bytes(content)
    with LiveSource(str(damaged)) as source, open_source(str(damaged)) as same:
        assert len(list(source)) == len(list(same))
        assert source.statistics().damaged == same.damaged >= 1
