"""Fuzzers: one function for each reader and each protocol, which makes one input from a seeded generator and feeds it.

A fuzzer returns where the input was taken, or refused with an error of the package; anything else is a finding. Each
module, here and in the folders fuzz of tests/plugins, has a dictionary FUZZERS. `__main__.py` runs them for a time with
new seeds, `test_fuzzers.py` with fixed ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

Fuzzer = Callable[[random.Random], None]


def fuzzers() -> dict[str, Fuzzer]:
    """Return all fuzzers by name; those of optional packages that are not installed are left out."""
    found: dict[str, Fuzzer] = {}
    own = Path(__file__).parent
    for path in (*sorted(own.glob("[!_]*.py")), *sorted(own.parent.glob("plugins/*/fuzz/[!_]*.py"))):
        if path.name.startswith("test_"):
            continue
        try:
            found |= import_module(".".join(path.relative_to(own.parents[1]).with_suffix("").parts)).FUZZERS
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("tests", "tvm_pipeline"):  # a mistake of ours
                raise
    return found


def feed(name: str, seed: int) -> None:
    """Feed the input of a seed to a fuzzer; raise what it finds."""
    fuzzers()[name](random.Random(f"{name} {seed}"))
