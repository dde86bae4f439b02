"""Certificates broken in every way: a checker must refuse what is not true any more."""

from __future__ import annotations

import ast
import copy
import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def is_checked(checker: ModuleType, stated: dict[str, Any]) -> bool:
    """Return whether a checker of `tools/` takes a certificate."""
    try:
        checker.check(json.dumps(stated).encode())
    except checker.Refused:
        return False
    return True


def check_stands_alone(checker: ModuleType, stated: dict[str, Any], folder: Path) -> None:
    """A checker has at most 400 lines, imports the standard library alone, and runs where nothing else is installed."""
    file = Path(str(checker.__file__))
    source = file.read_text()
    assert _imported_by(source) <= sys.stdlib_module_names
    assert source.count("\n") <= 400
    good, bad = folder / "good.cert", folder / "bad.cert"
    good.write_text(json.dumps(stated))
    bad.write_text(good.read_text().replace('"certificate": 1', '"certificate": 2'))
    ran = subprocess.run([sys.executable, "-I", "-S", file, good, bad, folder / "none"], capture_output=True, text=True)
    assert [line.split(": ")[1] for line in ran.stdout.splitlines()] == ["checked", "refused", "refused"]
    assert (ran.returncode, ran.stderr) == (1, "")


def mutated(rng: random.Random, stated: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the certificate with one place broken, or two; `names` may take the place of a name."""
    stated = copy.deepcopy(stated)
    for _ in range(rng.choice((1, 1, 2))):
        *path, last = rng.choice(_places(stated)[1:])
        above: Any = stated
        for key in path:
            above = above[key]
        above[last] = _broken(rng, above[last], names)
    return stated


def _imported_by(source: str) -> set[str]:
    """Return the packages that a source file imports; `.` for those beside it."""
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name) or "."
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    return {name.split(".")[0] for name in imported}


def _places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to everything in a document."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [above, *(place for key in keys for place in _places(value[key], (*above, key)))]


def _broken(rng: random.Random, value: Any, names: Sequence[str]) -> Any:
    """Return another value in the place of one."""
    if isinstance(value, bool) or value is None:
        return rng.choice((None, True, False, 0, 1, 0.5))
    if isinstance(value, (int, float)):
        near = (value + 1, value - 1, value * 2, value / 2, value * 1.001, value * 0.999, -value, 0, 10**9)
        return rng.choice((*near, math.nan, math.inf, None, str(value), [value], True))
    if isinstance(value, str):
        return rng.choice((*names, "", "other", None, 1))
    if isinstance(value, list):
        shuffled = rng.sample(value, len(value))
        return rng.choice((value[1:], value[:-1], value + value[-1:], value[::-1], shuffled, [], None, {}))
    less = {key: value[key] for key in list(value)[1:]}
    return rng.choice((less, dict(reversed(value.items())), {**value, "other": 1}, {}, None, []))
