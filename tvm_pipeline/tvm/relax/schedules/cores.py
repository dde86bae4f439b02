"""The cores of a target, as far as schedules ask about them."""

from __future__ import annotations

from typing import NamedTuple

from tvm.target import Target, codegen

_LANES = {"avx512bw": 16, "avx2": 8}  # of float32, by the feature that a core of x86 has
_REGISTERS = {16: 32, 8: 16, 4: 16}  # by lanes


class Cores(NamedTuple):
    """What the cores of a target have: float32 numbers in a vector, and registers of vectors."""

    lanes: int
    registers: int


def cores_of(target: Target) -> Cores:
    """Return the cores of a target for CPUs; four lanes where nothing is known.

    Examples:
        >>> cores_of(Target({"kind": "llvm", "mcpu": "x86-64-v4"}))
        Cores(lanes=16, registers=32)
    """
    found = (lanes for feature, lanes in _LANES.items() if codegen.llvm_cpu_has_features(feature, target))
    lanes = next(found, 4)
    return Cores(lanes, _REGISTERS[lanes])
