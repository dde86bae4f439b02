"""Requests to the page of a run that no browser sends: the server answers, or hangs up, and goes on."""

from __future__ import annotations

import random
import socket
from functools import cache
from http.client import HTTPConnection
from urllib.parse import urlsplit

from tests.plugins.video.watch.watched import watching
from tests.support.mutations import flipped, spliced
from tvm_pipeline_video.watch import WatchServer

METHODS = ("GET", "GET", "HEAD", "POST", "OPTIONS", "get", "")
PATHS = [
    *("/", "/state", "/metrics", "/health", "/frame.jpg", "/trace", "/cut.svg"),
    *("/../etc/passwd", "/%00", "/" + "a" * 9000),
]
HEADERS = [
    *("Host: 127.0.0.1", "Host: evil.example", "Authorization: Bearer ", "Content-Length: -1", "Range: bytes=0-"),
    *("Transfer-Encoding: chunked", "Connection: upgrade", "X: " + "y" * 70_000, "Cookie: \0", "q=nan", ": "),
]


@cache
def server() -> WatchServer:
    """Return a server that lives as long as the process."""
    return WatchServer(watching()).__enter__()


def watch(rng: random.Random) -> None:
    lines = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} HTTP/{rng.choice('0129')}.1"]
    lines += rng.choices(HEADERS, k=rng.choice((0, 1, 3, 200)))
    request = "\r\n".join([*lines, "", ""]).encode("latin-1")
    for _ in range(rng.choice((0, 1, 3))):
        request = rng.choice((flipped, spliced))(request, rng)
    host = urlsplit(server().url).netloc
    with socket.create_connection(host.split(":"), timeout=20) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except OSError:  # it hung up before it read everything
            pass
    sound = HTTPConnection(host, timeout=20)
    sound.request("GET", "/health")
    assert sound.getresponse().status in (200, 503)
    sound.close()


FUZZERS = {"watch": watch}
