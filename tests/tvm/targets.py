"""The CPUs that networks are built for, whether this machine has them or not."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

import tvm_pipeline_tvm.relay  # noqa: F401 - before TVM, since it settles TVM's environment
from tvm_pipeline.backends.contract import Array
from tvm_pipeline_tvm.host.detection import missing_features
from tvm_pipeline_tvm.kernel_sets import RelayKernels
from tvm_pipeline_tvm.relay import fold

import tvm  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

# One for each set of vectors and of instructions for bytes; other processors get the code of one of these.
X86 = ["x86-64-v2", "x86-64-v3", "x86-64-v4", "alderlake", "cascadelake", "sapphirerapids", "znver5"]
WITHOUT_VNNI = "llvm -mcpu=znver5 -mattr=-avx512vnni,-avxvnni"
TARGETS = [
    *(f"llvm -mcpu={cpu}" for cpu in X86),
    WITHOUT_VNNI,
    "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72",
    "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a78 -mattr=+dotprod",
]

# Two widths of vectors, on which alone schedules of ours and the blocks of channels depend; Relax's tests have others.
LEVELS = [f"llvm -mcpu={cpu}" for cpu in ("x86-64-v3", "x86-64-v4")]


@contextmanager
def by_topi() -> Iterator[None]:
    """Have builds take TOPI's own schedules until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "relay_kernels", RelayKernels)
        yield


def runs_here(target: str) -> bool:
    return platform.machine() == "x86_64" and "aarch64" not in target and not missing_features(target)


def run(library: object, frame: Mapping[str, Array]) -> list[Array]:
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))  # type: ignore[index]
    executor.set_input(**frame)
    executor.run()
    return [executor.get_output(index).numpy() for index in range(executor.get_num_outputs())]


def built(mod: tvm.IRModule, target: str, params: dict[str, object], frame: Mapping[str, Array]) -> list[Array] | None:
    """What the module computes, built for the target; None where this machine cannot run it."""
    library = fold.fast_build(mod, target, params)
    return run(library, frame) if runs_here(target) else None
