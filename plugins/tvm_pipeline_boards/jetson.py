"""Which Jetson this is: its module, its release of Jetson Linux (L4T) with the JetPack of that, and its power mode.

What is read, and who documents it:

    /proc/device-tree/compatible, model   the board's names (Linux, Documentation/devicetree/bindings/arm/tegra.yaml)
    /proc/device-tree/nvidia,dtsfilename  the same in a file's name (jetson_stats, jtop.core.jetson_variables)
    /etc/nv_boot_control.conf             TNSPEC, the module as it was flashed (Jetson Linux Developer Guide, Flashing)
    /etc/nv_tegra_release                 `# R36 (release), REVISION: 4.3, ...`
    /var/lib/dpkg/status                  the version of the package nvidia-l4t-core, where that file is not there
    /var/lib/nvpmodel/status              `pmode:0002`, the power mode that nvpmodel set last
    /etc/nvpmodel.conf                    `< POWER_MODEL ID=2 NAME=MAXN >`, the names of the modes

Read next: modules.py, the table of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tvm_pipeline.system_files import file_text
from tvm_pipeline_boards.modules import SOCS, Module, find_module
from tvm_pipeline_boards.nvpmodel import CONFIGURATION, last_nvpmodel

# https://developer.nvidia.com/embedded/jetpack-archive, by way of jetson_stats and jetson-containers.
_RELEASES = """
28.1=3.1 28.2=3.2 28.2.1=3.3 28.4=3.3.3 31.0.1=4.0 31.0.2=4.1 31.1=4.1.1 32.1=4.2 32.2=4.2.1 32.2.1=4.2.2 32.2.3=4.2.3
32.3.1=4.3 32.4.2=4.4-DP 32.4.3=4.4 32.4.4=4.4.1 32.5=4.5 32.5.1=4.5.1 32.5.2=4.5.1 32.6.1=4.6 32.7.1=4.6.1
32.7.2=4.6.2 32.7.3=4.6.3 32.7.4=4.6.4 32.7.5=4.6.5 32.7.6=4.6.6 34.0.1=5.0-DP 34.1=5.0-DP 34.1.1=5.0.1-DP 35.1=5.0.2
35.2.1=5.1 35.3=5.1.1-DP 35.3.1=5.1.1 35.4.1=5.1.2 35.5=5.1.3 35.6=5.1.4 35.6.1=5.1.5 35.6.2=5.1.5 36=6.0-EA
36.2=6.0-DP 36.3=6.0 36.4=6.1 36.4.2=6.1 36.4.3=6.2 36.4.4=6.2.1 36.4.7=6.2.1 36.5=6.2.2 36.5.2=6.2.3 38.2=7.0
38.2.1=7.0 38.2.2=7.0 38.4=7.1 39.2=7.2 39.2.1=7.2.1
"""
JETPACKS = {l4t: jetpack for l4t, _, jetpack in (pair.partition("=") for pair in _RELEASES.split())}
_GENERATIONS = {"28": "3", "31": "4", "32": "4", "34": "5", "35": "5", "36": "6", "38": "7", "39": "7"}

_PART = re.compile(r"p(\d{4})-(\d{4})")
_SOC = re.compile(r"nvidia,(tegra\d+x?)")
_TNSPEC = re.compile(r"^TNSPEC\s+(\d{4})-\w*-(\d{4})-(\S*)", re.MULTILINE)
_RELEASE = re.compile(r"R(\d+)\s*\(release\),\s*REVISION:\s*(\d+(?:\.\d+)*)")
_MODE_NAME = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>")


@dataclass(frozen=True, slots=True)
class Jetson:
    """A board with a chip of the Jetson modules.

    Attributes:
        board: what the device tree calls the board.
        module: None where the table has none that fits.
        parts: the part numbers that were found, of the module and of what carries it.
        is_super: whether it was flashed for the higher clocks that NVIDIA calls Super.
        l4t: the release of Jetson Linux, such as `36.4.3`; empty where it is not told.
        power_mode: number and name of the mode of nvpmodel; empty where it is not told.
    """

    board: str
    module: Module | None
    parts: tuple[str, ...] = ()
    is_super: bool = False
    l4t: str = ""
    power_mode: str = ""

    @property
    def name(self) -> str:
        """The module, with its part number; what the device tree says where the module is not known."""
        if self.module is None:
            return (
                f"{self.board or 'a Tegra board'} (no known module{': ' if self.parts else ''}{', '.join(self.parts)})"
            )
        own = next((part for part in self.parts if part in self.module.parts), "")
        details = ", ".join(part for part in (own, "Super" if self.is_super else "") if part)
        return f"NVIDIA Jetson {self.module.name}{f' ({details})' if details else ''}"

    @property
    def jetpack(self) -> str:
        """The JetPack of the release; its generation alone, such as `5.x`, where the release is not in the table."""
        release = re.sub(r"(\.0)+$", "", self.l4t)
        generation = _GENERATIONS.get(self.l4t.partition(".")[0])
        return JETPACKS.get(release) or (f"{generation}.x" if generation else "")

    def __str__(self) -> str:
        l4t = f"L4T {self.l4t}" if self.l4t else "L4T unknown (no /etc/nv_tegra_release; a container hides it)"
        jetpack = f" (JetPack {self.jetpack})" if self.jetpack else ""
        mode = f"power mode {self.power_mode or 'unknown (no /var/lib/nvpmodel/status)'}"
        return f"{self.name}, {l4t}{jetpack}, {mode}"


def read_jetson(root: Path = Path("/")) -> Jetson | None:
    """Return the Jetson that this is; None where it is none.

    Args:
        root: the folder that has `proc`, `sys`, `etc` and `var`.
    """
    tree = root / "proc/device-tree"
    compatible = file_text(tree / "compatible").replace("\0", " ")
    chips = _SOC.findall(compatible)
    if not SOCS.intersection(chips):
        return None
    flashed = _TNSPEC.search(file_text(root / "etc/nv_boot_control.conf"))
    told = " ".join((compatible, file_text(tree / "nvidia,dtsfilename")))
    found = [(flashed[1], flashed[2])] if flashed else []
    parts = tuple(dict.fromkeys(f"p{board}-{sku}" for board, sku in (*found, *_PART.findall(told))))
    return Jetson(
        board=file_text(tree / "model"),
        module=find_module(parts, _told_memory_bytes(root)),
        parts=parts,
        is_super="-super" in compatible or bool(flashed and "-super" in flashed[3]),
        l4t=_release(root),
        power_mode=_power_mode(root),
    )


def _told_memory_bytes(root: Path) -> int | None:
    found = re.search(r"^MemTotal:\s*(\d{1,15}) kB", file_text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _release(root: Path) -> str:
    found = _RELEASE.search(file_text(root / "etc/nv_tegra_release"))
    if found:
        return f"{found[1]}.{found[2]}"
    return next(_package_versions(root / "var/lib/dpkg/status"), "").partition("-")[0]


def _package_versions(status: Path) -> Iterator[str]:
    """Yield the version of nvidia-l4t-core in the list of installed packages, which has megabytes."""
    package = ""
    try:
        with status.open(errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(": ")
                if key == "Package":
                    package = value.strip()
                elif key == "Version" and package == "nvidia-l4t-core":
                    yield value.strip()
    except OSError:
        return


def _power_mode(root: Path) -> str:
    number = last_nvpmodel(root)
    if number is None:
        return ""
    names = dict(_MODE_NAME.findall(file_text(root / CONFIGURATION)))
    return f"{number} ({names[str(number)]})" if str(number) in names else str(number)
