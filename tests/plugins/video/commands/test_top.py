"""`top`: what it shows of a run, and what it says where there is none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from tests.support.parts import needs

needs("prometheus_client")

from rich.console import Console

from tests.plugins.video.watch.test_metrics import source
from tests.plugins.video.watch.watched import Watching, watching
from tvm_pipeline_video.commands import top
from tvm_pipeline_video.watch import WatchServer
from tvm_pipeline_video.watch.state import State

TOKEN = "a-token-for-the-tests"


@pytest.fixture(scope="module")
def watched() -> Watching:
    made = watching()
    made.sources = {"door": source(read=61, dropped={"latest": 4, "max-age": 2}, age_p50_s=0.012, age_p99_s=0.3)}
    made.sources["hall"] = source(problem="the cable [red] was pulled")
    made.more = {"factors": {"d0": 1.25}, "events": [{"time_s": 0.0, "kind": "switch", "reason": "d0 is [slow]"}]}
    return made


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("TVM_PIPELINE_TOKEN", raising=False)


def test_once_prints_all_of_it(cli, watched):
    with WatchServer(watched) as server:
        outcome = cli("top", server.url, "--once")
        assert cli("top", urlsplit(server.url).netloc, "--once").code == 0
    assert outcome.code == 0
    for said in ("chain: plan 1", "30 frames out", "healthy", "0 on d0", "1 on d2", "door", "4 latest, 2 max-age"):
        assert said in outcome.out
    for said in (
        "12.0 ms",
        "300 ms",
        "d0 x1.25",
        "switch: d0 is [slow]",
        "throughput, fps",
        "hall: the cable [red] was pulled",
    ):
        assert said in outcome.out


@pytest.mark.parametrize(("paced", "told"), [(True, "The source sets the pace"), (False, "latency under load, median")])
def test_a_rate_that_was_given_is_no_error_of_the_prediction(cli, paced, told):
    """As of frames that a camera sends: the table says who sets the pace, and no per cent of another rate."""
    slow = watching()
    slow.more["paced"] = paced
    slow.measured = replace(slow.measured, throughput_fps=10.0, latency_p50_s=0.005)
    with WatchServer(slow) as server:
        assert told in cli("top", server.url, "--once").out


@pytest.mark.parametrize("way", ["option", "environment", "url"])
def test_a_token_opens_and_is_never_printed(cli, watched, monkeypatch, way):
    with WatchServer(watched, token=TOKEN) as server:
        url, options = server.url, []
        if way == "option":
            options = ["--token", TOKEN]
        elif way == "environment":
            monkeypatch.setenv("TVM_PIPELINE_TOKEN", TOKEN)
        else:
            url += f"?token={TOKEN}"
        outcome = cli("top", url, "--once", *options)
    assert (outcome.code, "30 frames out" in outcome.out) == (0, True)
    gone = cli("top", url, "--once", *options)
    assert gone.code == 1
    assert TOKEN not in outcome.out + outcome.err + gone.out + gone.err


def test_a_wrong_token_is_refused(cli, watched):
    with WatchServer(watched, token=TOKEN) as server:
        for options, said in (((), "wants a token"), (("--token", "wrong-one"), "does not take this token")):
            outcome = cli("top", server.url, *options)
            assert outcome.code != 0
            assert said in outcome.err
            assert "--token" in outcome.err
            assert "wrong-one" not in outcome.err


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://", "http://127.0.0.1:99999/?token=se-cret", "[::1", ""])
def test_what_is_no_url(cli, url):
    outcome = cli("top", url)
    assert outcome.code != 0
    assert "is no URL of a run; give one such as http://127.0.0.1:9600/" in outcome.err
    assert "se-cret" not in outcome.err


def test_nobody_there(cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        outcome = cli("top", f"http://127.0.0.1:{port}/")
    assert outcome.code == 1
    assert f"no answer from http://127.0.0.1:{port}/ (Connection refused)" in outcome.err
    assert f"run ... --watch {port}" in outcome.err


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.0 404 Not Found\r\n\r\n",
        b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b'HTTP/1.0 200 OK\r\n\r\n{"frames": "many"}',
    ],
)
def test_another_program_there(cli, answer):
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def serve() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        outcome = cli("top", f"127.0.0.1:{stranger.getsockname()[1]}")
        server.join()
    assert outcome.code == 1
    assert "is no `tvm-pipeline run --watch` of this version" in outcome.err


def text_of(shown: object) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_a_run_that_goes_away_and_comes_back(watched, monkeypatch):
    monkeypatch.setattr(top, "LOOK_EVERY_S", 0.01)
    with WatchServer(watched) as first:
        url = first.url
        server = top.server_at(url, None)
        views = top._views(server, server.state(State))
        assert "healthy" in text_of(next(views))
        assert "no answer" not in text_of(next(views))
    shown = text_of(next(views))
    assert f"no answer from {url} for 0 s" in shown
    assert "30 frames out" in shown  # what was seen last
    with WatchServer(watched, port=server.port):
        shown = text_of(next(views))
    assert "no answer" not in shown


@pytest.mark.thorough
def test_ctrl_c_ends_it_well(watched):
    command = [sys.executable, "-c", "from tvm_pipeline.cli import main; main()", "top"]
    with WatchServer(watched) as server:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "FORCE_COLOR": "1"}  # as a terminal has it
        process = subprocess.Popen([*command, server.url], stdout=subprocess.PIPE, env=environment)
        assert process.stdout.read(1)  # it shows something
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0
