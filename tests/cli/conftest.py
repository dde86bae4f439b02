from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import Outcome, run_command
from tests.support.onnx_models import write_picture_net

pytest.importorskip("tvm")
pytest.importorskip("onnx")


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
    from tvm_pipeline import Bundle, Problem, write_bundle
    from tvm_pipeline.service.workflow import compile_source, decide, measured_profile

    made = compile_source(model)
    profile = measured_profile(made, repeats=8)
    decision, profile = decide(Problem(made.compiled.graph, made.platform, profile))
    path = tmp_path_factory.mktemp("bundle") / "net.tar"
    write_bundle(path, Bundle(made.compiled.graph, made.platform, profile, decision.plan, made.compiled))
    return path
