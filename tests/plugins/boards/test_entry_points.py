"""The engine finds the package when it asks for sensors or modes, and imports nothing of it before."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, tvm_pipeline.cli
from tvm_pipeline.power import power_modes, survey
assert not any(name.startswith("tvm_pipeline_boards") for name in sys.modules)
print(type(power_modes()).__name__, "RAPL of processors (powercap)" in survey().looked_for)
"""


def test_the_package_is_loaded_when_it_is_asked() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("BoardModes True\n", "")
