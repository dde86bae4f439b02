"""The element in GStreamer's own programs: every picture once and in order, events, latency, lateness and errors."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import bundle, model
from tests.support.parts import needs

needs("GStreamer")

__all__ = ["bundle", "model"]
APPLICATION = Path(__file__).with_name("gstreamer_application.py")
FRAME_NS = 50_000_000
FOUND = """
from tvm_pipeline_video import Annotation
def decode(outputs, transform):
    return [Annotation("thing", 0.5, (4.0, 6.0, 20.0, 30.0))]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    said = subprocess.run(
        [sys.executable, "-m", "tvm_pipeline_video.gstreamer"], capture_output=True, text=True, check=True
    )
    exported = dict(shlex.split(line)[1].split("=", 1) for line in said.stdout.splitlines())
    return os.environ | exported | {"GST_REGISTRY": str(tmp_path_factory.mktemp("gst") / "registry")}


@pytest.fixture(scope="module")
def scenes(environment, bundle) -> dict[str, dict]:
    """What happened in the scenes that need no options: one process, as each takes seconds to start."""
    return application(environment, f"model={bundle}", "live", "late", "seek", "restart", "stop")


def application(environment: dict[str, str], options: str, *scenes: str) -> dict[str, dict]:
    command = ["/usr/bin/python3", str(APPLICATION), options, *scenes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told: dict[str, dict] = json.loads(done.stdout.splitlines()[-1])
    assert all(scene["stopped"] for scene in told.values())
    return told


def launched(environment: dict[str, str], *line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["gst-launch-1.0", "-q", *line], env=environment, capture_output=True, text=True, timeout=200)


def test_every_picture_goes_through_once_and_in_order(environment, bundle, tmp_path: Path) -> None:
    """Against the same pictures without the element, byte for byte; rows of 50 pixels are padded."""
    source = ["videotestsrc", "num-buffers=30", "!", "video/x-raw,format=RGB,width=50,height=40", "!"]
    through = ["tvmpipeline", f"model={bundle}", "!"]
    for name, between in (("without", []), ("with", through)):
        done = launched(environment, *source, *between, "filesink", f"location={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    shown, wanted = (np.fromfile(tmp_path / name, np.uint8).reshape(30 * 40, 152) for name in ("with", "without"))
    np.testing.assert_array_equal(shown[:, :150], wanted[:, :150])  # GStreamer leaves the padding as it finds it


def test_boxes_are_regions_of_interest_and_drawn(environment, bundle, tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text(FOUND)
    decoder = f"decoder={tmp_path / 'found.py'}:decode"
    told = application(environment, f"model={bundle} {decoder}", "all")["all"]
    assert told["regions"] == [[4, 6, 16, 24, 0.5]] * 40
    assert told["pts"] == [FRAME_NS * number for number in range(40)]
    source = ["videotestsrc", "pattern=black", "num-buffers=1", "!", "video/x-raw,format=RGB,width=64,height=48", "!"]
    for name, draw in (("drawn", "true"), ("plain", "false")):
        sink = ["filesink", f"location={tmp_path / name}"]
        assert not launched(
            environment, *source, "tvmpipeline", f"model={bundle}", decoder, f"draw={draw}", "!", *sink
        ).returncode
    assert any((tmp_path / "drawn").read_bytes())
    assert not any((tmp_path / "plain").read_bytes())


@pytest.mark.thorough
def test_a_live_source_learns_the_latency(scenes) -> None:
    told = scenes["live"]
    live, least, _ = told["latency"]
    assert told["has_latency"]
    assert live
    assert least > 0
    assert (told["end"], len(told["pts"])) == ("eos", 40)


@pytest.mark.thorough
def test_pictures_that_are_too_late_are_dropped_before_any_work(scenes) -> None:
    told = scenes["late"]
    assert told["end"] == "eos"
    assert told["before"] <= len(told["pts"]) < 40
    assert told["dropped"] == 40 - len(told["pts"])


@pytest.mark.thorough
def test_a_seek_leaves_nothing_of_before(scenes) -> None:
    told = scenes["seek"]
    assert told["end"] == "eos"
    after = told["pts"][told["pts"].index(1_000_000_000) :]
    assert after[0] == 1_000_000_000
    assert after == sorted(after)


@pytest.mark.thorough
def test_it_starts_again_and_stops_in_the_middle(scenes) -> None:
    assert len(scenes["restart"]["pts"]) == 80  # and "stop" has stopped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("model=nowhere.tar", "`model` 'nowhere.tar': there is no such file"),
        ("", "give a bundle of `compile` or a model"),
        ("model={bundle} decoder=yolov99", "decoder"),
    ],
)
def test_what_cannot_be_opened_is_an_error_of_the_element(environment, bundle, options: str, message: str) -> None:
    options = options.format(bundle=bundle)
    done = launched(
        environment, *f"videotestsrc num-buffers=3 ! videoconvert ! tvmpipeline {options} ! fakesink".split()
    )
    assert done.returncode
    assert message in done.stderr
