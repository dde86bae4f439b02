"""Small files that the kernel or the system's makers write. Any may be missing, empty, binary or of another form."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from tvm_pipeline.files import read_at_once

MOST_BYTES = 65536
# Names of GPUs' clocks in /sys/class/devfreq, by the modules `jtop.core.gpu` and `jtop.core.hw_detect` of jetson_stats:
#   57000000.gpu      Nano, TX1         17000000.ga10b  Orin, JetPack 5
#   17000000.gp10b    TX2               17000000.gpu    Orin, JetPack 6
#   17000000.gv11b    Xavier            gpu-gpc-0       Thor
#   fb000000.gpu      and alike: Mali of other boards
GPU_CLOCK = re.compile(r"[0-9a-f]+\.(?:gpu|gp10b|gv11b|ga10b)(?:-\w+)?|gpu-gpc-\d+")


def file_text(path: Path) -> str:
    """Return the text of a small file without blanks around it; empty where it cannot be read."""
    with suppress(OSError, ValueError):  # ValueError: a NUL in the path
        return read_at_once(path, MOST_BYTES).decode(errors="replace").strip("\0 \t\r\n")
    return ""


def file_number(path: Path) -> int | None:
    """Return the whole number that a file holds, decimal or, after 0x, hexadecimal; None where it holds none."""
    try:
        return int(file_text(path), 0)
    except ValueError:
        return None


def entries(folder: Path, pattern: str) -> list[Path]:
    """Return what a folder has by this pattern, number 2 before number 10; nothing where it cannot be listed."""
    try:
        return sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name))
    except OSError:
        return []


def listed_cores(text: str) -> tuple[int, ...]:
    """Return the cores of a list of the kernel; nothing where it is none.

    >>> listed_cores("0-2,5")
    (0, 1, 2, 5)
    """
    cores: list[int] = []
    for part in text.replace(" ", ",").split(","):
        first, _, last = part.partition("-")
        if re.fullmatch(r"\d{1,6}", first) and re.fullmatch(r"\d{1,6}", last or first):
            cores += range(int(first), int(last or first) + 1)
    return tuple(cores)
