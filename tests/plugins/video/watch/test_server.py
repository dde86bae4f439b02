"""Over a real socket: what is answered to whom, and what is refused."""

from __future__ import annotations

import json
import re
import socket
import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.plugins.video.watch.watched import WHOLE, Watching, watching
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.watch import WatchServer
from tvm_pipeline_video.watch.cut import cut_svg

TOKEN = "a-token-for-the-tests"
JPEG = b"\xff\xd8 a picture"


@pytest.fixture(scope="module")
def made() -> Watching:
    return watching()


@pytest.fixture
def watched(made) -> Watching:
    made.idle_s, made.more = 0.0, {}
    return made


def get(server, path, method="GET", **headers):
    """Status and body; headers are written with underscores."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


def read_json(server, path):
    status, body, _ = get(server, path)
    return status, json.loads(body)


def raw(server, text):
    with socket.create_connection(urlsplit(server.url).netloc.split(":"), timeout=10) as connection:
        connection.sendall(text)
        return connection.makefile("rb").read()


# What is answered


def test_state_is_all_that_a_screen_needs(watched):
    watched.more = {
        "events": [
            {"time_s": 1.0, "kind": "switch", "reason": "slow", "gain": np.float64(0.2), "plan": watched.plan.stages}
        ]
    }
    with WatchServer(watched) as server:
        status, state = read_json(server, "/state")
    assert status == 200
    assert state["plan"] == str(watched.plan)
    assert state["graph"] == "chain"
    assert state["frames"] == 30
    assert [stage["devices"] for stage in state["stages"]] == [["d0"], ["d1", "d2"]]
    assert state["statistics"]["latency_p50_s"] == watched.measured.latency_p50_s
    assert [stage["device"] for stage in state["statistics"]["stages"]] == ["d0", "d1", "d2"]
    assert state["events"] == [
        {"time_s": 1.0, "kind": "switch", "reason": "slow", "gain": 0.2, "plan": state["stages"]}
    ]
    assert state["healthy"]
    assert "latencies_s" not in state


def test_health_turns_when_no_frame_comes_out_and_back_when_one_does(watched):
    with WatchServer(watched, unhealthy_after_s=3.0) as server:
        assert read_json(server, "/health") == (
            200,
            {"healthy": True, "why": "", "frames": 30, "since_last_frame_s": 0.0},
        )
        watched.idle_s = 4.5
        status, health = read_json(server, "/health")
        assert (status, health["healthy"]) == (503, False)
        assert "4.5 s" in health["why"]
        assert "3 s" in health["why"]
        watched.idle_s = 0.1
        assert read_json(server, "/health")[0] == 200


class Broken(Watching):
    def snapshot(self):
        raise RuntimeError("it is gone")


def test_who_cannot_tell_is_unhealthy_and_the_server_lives():
    with WatchServer(Broken()) as server:
        status, health = read_json(server, "/health")
        assert (status, health["healthy"]) == (503, False)
        assert "it is gone" in health["why"]
        for path in ("/metrics", "/state", "/trace"):
            assert get(server, path)[0] == 500


def test_metrics_have_the_type_that_was_asked_for(watched):
    with WatchServer(watched) as server:
        _, body, headers = get(server, "/metrics")
        assert b"\ntvm_pipeline_frames_total 30.0\n" in body
        assert headers["Content-Type"].startswith("text/plain")
        _, body, headers = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")


def test_trace_is_of_the_window_asked_for(watched):
    done_s = max(timed[-1] for record in watched.records for timed in record.timed)
    time_s = done_s - watched.began_s
    watched.more = {"events": [{"time_s": at, "kind": "switch", "reason": f"at {at}"} for at in (-1e3, time_s)]}
    with WatchServer(watched) as server:
        status, trace = read_json(server, "/trace?seconds=600")
        assert status == 200
        frames = [event for event in trace["traceEvents"] if event.get("cat") == "frame"]
        assert len(frames) == 60
        assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"] == [f"switch: at {time_s}"]
        _, trace = read_json(server, "/trace?seconds=1e-9")
        assert [event["name"] for event in trace["traceEvents"]] == ["process_name"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "ten", ""])
def test_a_window_that_is_none_is_refused(watched, seconds):
    with WatchServer(watched) as server:
        status, body, _ = get(server, f"/trace?seconds={seconds}")
        assert status == (400 if seconds else 200)  # an empty value counts as not given
        assert seconds == "" or b"up to 600" in body


def test_last_frame_where_there_is_one(watched):
    pictures = [None, JPEG]
    with WatchServer(watched, picture=lambda _: pictures.pop(0)) as server:
        assert get(server, "/frame.jpg")[0] == 404
        assert get(server, "/frame.jpg")[:2] == (200, JPEG)
    with WatchServer(watched) as server:
        assert get(server, "/frame.jpg")[0] == 404


def test_the_cut_is_that_of_the_plan_that_runs():
    watched = watching()
    with WatchServer(watched) as server:
        for _ in range(2):
            status, drawing, headers = get(server, "/cut.svg")
            assert (status, headers["Content-Type"]) == (200, "image/svg+xml")
            assert drawing == cut_svg(watched.graph, watched.plan)
            assert b"cut 1" in drawing
        watched.run(5, WHOLE)
        drawing = get(server, "/cut.svg")[1]
        assert drawing == cut_svg(watched.graph, watched.plan)
        assert b"cut 1" not in drawing


# Who is refused


def test_token(watched):
    with WatchServer(watched, token=TOKEN) as server:
        for path in ("/", "/metrics", "/health", "/state", "/trace", "/cut.svg", "/frame.jpg", "/nothing"):
            status, body, headers = get(server, path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert b"Bearer TOKEN" in body
        for given in ("Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer ", f"Bearer {TOKEN}x", "Bearer \xff"):
            assert get(server, "/state", Authorization=given)[0] == 401
        assert get(server, "/state", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(server, f"/?token={TOKEN}")[0] == 200
        assert get(server, "/?token=wrong")[0] == 401
        assert get(server, f"/state?token={TOKEN}")[0] == 401  # only the page takes it so: addresses are logged


@pytest.mark.parametrize(
    "token", ["", "short", "with blanks in the middle", "ümläuts-and-many-more", "new\nline-and-more-of"]
)
def test_unfit_tokens_are_refused(watched, token):
    with pytest.raises(OptionError, match="`token`"):
        WatchServer(watched, token=token)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0", "", socket.gethostname()])
def test_an_address_that_others_reach_needs_a_token(watched, address):
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        found = ""
    if str(found).startswith(("127.", "::1")):
        pytest.skip(f"{address!r} is loopback here")
    with pytest.raises(OptionError, match=r"`watch` .*(give a `token`|no such address)"):
        WatchServer(watched, address)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.8.9.10"])
def test_loopback_needs_none(watched, address):
    with WatchServer(watched, address) as server:
        assert get(server, "/health")[0] == 200


def test_all_addresses_with_a_token(watched):
    with WatchServer(watched, "0.0.0.0", token=TOKEN) as server:
        assert get(server, "/health", Authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize(
    ("address", "port", "said"),
    [
        ("no-such-host.invalid", 0, "no such address"),
        ("a" * 70 + ".example", 0, "no such address"),
        ("127.0.0.1", -1, "0 to 65535"),
        ("127.0.0.1", 65536, "0 to 65535"),
        ("192.0.2.1", 0, "cannot listen"),
    ],
)
def test_addresses_where_nobody_can_listen(watched, address, port, said):
    with pytest.raises(OptionError, match=f"`watch` {re.escape(address)}:{port}: .*{said}"):
        WatchServer(watched, address, port, token=TOKEN)


def test_a_port_in_use_is_said_and_free_after_stop(watched):
    with WatchServer(watched) as first:
        port = urlsplit(first.url).port
        with pytest.raises(OptionError, match=f"`watch` 127.0.0.1:{port}: .*another port"):
            WatchServer(watched, port=port)
    with WatchServer(watched, port=port) as second:
        assert get(second, "/health")[0] == 200


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(watched, seconds):
    with pytest.raises(OptionError, match="unhealthy"):
        WatchServer(watched, unhealthy_after_s=seconds)


def test_a_page_of_another_site_may_link_here_and_embed_nothing(watched):
    """By the headers that browsers send, https://www.w3.org/TR/fetch-metadata/."""
    with WatchServer(watched, picture=lambda _: JPEG) as server:
        embeds = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"}
        for path in ("/frame.jpg", "/cut.svg", "/state", "/"):
            assert get(server, path, **embeds)[0] == 403
        assert get(server, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
        for site in ("same-origin", "none"):
            status, body, headers = get(server, "/frame.jpg", Sec_Fetch_Site=site, Sec_Fetch_Mode="cors")
            assert (status, body) == (200, JPEG)
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_the_name_of_another_site_is_refused(watched):
    with WatchServer(watched) as server:
        port = urlsplit(server.url).port
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[",
            "a@b:c",
        ):
            assert get(server, "/state", Host=host)[0] == 403, host
        for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert get(server, "/state", Host=host)[0] == 200, host
        assert b" 200 " in raw(server, b"GET /state HTTP/1.0\r\n\r\n").splitlines()[0]


@pytest.mark.parametrize(
    "path", ["/nothing", "/../../etc/passwd", "/page.html", "//etc/passwd", "/%2e%2e/server.py", "/state/", "//[", "*"]
)
def test_no_file_can_be_reached(watched, path):
    with WatchServer(watched) as server:
        status, body, _ = get(server, path)
        assert (status, body[:9]) == (404, b"there are")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"])
def test_only_get(watched, method):
    with WatchServer(watched) as server:
        assert get(server, "/state", method)[0] == 405


def test_large_requests_are_refused_and_the_server_lives(watched):
    with WatchServer(watched) as server:
        assert raw(server, b"GET /state HTTP/1.1\r\nX: " + b"x" * 20_000).startswith(b"HTTP/1.1 400")
        assert b"200 OK" not in raw(server, b"GET /" + b"x" * 20_000)
        assert b"200 OK" not in raw(server, b"\x00\xff\r\n\r\n")
        assert get(server, "/health")[0] == 200


@pytest.mark.thorough
def test_silent_clients_do_not_keep_it_from_stopping_and_leave_no_thread(watched):
    before = set(threading.enumerate())
    with WatchServer(watched) as server:
        silent = [socket.create_connection(urlsplit(server.url).netloc.split(":")) for _ in range(40)]
    for connection in silent:
        connection.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert set(threading.enumerate()) <= before
    server.stop()  # a second time
