"""Clients that send slowly, junk, or names of other sites: over a real socket, with fixed seeds."""

from __future__ import annotations

import random
import socket
import threading
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from tests.plugins.video.watch.watched import watching
from tvm_pipeline_video import http_server
from tvm_pipeline_video.watch import WatchServer

SEEDS = range(60)


@pytest.fixture(scope="module")
def made():
    return watching(5)


def connected(watch: WatchServer) -> socket.socket:
    return socket.create_connection(urlsplit(watch.url).netloc.split(":"), timeout=10)


def status(watch: WatchServer, path: str = "/health") -> int:
    connection = HTTPConnection(urlsplit(watch.url).netloc, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def answer(watch: WatchServer, request: bytes) -> bytes:
    """Return what comes back until the server hangs up; empty where it does so without a word."""
    with connected(watch) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").read()
        except OSError:
            return b""


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:9600", True),
        ("[::1]:9600", True),
        ("LocalHost:1", True),
        ("localhost:", True),
        ("evil.com@127.0.0.1", False),
        ("evil.com\\@127.0.0.1", False),
        ("[::1].evil.com", False),
        ("[::1%25evil.com]", False),
        ("[::1%eth0]", False),
        ("[127.0.0.1]", False),
        ("127.0.0.1.", False),
        ("127.0.0.1:99999", False),
        ("127.0.0.1:80:80", False),
        ("localhost/evil.com", False),
        ("evil.com#localhost", False),
        ("1.2.3", False),
        ("::1", False),
        ("127.0.0.1\r\nHost: evil.com", False),
    ],
)
def test_a_host_is_an_address_to_the_letter(made, host, passes):
    with WatchServer(made) as watch:
        told = answer(watch, f"GET /health HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        assert told.split()[1] in ((b"200",) if passes else (b"403", b"400"))


def junk(draw: random.Random) -> bytes:
    """Return a request that is whole, and then damaged in some places."""
    method, path = draw.choice(["GET", "POST", "\x00", ""]), draw.choice(["/", "/trace?seconds=1", "/%00", "*", "//["])
    lines = [f"{method} {path} HTTP/{draw.choice(['1.0', '1.1', '9', ''])}", "Host: localhost", "Accept: " + "a," * 50]
    data = bytearray(draw.choice(["\r\n", "\n"]).join([*lines, "", ""]).encode())
    for _ in range(draw.randrange(5)):
        place = draw.randrange(len(data))
        data[place : place + draw.randrange(3)] = draw.randbytes(draw.choice([0, 1, 200, 20_000]))
    return bytes(data)


def test_junk_is_answered_or_hung_up_on_and_others_are_served(made):
    threads = set(threading.enumerate())
    with WatchServer(made) as watch:
        for seed in SEEDS:
            told = answer(watch, junk(random.Random(seed)))
            assert told == b"" or told.startswith(b"HTTP/1.1 "), seed
        assert status(watch) == 200
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
    assert set(threading.enumerate()) <= threads


def test_a_request_has_a_time_limit_however_small_its_pieces_are(made, monkeypatch):
    monkeypatch.setattr(http_server.Brief, "LONGEST_S", 0.6)
    with WatchServer(made) as watch, connected(watch) as slow:
        slow.sendall(b"GET /health HTTP/1.0\r\nX: ")
        for _ in range(100):  # each piece comes well before a timeout of one reading
            time.sleep(0.1)
            try:
                slow.sendall(b"x")
            except OSError:
                break
        else:
            pytest.fail("the server went on reading")


@pytest.mark.thorough
def test_slow_clients_keep_no_other_out(made, monkeypatch):
    """As many as there may be, and no time limit comes to the help of the others. The oldest makes room at any age."""
    monkeypatch.setattr(http_server, "OLD_S", 0.0)
    with WatchServer(made) as watch:
        slow = [connected(watch) for _ in range(http_server.MOST_CONNECTIONS + 8)]
        for connection in slow:
            connection.sendall(b"GET /health HTTP/1.0\r\n")
        assert [status(watch, path) for path in ("/health", "/metrics") * 5] == [200] * 10
        for connection in slow:
            connection.close()
