"""What a convolution tells of tuning: the workload that it is, and the choice that its schedule is to follow.

Both stand in the attributes of its block, which FuseOps and FuseTIR keep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvm_pipeline_kernels.choices import Choice, Workload
from tvm_pipeline_kernels.tiles import Band, Tile
from tvm_pipeline_tvm.kernel_sets import hashable

WORKLOAD, CHOICE = "own_workload", "own_choice"
Attributes: TypeAlias = Mapping[str, Any]
T = TypeVar("T", Tile, Band)


def attributes(workload: Workload, choice: Choice | None) -> Attributes:
    """Return the attributes of a block that computes a workload, by a tile or band if one is chosen."""
    return {WORKLOAD: json.dumps(workload), **({CHOICE: list(choice)} if choice else {})}


def chosen(s: s_tir.Schedule, anchor: SBlockRV, kind: type[T]) -> T | None:
    """Return the choice of a block, as a `Tile` or a `Band`; None where the static rule is to choose."""
    numbers: Sequence[Any] | None = s.get(anchor).annotations.get(CHOICE)
    return None if numbers is None else kind(*map(int, numbers))


def workload_in(annotations: Mapping[str, Any]) -> Workload | None:
    """Return the workload of a block; None where tuning cannot make it faster."""
    text = annotations.get(WORKLOAD)
    return None if text is None else hashable(json.loads(str(text)))
