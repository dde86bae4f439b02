"""The parts of OR-tools, imported at the first call only: that takes a second, and most commands plan nothing.

Next: `cpsat.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tvm_pipeline.errors import OptionError


def part(package: str, name: str, what: str) -> Any:
    """Return a module of a package of ortools.

    Args:
        what: needs it, as the error says.

    Raises:
        OptionError: ortools is not installed.
    """
    try:
        import_module(package)  # else a module that was imported before is found where its package is no more
        return import_module(f"{package}.{name}")
    except ImportError as error:
        raise OptionError(f"{what}; install it with `pip install ortools`") from error
