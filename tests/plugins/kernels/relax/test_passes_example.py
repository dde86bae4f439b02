"""examples/relax_passes.py runs as its docstring says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[4] / "examples/relax_passes.py"


@pytest.mark.thorough
def test_it_compiles_both_ways_and_cuts() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "default pipeline" not in done.stderr, "nothing is left to TVM's default pipeline"
    assert "stage_0 on cpu" in done.stdout
    assert "stages equal bit for bit: True" in done.stdout
    assert "pipeline equal bit for bit: True" in done.stdout
    (difference,) = re.findall(r"times as long; values differ by (\S+) at most", done.stdout)
    assert 0 < float(difference) < 1e-3
