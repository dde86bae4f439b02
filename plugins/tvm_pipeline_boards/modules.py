"""The table of known Jetson modules.

Part numbers: "Jetson Module EEPROM Layout" of the Jetson Linux Developer Guide (R32.7.5, R34.1), `MODULE_NAME_TABLE` of
jetson_stats (`jtop.core.jetson_variables`), and for Thor meta-tegra (`p3834-0008` is T5000, `p3834-0000` is T4000).
`p3509-0000` is left out, which that table calls TX2 NX: a Xavier NX names it, too, as its carrier board.
Cores and memory: NVIDIA's data sheets of the modules (DA-09366-001 Xavier NX, and
https://developer.nvidia.com/embedded/jetson-modules). CUDA: https://developer.nvidia.com/cuda-gpus.
All memory of a module is shared by its CPU and its GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 1024**3
# What the kernel tells of the memory is less than all, for it and the firmware keep some: 4 to 13 % where it was told.
LEAST_TOLD = 0.7


@dataclass(frozen=True, slots=True)
class Module:
    """A Jetson module.

    Attributes:
        name: NVIDIA's, without `Jetson`.
        parts: its part numbers, of developer kits and for production.
        soc: what the device tree calls the chip.
        clusters: its cores, by the maker's name of their kind, with their number.
        target: TVM's target of its GPU.
        memory_bytes: of CPU and GPU together.
    """

    name: str
    parts: tuple[str, ...]
    soc: str
    clusters: tuple[tuple[str, int], ...]
    target: str
    memory_bytes: int

    @property
    def cores(self) -> str:
        """Its cores in words."""
        return ", ".join(f"{count} {kind}" for kind, count in self.clusters)

    def has(self, told_bytes: int | None) -> bool:
        """Return whether a kernel on this module may tell so much memory; None, where it told nothing, may be any."""
        return told_bytes is None or LEAST_TOLD * self.memory_bytes <= told_bytes <= self.memory_bytes


_TX1, _TX2, _XAVIER, _ORIN, _THOR = "tegra210", "tegra186", "tegra194", "tegra234", "tegra264"
_SM53, _SM62, _SM72, _SM87 = (f"cuda -arch=sm_{number}" for number in (53, 62, 72, 87))
_SM110 = "cuda -arch=sm_110"  # sm_101 up to CUDA 12.9; CUDA 13, which JetPack 7 has, renamed it
_A57, _CARMEL, _A78AE, _V3AE = "Cortex-A57", "Carmel", "Cortex-A78AE", "Neoverse-V3AE"
_DENVER_AND_A57 = (("Denver 2", 2), (_A57, 4))

# Of modules with one board number and one size of memory, the first is the usual one.
MODULES: tuple[Module, ...] = (
    Module("TX1", ("p2180-1000",), _TX1, ((_A57, 4),), _SM53, 4 * GIB),
    Module("Nano", ("p3448-0000", "p3448-0002"), _TX1, ((_A57, 4),), _SM53, 4 * GIB),
    Module("Nano 2GB", ("p3448-0003",), _TX1, ((_A57, 4),), _SM53, 2 * GIB),
    Module("TX2", ("p3310-1000",), _TX2, _DENVER_AND_A57, _SM62, 8 * GIB),
    Module("TX2i", ("p3489-0000",), _TX2, _DENVER_AND_A57, _SM62, 8 * GIB),
    Module("TX2 4GB", ("p3489-0888",), _TX2, _DENVER_AND_A57, _SM62, 4 * GIB),
    Module("TX2 NX", ("p3636-0001",), _TX2, _DENVER_AND_A57, _SM62, 4 * GIB),
    Module("Xavier NX", ("p3668-0000", "p3668-0001"), _XAVIER, ((_CARMEL, 6),), _SM72, 8 * GIB),
    Module("Xavier NX 16GB", ("p3668-0003",), _XAVIER, ((_CARMEL, 6),), _SM72, 16 * GIB),
    Module("AGX Xavier 8GB", ("p2888-0006",), _XAVIER, ((_CARMEL, 6),), _SM72, 8 * GIB),
    Module("AGX Xavier 16GB", ("p2888-0001",), _XAVIER, ((_CARMEL, 8),), _SM72, 16 * GIB),
    Module("AGX Xavier", ("p2888-0004", "p2888-0003"), _XAVIER, ((_CARMEL, 8),), _SM72, 32 * GIB),
    Module("AGX Xavier Industrial", ("p2888-0008",), _XAVIER, ((_CARMEL, 8),), _SM72, 32 * GIB),
    Module("AGX Xavier 64GB", ("p2888-0005",), _XAVIER, ((_CARMEL, 8),), _SM72, 64 * GIB),
    Module("Orin Nano 4GB", ("p3767-0004",), _ORIN, ((_A78AE, 6),), _SM87, 4 * GIB),
    Module("Orin Nano 8GB", ("p3767-0003", "p3767-0005"), _ORIN, ((_A78AE, 6),), _SM87, 8 * GIB),
    Module("Orin NX 8GB", ("p3767-0001",), _ORIN, ((_A78AE, 6),), _SM87, 8 * GIB),
    Module("Orin NX 16GB", ("p3767-0000",), _ORIN, ((_A78AE, 8),), _SM87, 16 * GIB),
    Module("AGX Orin Developer Kit", ("p3701-0000",), _ORIN, ((_A78AE, 12),), _SM87, 32 * GIB),
    Module("AGX Orin 32GB", ("p3701-0004",), _ORIN, ((_A78AE, 8),), _SM87, 32 * GIB),
    Module("AGX Orin 64GB", ("p3701-0005",), _ORIN, ((_A78AE, 12),), _SM87, 64 * GIB),
    Module("AGX Orin Industrial", ("p3701-0008",), _ORIN, ((_A78AE, 12),), _SM87, 64 * GIB),
    Module("IGX Orin Developer Kit", ("p3701-0002",), _ORIN, ((_A78AE, 12),), _SM87, 64 * GIB),
    Module("T4000", ("p3834-0000",), _THOR, ((_V3AE, 12),), _SM110, 64 * GIB),
    Module("T5000", ("p3834-0008",), _THOR, ((_V3AE, 14),), _SM110, 128 * GIB),
)
SOCS = frozenset({*(module.soc for module in MODULES), "tegra23x"})  # the last one is Orin as R34 called it


def find_module(parts: Sequence[str], told_bytes: int | None = None) -> Module | None:
    """Return the module of these part numbers.

    A device tree may be written for several modules of one board number, as that of every AGX Xavier names
    `p2888-0001`. So where a module has other memory than the kernel tells, one of its board number that has it is
    taken.

    Args:
        parts: those that were found, the most certain one first; others than of modules are passed over.
        told_bytes: the memory that the kernel tells; None where that is not known.

    Returns:
        None where no known module fits.

    Examples:
        >>> find_module(["p2822-0000", "p2888-0001"], told_bytes=32_700_000_000).name
        'AGX Xavier'
    """
    known = [module for part in parts for module in MODULES if part in module.parts]
    boards = {part.partition("-")[0] for module in known for part in module.parts}
    of_board = [module for module in MODULES if module.parts[0].partition("-")[0] in boards]
    return next((module for module in (*known, *of_board) if module.has(told_bytes)), None)
