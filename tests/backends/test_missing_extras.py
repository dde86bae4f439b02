"""A backend whose extra is not installed is left out with what would help; the others go on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.parts import needs

DEVICES = """
import sys
sys.modules.update(dict.fromkeys({missing}))  # every import of them fails
sys.argv = ["tvm-pipeline", "devices"]
from tvm_pipeline.cli import main
main()
"""
TVM, EDGE_TPU = "pip install 'tvm-pipeline[tvm]'", "pip install 'tvm-pipeline[edgetpu]'"


def devices_without(*missing: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", DEVICES.format(missing=missing)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, " ".join(done.stderr.split())


@pytest.mark.thorough
def test_without_tflite_the_cpu_is_found() -> None:
    needs("tvm")
    code, out, err = devices_without("ai_edge_litert")
    assert code == 0
    assert "host" in out
    assert f"the backend edgetpu cannot be used: TFLite is not installed: run `{EDGE_TPU}`" in err


@pytest.mark.thorough
def test_without_any_extra_the_error_names_both() -> None:
    code, out, err = devices_without("ai_edge_litert", "tvm")
    assert (code, out) == (1, "")
    assert err.rpartition("error: ")[2].count(EDGE_TPU) == 1
    assert err.rpartition("error: ")[2].count(TVM) == 1
    assert "Error" not in err  # one line for people, and no type of an exception
