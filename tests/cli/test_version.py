"""`tvm-pipeline --version` takes no command, and says which TVM is there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import tvm_pipeline


def test_the_version_needs_no_command(cli):
    try:
        tvm = f"Relax, TVM {version('apache-tvm')}"
    except PackageNotFoundError:
        tvm = "Relay, TVM 0.19.0"
    outcome = cli("--version")
    assert (outcome.code, outcome.out) == (0, f"tvm-pipeline {tvm_pipeline.__version__} ({tvm})\n")
    assert f"compiler: {tvm} " in cli("devices").err + " "
