"""`import tvm_pipeline` loads a table of names; each name is imported when it is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tvm_pipeline
from tvm_pipeline.core.plan import Plan


def run(program: str) -> list[str]:
    """Return the words that a program prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_the_import_loads_nothing_else() -> None:
    ours = "print(*sorted(name for name in sys.modules if name.startswith(('tvm_pipeline', 'numpy'))))"
    package = ["tvm_pipeline", "tvm_pipeline.version"]
    assert run(f"import sys, tvm_pipeline; {ours}") == package
    used = run(f"import sys, tvm_pipeline; tvm_pipeline.PipelineError; {ours}")
    assert used == sorted([*package, "tvm_pipeline.errors"])


def test_star_brings_all_names_and_no_other() -> None:
    before = "before = {*globals(), 'before'}; from tvm_pipeline import *; print(*sorted({*globals()} - before))"
    assert run(before) == sorted(tvm_pipeline.__all__)


def test_names_are_listed_before_they_are_imported() -> None:
    assert {*run("import tvm_pipeline; print(*dir(tvm_pipeline))")} >= {*tvm_pipeline.__all__, "__version__"}


def test_a_name_is_the_one_of_its_module() -> None:
    assert tvm_pipeline.Plan is Plan


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tvm_pipeline' has no attribute 'Plann'"):
        _ = tvm_pipeline.Plann  # type: ignore[attr-defined]
