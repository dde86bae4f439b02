"""Relay modules as JSON, read in a copy of this process first: TVM's reader checks no reference, and dies of some.

A copy by `fork` takes milliseconds where a new interpreter takes seconds. It does with the module what its import does:
TVM dies of some modules only when they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import tvm

from tvm_pipeline.errors import ModelError
from tvm_pipeline.processes import how_ended, status_of_copy

READ_S = 120.0  # seconds that reading may take


@lru_cache(maxsize=64)
def check_readable(name: str, content: bytes, use: Callable[[tvm.IRModule], object]) -> None:
    """Read a module, and use it, in a process of its own.

    Args:
        name: of the model, for messages.
        content: the module, as `tvm.ir.save_json` writes it.
        use: what this process does with the module afterwards.

    Raises:
        ModelError: that process died of it, or does not end. What it raises is left to the reader in this process.
    """
    status = status_of_copy(lambda: use(tvm.ir.load_json(content.decode())), READ_S)
    if status == 0:
        return
    how = f"does not end in {READ_S:g} s" if status is None else how_ended(status)
    raise ModelError(
        f"{name}: a process in which TVM read this Relay JSON {how}: the file is damaged, or of another version of "
        "TVM; write it again with tvm.ir.save_json"
    )
