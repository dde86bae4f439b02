"""A camera's password is in no file, line, page, label or message of any command that is given its address."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.parts import needs

needs("av")
needs("prometheus_client")

from tests.plugins.video.service.test_service import meanwhile
from tests.plugins.video.test_sources import encode

SECRET = "k3y9q"
FORM = "http://me:{secret}@{host}/clip.ts;user=me_password={secret}_channel=2?token={secret}&channel=1#{secret}"


class _Camera(SimpleHTTPRequestHandler):
    def translate_path(self, _path: str) -> str:
        return f"{self.directory}/clip.ts"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(tmp_path) -> Iterator[str]:
    (tmp_path / "camera").mkdir()
    encode(tmp_path / "camera" / "clip.ts")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Camera, directory=f"{tmp_path}/camera")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield FORM.format(secret=SECRET, host=f"127.0.0.1:{server.server_port}")
        server.shutdown()


def secrets_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.thorough
def test_no_command_shows_it(address, cli, model, empty_cache, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(empty_cache(work / "cache")))
    bundle = work / "net.tar"
    outcome = cli("compile", model, "-o", bundle, "--source", address, "--verify", 0)
    assert outcome.code == 0, outcome.err
    assert SECRET not in outcome.out + outcome.err
    refused = cli("bench", bundle, "--seconds", 0.1, "--rounds", 1)
    assert "holds no password; give the address as --source" in refused.err
    benched = cli("bench", bundle, "--seconds", 0.1, "--rounds", 1, "--source", address)
    assert benched.code == 0, benched.err
    pages: list[str] = []

    def look() -> None:
        for page in ("", "state", "metrics", "health"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=10) as answer:
                pages.append(answer.read().decode())
        os.kill(os.getpid(), signal.SIGTERM)

    port = 20_000 + os.getpid() % 20_000
    results = work / "results.jsonl"
    files = ("--results", results, "--events", work / "events.jsonl", "--watch", port)
    with meanwhile(look, results, 3):
        ran = cli("run", bundle, "--source", address, *files, "--limit", 100_000)
    assert ran.code == 0, ran.err
    assert len(pages) == 4
    assert SECRET not in "".join([ran.out, ran.err, benched.out, benched.err, refused.err, *pages])
    assert secrets_in(work) == []


@pytest.mark.thorough
@pytest.mark.parametrize("path", [f"rtsp://me:{SECRET}@{{}}/x", f"http://{{}}/x;pw={SECRET}"])
def test_no_traceback_shows_it(path, cli, bundle):
    done = cli("--traceback", "run", bundle, "--source", path.format("127.0.0.1:9"), "--stall", "0.5", "--verify", "0")
    assert done.code == 1
    assert "Traceback" in done.err
    assert "127.0.0.1" in done.err
    assert SECRET not in done.out + done.err
