from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.onnx_models import write_picture_net

pytest.importorskip("tvm")
pytest.importorskip("onnx")


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


def run_command(capture, monkeypatch, *arguments: object) -> Outcome:
    from tvm_pipeline.cli import main

    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["tvm-pipeline", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    out, err = capture.readouterr()
    return Outcome(code, out, " ".join(err.split()))


@pytest.fixture
def cli(capfd, monkeypatch) -> Callable[..., Outcome]:
    """Runs the command line in this process: cli("plan", "model.onnx", "--json")."""
    return lambda *arguments: run_command(capfd, monkeypatch, *arguments)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return write_picture_net(tmp_path_factory.mktemp("model") / "net.onnx")


@pytest.fixture(scope="session")
def bundle(model, tmp_path_factory) -> Path:
    """A bundle compiled once for all tests of the command line."""
    from tvm_pipeline import Bundle, Problem, detect_platform, load, profile_model, settle_platform, solve, write_bundle

    backend, platform = settle_platform(detect_platform())
    compiled = backend.compile(load(model), platform.devices, lambda _: None)
    profile = profile_model(backend, compiled, platform, repeats=8)
    plan = solve(Problem(compiled.graph, platform, profile)).plan
    path = tmp_path_factory.mktemp("bundle") / "net.tar"
    write_bundle(path, Bundle(compiled.graph, platform, profile, plan, compiled))
    return path
