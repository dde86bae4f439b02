"""The pages of docs/: every benchmark has its figures there, and every command that they quote exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tvm_pipeline

ROOT = Path(__file__).parents[1]
TOOLS = {"int8_models.py"}  # makes models for other benchmarks and measures nothing


def test_every_benchmark_has_a_figure() -> None:
    benchmarks = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    quoted = set(re.findall(r"python benchmarks/(\w+\.py)", (ROOT / "docs/figures.md").read_text()))
    assert quoted == benchmarks - TOOLS


def test_files_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = re.compile(r"\b(?:benchmarks|examples|profiles|tests|tvm_pipeline|backends)/[\w/.-]*\w")
    missing = {
        f"{page.name}: {name}"
        for page in pages
        for name in named.findall(page.read_text())
        if not (ROOT / name).exists()
    }
    assert not missing


def test_the_api_page_shows_an_example_of_every_public_name() -> None:
    """The page is made by griffe, which imports nothing, so it may take a name for something else than Python does."""
    griffe = pytest.importorskip("griffe", reason="make docs installs it")
    package = griffe.load("tvm_pipeline", search_paths=[ROOT], docstring_parser="google", resolve_aliases=True)
    without = []
    for name in tvm_pipeline.__all__:
        docstring = package[name].docstring
        if docstring is None or "examples" not in {section.kind.value for section in docstring.parsed}:
            without.append(name)
    assert not without
