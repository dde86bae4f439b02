"""What a shared library says of itself: its processor, the libraries it needs, and the symbols that it leaves open."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

AARCH64 = 183
_DYNAMIC, _DYNSYM = 6, 11  # types of sections
_NEEDED = 1  # tag of an entry


class Library(NamedTuple):
    """Of an ELF file of 64 bits.

    Attributes:
        machine: the number of its processor.
        needed: the libraries that the loader must find.
        undefined: the symbols that they must have.
        has_versions: whether some of these must be of a version.
    """

    machine: int
    needed: list[str]
    undefined: set[str]
    has_versions: bool


def read_library(path: Path) -> Library:
    raw = path.read_bytes()
    assert raw[:5] == b"\x7fELF\x02"
    machine, table, size, count = *struct.unpack_from("<H", raw, 18), *_header(raw)
    sections = [struct.unpack_from("<IIQQQQIIQQ", raw, table + index * size) for index in range(count)]
    needed, undefined = [], set()
    for _, kind, _, _, offset, length, link, *_ in sections:
        names = sections[link][4]
        if kind == _DYNAMIC:
            entries = struct.iter_unpack("<qQ", raw[offset : offset + length])
            needed += [_text(raw, names + value) for tag, value in entries if tag == _NEEDED]
        elif kind == _DYNSYM:
            symbols = struct.iter_unpack("<IBBHQQ", raw[offset : offset + length])
            undefined |= {_text(raw, names + name) for name, _, _, section, _, _ in symbols if name and not section}
    return Library(machine, needed, undefined, any(kind == 0x6FFFFFFE for _, kind, *_ in sections))


def _header(raw: bytes) -> tuple[int, int, int]:
    (table,) = struct.unpack_from("<Q", raw, 40)
    return table, *struct.unpack_from("<HH", raw, 58)


def _text(raw: bytes, start: int) -> str:
    return raw[start : raw.index(b"\0", start)].decode()
