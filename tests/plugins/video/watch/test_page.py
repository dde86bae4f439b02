"""The page: what it may ask for, and that a real browser draws a real run with it."""

from __future__ import annotations

import re
import subprocess
import threading
from io import BytesIO
from urllib.request import urlopen

import numpy as np
import pytest

from tests.support.parts import CHROMIUM, needs

needs("prometheus_client")

from tests.plugins.video.watch.watched import watching
from tests.support.fake_backend import busy, chain_model, fake_platform, number
from tvm_pipeline import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline_video.watch import LiveWatch, WatchServer

TOKEN = "a-token-for-the-tests"
OPERATORS = 20


def test_the_page_needs_nothing_from_elsewhere():
    with WatchServer(watching()) as server, urlopen(server.url, timeout=10) as answer:
        text, headers = answer.read().decode(), answer.headers
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?:|@import|url\(|[\"'`]//", text)
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    asked = set(re.findall(r'byId\("([\w-]+)"\)', text)) | set(re.findall(r'(?:fill|chart)\("(\w+)"', text))
    assert asked <= set(re.findall(r'id="([\w-]+)"', text))


@pytest.mark.needs("Chromium")
def test_the_page_draws_a_run_in_chromium(tmp_path):
    needs("PIL")
    from tests.plugins.video.watch.test_live_watch import plan_of
    from tvm_pipeline_video.annotations import jpeg

    names = [f"op{index}" for index in range(OPERATORS)]
    model = chain_model(OPERATORS, hooks={("op0", "d0"): busy(0.002), ("op9", "d1"): busy(0.001)})
    devices = {name: DeviceProfile.in_order(model.graph, (1e-3,) * OPERATORS) for name in ("d0", "d1")}
    problem = Problem(model.graph, fake_platform("d0", "d1"), Profile("chain", model.graph.fingerprint, devices))
    door = {"read": 9, "age_p50_s": 0.02, "age_p99_s": None, "dropped": {"latest": 7}, "reconnects": 3, "fps": 12.5}
    sources = {"door": {**door, "latency_s": 0.031, "problem": "the cable was pulled"}}
    picture = jpeg(np.zeros((90, 160, 3), np.uint8))
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            live.submit(number(0))
            live.result()

    with LivePipeline(model, problem, plan_of(problem, tuple(names[:5]), tuple(names[5:]))) as live:
        runner = threading.Thread(target=run)
        runner.start()
        try:
            watch = LiveWatch(live, lambda: sources)
            with WatchServer(
                watch, token=TOKEN, picture=lambda source: picture if source == "door" else None
            ) as server:
                page, said = in_chromium(f"{server.url}?token={TOKEN}#graph", tmp_path)
        finally:
            done.set()
            runner.join()
    assert "CONSOLE" not in said
    assert re.search(r'<span id="health" class="good">healthy<', page)
    for chart in ("throughput", "latency"):
        points = re.search(r'<polyline points="([^"]+)"', part(page, "svg", chart))
        assert points
        assert "NaN" not in points[1]
    assert len(re.findall(r'<rect [^>]*width="[0-9.]+"', part(page, "svg", "gantt"))) > 5
    drawn = part(page, "div", "cut")
    assert all(f"<title>{name}: add; stage {int(place >= 5)} on d" in drawn for place, name in enumerate(names))
    assert "cut 1: 8 B" in drawn
    assert "7 latest" in part(page, "tbody", "sources")
    assert "the cable was pulled" in part(page, "tbody", "sources")
    tile = part(page, "div", "cameras")
    assert re.search(r'<img alt="latest frame of door" src="blob:', tile)
    assert all(text in tile for text in ("12.5 fps, 31.0", "7 of 9 dropped", "the cable was pulled"))
    assert re.findall(r"<td>(d\d)</td><td><meter", part(page, "tbody", "devices")) == ["d0", "d1"]
    assert "d0: op0 … op4 (5)" in part(page, "div", "line")


def in_chromium(url: str, folder: object) -> tuple[str, str]:
    """The page after some seconds of its own time, as it stands then, and what the browser said."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=3500", "--dump-dom", url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return ended.stdout, ended.stderr


def part(page: str, kind: str, name: str) -> str:
    """The element of that id, which holds none of its own kind."""
    found = re.search(rf'<{kind} [^>]*id="{name}".*?</{kind}>', page, re.DOTALL)
    assert found
    return found[0]


def test_a_large_frame_is_made_smaller_for_the_page():
    needs("PIL")
    from PIL import Image

    from tvm_pipeline_video.annotations import jpeg
    from tvm_pipeline_video.watch.picture import LARGEST

    with Image.open(BytesIO(jpeg(np.full((1080, 1920, 3), (0, 255, 0), np.uint8), LARGEST))) as picture:
        assert (picture.format, picture.size) == ("JPEG", (960, 540))
        assert picture.getpixel((480, 270))[1] > 240
