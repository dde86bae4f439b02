"""What the results of kernels may overwrite, as a file of their library; `overwriting.py` has the proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline_tvm.overwriting import overwritable

OVERWRITING = "overwriting.json"  # of a library: of each function the positions of the arguments


def save_overwriting(factory: Any, folder: Path) -> None:
    """Write what the result of each function that `relay.build` lowered may overwrite."""
    found = {
        str(name): overwritable(next(iter(info.tir_primfuncs.values())))
        for name, info in factory.function_metadata.items()
        if len(info.tir_primfuncs)
    }
    (folder / OVERWRITING).write_bytes(msgspec.json.encode(found))


def load_overwriting(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read it; bundles of earlier versions do not tell, and nothing is overwritten."""
    file = folder / OVERWRITING
    return msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[int, ...]]) if file.exists() else {}
