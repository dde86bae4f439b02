"""What a machine lacks is told in one line before `make demo` and `make test` begin, with the next step."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "needs.py"
if not SCRIPT.exists():
    pytest.skip("the source distribution holds no CI", allow_module_level=True)


def load_script():
    spec = importlib.util.spec_from_file_location("needs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def missing(folder: Path, *options: str, **environment: str) -> str:
    """Return the one line that the script prints; an empty string if nothing is missing."""
    command = [sys.executable, SCRIPT, folder, *options]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == bool(done.stderr)
    assert done.stderr.count("\n") == done.returncode
    assert not done.stdout
    return done.stderr


def test_this_machine_has_all_that_the_tests_need(tmp_path: Path) -> None:
    assert missing(tmp_path / "no folder yet" / "venv") == ""


@pytest.mark.parametrize(("version", "words"), [((3, 9, 18), "Python 3.9 is not"), ((3, 14, 0), "Python 3.14 is not")])
def test_another_python(version: tuple[int, ...], words: str) -> None:
    assert words in script.wrong_python(version)
    assert "make PYTHON=python3.12 test" in script.wrong_python(version)


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_a_supported_python(minor: int) -> None:
    assert not script.wrong_python((3, minor, 0))


def test_no_compiler(tmp_path: Path) -> None:
    assert "no C compiler" in missing(tmp_path, PATH=str(tmp_path), CXX="")


def test_no_registry_that_has_a_package(tmp_path: Path) -> None:
    nothing = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    said = missing(tmp_path, "--registry", "uv", PIP_INDEX_URL="http://127.0.0.1:9/simple", **nothing)
    assert "pip reaches no package registry that has uv" in said
    assert "PIP_INDEX_URL" in said


def test_a_full_disk(tmp_path: Path) -> None:
    said = script.full_disk(str(tmp_path / "venv"), 10**18)
    assert f"{tmp_path} has " in said
    assert "1000000000.0 GB are needed" in said
