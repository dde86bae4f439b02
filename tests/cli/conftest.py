from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import Outcome, run_command
from tests.support.onnx_models import write_picture_net
from tests.support.parts import needs

needs("tvm")
needs("onnx")


@pytest.fixture
def cli(capfd, monkeypatch) -> Callable[..., Outcome]:
    """Runs the command line in this process: cli("plan", "model.onnx", "--json").

    `run` measures no candidates unless the test says for how long.
    """

    def run(*arguments: object) -> Outcome:
        measures = arguments[0] == "run" and not {"--verify", "--inputs"} & {*map(str, arguments)}
        quick = ("--verify", 0) if measures else ()
        return run_command(capfd, monkeypatch, *arguments, *quick)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return write_picture_net(tmp_path_factory.mktemp("model") / "net.onnx")


@pytest.fixture(scope="session")
def bundle(model, tmp_path_factory) -> Path:
    """A bundle compiled once for all tests of the command line."""
    from tvm_pipeline import Bundle, Problem, write_bundle
    from tvm_pipeline.workflow.steps import compile_source, decide, measured_profile

    made = compile_source(model)
    profile = measured_profile(made, repeats=8)
    decision, profile = decide(Problem(made.compiled.graph, made.platform, profile))
    path = tmp_path_factory.mktemp("bundle") / "net.tar"
    bundle = Bundle(made.compiled.graph, made.platform, profile, decision.plan, made.compiled, decision=decision)
    write_bundle(path, bundle)
    return path
