"""`tvm-pipeline --version` takes no command."""

from __future__ import annotations

import tvm_pipeline


def test_the_version_needs_no_command(cli):
    outcome = cli("--version")
    assert (outcome.code, outcome.out) == (0, f"tvm-pipeline {tvm_pipeline.__version__}\n")
