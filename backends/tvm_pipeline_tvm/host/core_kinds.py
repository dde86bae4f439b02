"""Kinds of CPU cores, by the register MIDR_EL1 of each, and cores that are switched off.

The register names the maker (bits 24-31) and the part (bits 4-15); Linux shows it since 4.8 in
`/sys/devices/system/cpu/cpuN/regs/identification/midr_el1` (Documentation/arch/arm64/cpu-feature-registers.rst). The
numbers are those of `arch/arm64/include/asm/cputype.h` of Linux, that of Neoverse-V3AE from /proc/cpuinfo of a Thor.

A Jetson TX2 needs it: its kernel tells one `cpu_capacity` for both of its clusters, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tvm_pipeline.system_files import file_number, file_text, listed_cores

SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class CoreKind:
    """A kind of core.

    Attributes:
        name: what its maker calls it.
        processor: what `-mcpu` of LLVM calls it, or the nearest whose code it runs.
    """

    name: str
    processor: str


KINDS: dict[tuple[int, int], CoreKind] = {
    (0x41, 0xD07): CoreKind("Cortex-A57", "cortex-a57"),
    # LLVM has no name for Denver 2; it is ARMv8.0 with the extensions of the A57.
    (0x4E, 0x003): CoreKind("Denver 2", "cortex-a57"),
    (0x4E, 0x004): CoreKind("Carmel", "carmel"),
    (0x41, 0xD42): CoreKind("Cortex-A78AE", "cortex-a78ae"),
    (0x41, 0xD83): CoreKind("Neoverse-V3AE", "neoverse-v3ae"),
}


def part_of(core: int, system: Path = SYSTEM) -> tuple[int, int] | None:
    """Return the numbers of a core's maker and part; None where the kernel does not tell them, as on x86."""
    midr = file_number(system / f"cpu{core}" / "regs" / "identification" / "midr_el1")
    return None if midr is None or midr < 0 else (midr >> 24 & 0xFF, midr >> 4 & 0xFFF)


def kind_of_core(core: int, system: Path = SYSTEM) -> CoreKind | None:
    """Return the kind of a core; None where it is not in the table."""
    part = part_of(core, system)
    return KINDS.get(part) if part else None


def core_names(cores: Iterable[int], system: Path = SYSTEM) -> str:
    """Return how many cores of which kind these are, such as `2 Denver 2, 4 Cortex-A57`; empty where one is unknown."""
    kinds = [kind_of_core(core, system) for core in cores]
    known = Counter(kind.name for kind in kinds if kind)
    return ", ".join(f"{count} {name}" for name, count in known.items()) if all(kinds) else ""


def offline_cores(system: Path = SYSTEM) -> tuple[int, ...]:
    """Return the cores that the machine has and that are switched off, as nvpmodel does in some power modes."""
    online = set(listed_cores(file_text(system / "online")))
    present = listed_cores(file_text(system / "present"))
    return tuple(core for core in present if core not in online) if online else ()
