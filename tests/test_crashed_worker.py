"""A test that ends its process ends the run, as a failure of its own name: `make test` must not wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CRASHES = "import os\n\ndef test_before(): pass\n\ndef test_ends_its_process(): os.abort()\n"


@pytest.mark.thorough
def test_a_crash_ends_the_run_and_names_the_test(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(CRASHES)
    (tmp_path / "test_sound.py").write_text("def test_sound(): pass\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["--numprocesses", "1", "--dist", "worksteal", "-p", "no:cacheprovider", str(tmp_path)]
    # The run around this one tells its workers who they are by the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED test_crash.py::test_ends_its_process" in ended.stdout
