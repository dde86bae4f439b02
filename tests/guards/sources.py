"""The source files that the guards read, as syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "tvm_pipeline"
BACKENDS = ROOT / "backends"
PLUGINS = ROOT / "plugins"


def files(*folders: Path) -> list[Path]:
    """Return the Python files under the folders; of the whole product by default."""
    return sorted(path for folder in folders or (CORE, BACKENDS, PLUGINS) for path in folder.rglob("*.py"))


def is_here(file: str) -> bool:
    """Whether a file that a table names can be looked at: the engine is tested without plugins/, too."""
    return PLUGINS.is_dir() or not file.startswith("plugins/")


def name(path: Path) -> str:
    """Return the path of a file of the core relative to tvm_pipeline/, of another relative to the repository."""
    return path.relative_to(CORE if path.is_relative_to(CORE) else ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module(path: Path) -> str:
    """Return the dotted name of a file of tvm_pipeline/ or of a package of backends/ or plugins/."""
    root = next(folder for folder in (BACKENDS, PLUGINS, ROOT) if path.is_relative_to(folder))
    parts = path.with_suffix("").relative_to(root).parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Return the dotted names of all modules that a file imports, also in functions and for type checkers."""
    return tuple(imports_of(tree(path)))


def imports_of(parsed: ast.AST) -> Iterator[str]:
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _is_module(inner) else node.module


@cache
def _is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def docstrings(parsed: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module: its own, and those of its classes, functions and fields."""
    for node in ast.walk(parsed):
        for statement in getattr(node, "body", []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.value
