"""What docstrings and comments say of files is true: the maps of packages, and the files that a text names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guards.sources import BACKENDS, CORE, PLUGINS, ROOT, docstrings, files, name, tree

PACKAGES = [path for path in files() if path.name == "__init__.py"]
# A line of a map: a file or a folder, two blanks or more, words; or one after a semicolon on the same line.
_ENTRY = re.compile(r"^([\w.]+/?) {2,}\S", re.MULTILINE)
_BESIDE = re.compile(r"; ([\w]+\.py): ")
_FILE = re.compile(r"(?<![\w.:*{])(?:\w+/)*\w+\.py\b")
# A placeholder in the message of an option, and files of a user.
NO_FILES = {"path/to/file.py"}


def mapped(docstring: str) -> set[str]:
    """Return the files and folders that the map in a docstring lists."""
    entries = {entry for entry in _ENTRY.findall(docstring) if entry.endswith((".py", "/", ".html"))}
    return entries | set(_BESIDE.findall(docstring))


def contents(folder: Path) -> set[str]:
    """Return the modules, sub-packages and pages of a package, as a map lists them."""
    found = {path.name for path in folder.iterdir() if path.suffix in (".py", ".html")}
    found |= {f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()}
    return found - {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_maps_are_true(package: Path) -> None:
    """The docstring of every package lists exactly what is in its folder; a command is its own file in cli/."""
    listed = mapped(ast.get_docstring(tree(package)) or "")
    found = contents(package.parent)
    if package.parent == CORE / "cli":
        found &= {"commands.py", "options.py", "output.py", "screen.py"}
    assert listed == found


def test_no_merge_is_left_open() -> None:
    """A docstring may hold the marks of a conflict and still be Python."""
    left = [path for path in files() if "\n<<<<<<< " in path.read_text()]
    assert left == []


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a file, each with its line."""
    for constant in docstrings(tree(path)):
        if isinstance(constant.value, str):
            yield constant.lineno, constant.value
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def existing() -> set[str]:
    """Return the paths of all Python files, and their endings, such as `cost/evaluate.py` and `evaluate.py`."""
    found = set()
    for folder in (
        CORE,
        BACKENDS,
        PLUGINS,
        *(ROOT / folder for folder in ("tests", "benchmarks", "examples", "tools")),
    ):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            found |= {"/".join(parts[start:]) for start in range(len(parts))}
    return found


@pytest.mark.thorough
def test_files_that_docstrings_name_exist() -> None:
    """A docstring or a comment that sends a reader to `name.py` or `room/name.py` names a file that is there."""
    known = existing() | NO_FILES
    wrong = [
        f"{name(path)}:{line} names {file}"
        for path in files()
        if not known.issuperset(_FILE.findall(path.read_text()))  # which takes less time than to look for the texts
        for line, text in texts(path)
        for file in _FILE.findall(text)
        if file not in known
    ]
    assert wrong == []


def test_the_guard_sees_a_file_that_is_not_there() -> None:
    """The reader of texts finds files with and without their room."""
    text = "Next: `binding.py`, then `cost/evaluate.py`; see backends/host.py."
    assert _FILE.findall(text) == ["binding.py", "cost/evaluate.py", "backends/host.py"]


def test_every_package_and_module_says_why_it_exists() -> None:
    """Every file of the core and the backends opens with a docstring."""
    assert [name(path) for path in files() if not ast.get_docstring(tree(path))] == []
