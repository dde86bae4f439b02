"""`run` with several sources, with events and watched; and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from io import BytesIO
from itertools import groupby

import pytest
from PIL import Image

from tests.plugins.video.test_kinds import BY_ID, install
from tests.support.parts import needs
from tvm_pipeline_video.hardware import hardware_decoders
from tvm_pipeline_video.service.inputs import is_live

WIDE, SMALL = "synthetic:64x48@30:20", "synthetic:32x32@30:10"


def test_several_sources_each_in_its_own_order(cli, bundle, tmp_path):
    lines = tmp_path / "lines.jsonl"
    outcome = cli("run", bundle, "--source", WIDE, "--source", SMALL, "--results", lines, "--json")
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    frames = {name: [row["frame"] for row in rows if row["source"] == name] for name in (WIDE, SMALL)}
    assert frames == {WIDE: list(range(20)), SMALL: list(range(10))}
    assert {name: found["delivered"] for name, found in outcome.json["sources"].items()} == {WIDE: 20, SMALL: 10}
    assert all(row["age_s"] >= 0 for row in rows)


@pytest.mark.thorough
def test_a_policy_lets_frames_go_and_counts_them(cli, bundle, tmp_path):
    outcome = cli("run", bundle, "--source", WIDE, "--policy", "every=4", "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json["sources"][WIDE]
    assert (found["read"], found["delivered"], found["dropped"]) == (20, 5, {"every": 15})
    assert outcome.json["measured"]["frames"] == 5


@pytest.mark.thorough
def test_a_limit_counts_the_frames_of_all_sources(cli, bundle):
    outcome = cli("run", bundle, "--source", WIDE, "--source", SMALL, "--limit", 7, "--json")
    assert outcome.json["measured"]["frames"] == 7, outcome.err


def test_what_was_decided_can_be_read_back(cli, bundle, tmp_path):
    events = tmp_path / "events.jsonl"
    for _ in range(2):  # a second run adds to it
        assert cli("run", bundle, "--source", WIDE, "--events", events, "--adapt", "off").code == 0
    kinds = [json.loads(line)["kind"] for line in events.read_text().splitlines()]
    assert [kind for kind, _ in groupby(kinds)] == ["start"]
    assert len(kinds) == 2


def test_a_watched_run_says_where(cli, bundle):
    needs("prometheus_client")
    outcome = cli("run", bundle, "--source", WIDE, "--watch", "0")
    assert outcome.code == 0
    assert "watch it at http://127.0.0.1:" in outcome.err


def test_a_policy_for_each_source(cli, bundle):
    outcome = cli(
        "run", bundle, "--source", WIDE, "--source", SMALL, "--policy", "block", "--policy", "every=5", "--json"
    )
    assert outcome.code == 0, outcome.err
    found = outcome.json["sources"]
    assert {name: found[name]["delivered"] for name in (WIDE, SMALL)} == {WIDE: 20, SMALL: 2}


def test_what_films_by_itself_is_given_as_the_latest():
    assert all(map(is_live, ("camera:0", "/dev/video1", BY_ID, "CAMERA:0", "rtsp://gate/1", "udp://0.0.0.0:5000")))
    assert not any(map(is_live, ("bikes.mp4", "pictures", WIDE, "http://host/bikes.mp4", "/dev/shm/bikes.mp4")))


@pytest.mark.parametrize("spec", ["camera:97", "CAMERA:97", BY_ID])
def test_a_camera_is_one_however_it_is_named(cli, bundle, spec):
    """It is opened as a camera, and two models cannot have it at the same time."""
    outcome = cli("run", bundle, "--source", spec)
    assert outcome.code == 1
    assert f"there is no camera {BY_ID if spec == BY_ID else '/dev/video97'}" in outcome.err.replace("\n", "")
    outcome = cli("run", bundle, bundle, "--source", spec, "--source", spec)
    assert outcome.code == 2
    assert "twice; a camera can be opened once only" in " ".join(outcome.err.split())


@pytest.mark.thorough
def test_a_source_of_an_installed_package(cli, bundle, tmp_path, monkeypatch):
    """It films by itself, so it is read ahead and its newest frame is the one that waits."""
    install(tmp_path, "film = tests.plugins.video.test_kinds:FILM")
    monkeypatch.syspath_prepend(tmp_path)
    outcome = cli("run", bundle, "--source", "film:1000000", "--limit", 12, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["sources"]["film:1000000"]["delivered"] >= 12
    assert set(outcome.json["sources"]["film:1000000"]["dropped"]) <= {"latest", "closed"}


def test_several_models_each_with_its_source(cli, bundle, tmp_path):
    """One file twice; each model's frames are whole, and what is found is as in a run of its own."""
    (tmp_path / "other.tar").symlink_to(bundle)
    lines, alone = tmp_path / "lines.jsonl", tmp_path / "alone.jsonl"
    outcome = cli(
        "run", bundle, tmp_path / "other.tar", "--source", WIDE, "--source", WIDE, "--results", lines, "--json",
        "--events", tmp_path / "events.jsonl",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert [(one["model"], one["measured"]["frames"]) for one in outcome.json["models"]] == [("net", 20), ("other", 20)]
    assert cli("run", bundle, "--source", WIDE, "--results", alone).code == 0
    expected = [(row["frame"], row["outputs"]) for row in map(json.loads, alone.read_text().splitlines())]
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    for model in ("net", "other"):
        assert [(row["frame"], row["outputs"]) for row in rows if row["model"] == model] == expected
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted(event["model"] for event in events if event["kind"] == "start") == ["net", "other"]


def test_one_model_that_fails_ends_the_run_and_what_the_other_gave_is_kept(cli, bundle, tmp_path):
    folder, lines = tmp_path / "pictures", tmp_path / "lines.jsonl"
    folder.mkdir()
    for number in range(20):
        Image.new("RGB", (64, 48)).save(folder / f"{number}.png")
    (folder / "20.png").write_bytes(b"no picture")
    outcome = cli("run", bundle, bundle, "--source", folder, "--source", "synthetic:64x48", "--results", lines)
    assert outcome.code == 1
    assert "20.png" in outcome.err
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    for model in ("net-1", "net-2"):
        frames = [row["frame"] for row in rows if row["model"] == model]
        assert frames == list(range(len(frames)))
        assert frames


@pytest.mark.thorough
def test_what_is_planned_for(cli, bundle):
    outcome = cli("run", bundle, "--source", WIDE, "--objective", "latency", "--adapt", "off", "--json")
    assert outcome.code == 0, outcome.err
    assert list(outcome.json["objectives"]) == ["latency"]


@pytest.mark.thorough
def test_a_full_disk_for_the_events_does_not_end_the_run(cli, bundle):
    outcome = cli("run", bundle, "--source", SMALL, "--events", "/dev/full", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["measured"]["frames"] == 10
    assert "--events /dev/full" in outcome.err
    assert "it lacks: the run begins" in outcome.err


@pytest.mark.thorough
def test_a_port_in_use(cli, bundle):
    """Of two models the second is watched at the next port."""
    needs("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--source", WIDE, "--source", SMALL, "--watch", port - 1)
        outcome = cli("run", bundle, bundle, *options)
    assert outcome.code == 2
    assert f"--watch 127.0.0.1:{port}: cannot listen" in outcome.err


def test_the_last_picture_is_served(cli, bundle):
    needs("prometheus_client")
    pictures: list[bytes] = []

    def ask(port: int) -> None:
        until_s = time.monotonic() + 60
        while not pictures and time.monotonic() < until_s:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/frame.jpg") as answer:
                pictures.append(answer.read())
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    thread = threading.Thread(target=ask, args=(port,))
    thread.start()
    outcome = cli("run", bundle, "--source", "synthetic:64x48", "--watch", port)
    thread.join()
    assert outcome.code == 0, outcome.err
    assert "draining" in outcome.err
    assert Image.open(BytesIO(pictures[0])).size == (64, 48)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--adapt", "sometimes"), "--adapt sometimes: there is no strategy sometimes; there are off, replan"),
        (("--watchdog", "0"), "--watchdog 0: it must be positive"),
        (("--source", ""), "--source is an empty text; give a file, an address or a camera"),
        (("--policy", "newest"), "--policy newest: cannot use 'newest'; it takes block"),
        (("--policy", "latest", "--policy", "block"), "--policy is given 2 times for 1 sources; give it once, or"),
        (("--unhealthy-after", "0"), "--unhealthy-after 0: it must be positive"),
        (("--objective", "memory,communication"), "counts bytes, which do not change while a plan runs"),
        (("--objective", "latency", "--max-latency", "1"), "--max-latency goes with objective throughput"),
        (("--max-latency", "1e-9"), "1e-09"),
        (("--output", "out.mp4", "--supervise"), "--output with --supervise: a video cannot go on"),
        (("--overlay",), "--overlay goes with --output"),
        (("--output", "nowhere/out.mp4"), "cannot write nowhere/out.mp4: there is no folder nowhere"),
        (("--segment", "nan", "--output", "out.mp4"), "--segment nan: it must be positive"),
        (("--segment", "5"), "--segment is of files; give --output or --results"),
        (("--segment", "5", "--output", "out.mp4", "--results", "-"), "--segment with --results -: standard output"),
        (("--segment", "5", "--results", "/dev/null"), "--segment: /dev/null is no file that could be numbered"),
        (("--source", WIDE), "--source names one source twice"),
        (("--source", SMALL, "--output", "out.mp4"), "--output is a video of one source"),
        (("--events", "/nowhere/events.jsonl"), "--events /nowhere/events.jsonl: No such file or directory"),
        (("--watch", "here"), "--watch here: give it as PORT or ADDRESS:PORT"),
        (("--watch", "0.0.0.0:0"), "token"),
        (("--token", "secret"), "--token goes with --watch"),
    ],
)
def test_what_run_refuses(cli, bundle, options, said):
    needs("prometheus_client")
    outcome = cli("run", bundle, "--source", WIDE, *options)
    assert outcome.code in (1, 2)
    assert said in outcome.err
    assert "Traceback" not in outcome.err


def test_a_report_without_matplotlib_is_refused_before_anything_runs(cli, bundle, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("tvm_pipeline_video.service.running.opened_models", None)
    outcome = cli("run", bundle, "--source", WIDE, "--report", tmp_path / "report")
    assert "pictures need matplotlib" in outcome.err
    assert not (tmp_path / "report").exists()


def test_devices_lists_what_decodes_video(cli, bundle):
    outcome = cli("devices")
    for kind, obstacle in hardware_decoders().items():
        assert f"video decoding by {kind}: it {'does not open' if obstacle else 'opens'} here" in outcome.err
    outcome = cli("run", bundle, "--source", "a.mp4", "--hardware-decoding", "nonsense")
    assert (outcome.code, "--hardware-decoding nonsense: this FFmpeg decodes with" in outcome.err) == (2, True)
