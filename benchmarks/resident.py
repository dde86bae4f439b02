"""Where the resident memory of this process is, as Linux and glibc count it. Next: soak.py, which watches it."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HEAP_BYTES = 64 << 20  # a heap but the first begins at a multiple, and is followed by what it may still grow into
_REGION = re.compile(r"(\w+)-(\w+) (\S+) \S+ \S+ \S+\s*(.*)")
_TOTAL = re.compile(r'<total type="(fast|rest)" count="\d+" size="(\d+)"/>')
_SYSTEM = re.compile(r'<system type="current" size="(\d+)"/>')


@dataclass(frozen=True)
class Resident:
    """Bytes of this process.

    Attributes:
        by_place: resident ones. `first heap` and `other heaps` are malloc's, `mapped` blocks of their own and Python's
            objects, `stacks` those of threads, `files` code and files.
        used, free: of malloc's heaps, what is in use and what is free, resident or not.
        heaps: how many malloc has.
    """

    by_place: Counter[str]
    used: int
    free: int
    heaps: int

    def __str__(self) -> str:
        places = ", ".join(f"{place} {size / 1e6:.1f}" for place, size in self.by_place.items())
        return f"{places} MB; malloc has {self.heaps} heap(s), {self.used / 1e6:.1f} used, {self.free / 1e6:.1f} free"


def resident() -> Resident:
    """Return where it is now."""
    text = _malloc_info()
    whole = text.rsplit("</heap>", 1)[1]  # the sums over all heaps
    free = sum(int(size) for _, size in _TOTAL.findall(whole))
    system = _SYSTEM.search(whole)
    used = int(system[1]) - free if system else 0
    return Resident(_by_place(Path("/proc/self/smaps").read_text()), used, free, text.count("<heap nr="))


def _by_place(smaps: str) -> Counter[str]:
    regions: list[tuple[int, int, str, str, int]] = []
    for line in smaps.splitlines():
        if found := _REGION.fullmatch(line):
            header = int(found[1], 16), int(found[2], 16), found[3], found[4]
        elif line.startswith("Rss:"):
            regions.append((*header, 1024 * int(line.split()[1])))
    places = Counter(dict.fromkeys(("first heap", "other heaps", "mapped", "stacks", "files"), 0))
    for index, (begin, end, _, name, size) in enumerate(regions):
        before, after = regions[max(index - 1, 0)], regions[min(index + 1, len(regions) - 1)]
        is_guarded = before[1] == begin and before[2] == "---p" and before[1] - before[0] == 4096
        grows = end - begin == HEAP_BYTES or (after[0] == end and after[2] == "---p")
        if name == "[heap]":
            places["first heap"] += size
        elif name:
            places["files"] += size
        elif begin % HEAP_BYTES == 0 and grows:
            places["other heaps"] += size
        else:
            places["stacks" if is_guarded else "mapped"] += size
    return places


def _malloc_info() -> str:
    """Return what glibc tells of its heaps (arenas), as XML."""
    libc, text, size = ctypes.CDLL(None), ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    told = ctypes.string_at(text, size.value).decode()
    libc.free(text)
    return told
