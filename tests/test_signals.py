"""A signal ends a command wherever it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import signal, sys, time
import tvm_pipeline.cli as cli

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0)  # Python handles the signal here, and goes on whatever is raised

class Faulty:
    def __del__(self):
        raise ValueError("other faults are told")

def app(**_):
    cleaned_up = False
    try:
        Faulty()
        Dying()
        time.sleep(60)
    finally:
        print("cleaned up")

cli.app = app
cli.main()
"""


@pytest.mark.parametrize("swallowed", [1, 3])
def test_one_that_comes_while_an_object_is_removed_ends_it_all_the_same(swallowed: int) -> None:
    code = CODE.replace("        Dying()\n", "        Dying()\n        time.sleep(0)\n" * swallowed)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + 15, done.stderr
    assert done.stdout == "cleaned up\n"
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: other faults are told") == 1
    assert done.stderr.endswith("stopped\n")


SWALLOWED = """
import signal
import tvm_pipeline.cli as cli
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError
from tvm_pipeline.workflow.engine_fallback import compiled_by_engine

def app(**_):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:  # which TVM makes a RuntimeError of, where it ran Python
        refusal = ModelError(str(error))
    compiled_by_engine(None, Platform("box", (Device("cpu0", cores=(0,)),)), refusal, None)

cli.app = app
cli.main()
"""


def test_one_that_tvm_makes_an_error_of_is_no_refusal_of_the_model() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "stopped\n")
