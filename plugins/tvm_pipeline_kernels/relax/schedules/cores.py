"""The cores of a target, as far as schedules ask about them."""

from __future__ import annotations

from tvm.target import Target, codegen

from tvm_pipeline_kernels.tiles import ARM_REGISTERS, Cores

__all__ = ["Cores", "converts_float16", "cores_of"]

# The first that a target has:
_BY_FEATURE = {"avx512bw": Cores(16, 32), "avx2": Cores(8, 16), "fp-armv8": Cores(4, ARM_REGISTERS)}
_FOURS = {16: ("avx512vnni",), 8: ("avxvnni", "avx512vnni")}  # by the lanes


def cores_of(target: Target) -> Cores:
    """Return the cores of a target for CPUs, or the least: those of SSE.

    Examples:
        >>> cores_of(Target({"kind": "llvm", "mcpu": "x86-64-v4"}))
        Cores(lanes=16, registers=32, bytes_at_once=2, signed=False)
    """

    def has(feature: str) -> bool:
        return bool(codegen.llvm_cpu_has_features(feature, target))

    cores = next((cores for feature, cores in _BY_FEATURE.items() if has(feature)), Cores(4, 16))
    if has("dotprod") and str(target.attrs.get("mtriple")).startswith(("aarch64", "arm64")):  # not of 32 bits
        return cores._replace(bytes_at_once=4, signed=True)
    at_once = 4 if any(map(has, _FOURS.get(cores.lanes, ()))) else 2 if has("sse2") else 1
    return cores._replace(bytes_at_once=at_once)


def converts_float16(target: Target) -> bool:
    """Return whether the cores of a target have instructions that convert float16; LLVM calls a library without them.

    Examples:
        >>> [converts_float16(Target({"kind": "llvm", "mcpu": f"x86-64-v{level}"})) for level in (2, 3)]
        [False, True]
    """
    return any(codegen.llvm_cpu_has_features(feature, target) for feature in ("f16c", "fp-armv8"))
