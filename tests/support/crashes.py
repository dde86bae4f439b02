"""A fake backend for child processes, and operators that end, hang or raise in the process they run in, once.

A child finds a backend by its entry point, so `install` writes what an installed package would have.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fake_backend import FakeBackend
from tvm_pipeline.backends.contract import Array

backend = FakeBackend([])


def install(folder: Path, name: str = "fake", module: str = __name__) -> None:
    """Make the `backend` of a module an installed one, wherever `folder` is on the path."""
    package = folder / f"{name}-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[tvm_pipeline.backends]\n{name} = {module}:backend\n")


def segfault() -> None:
    ctypes.string_at(0)


def leaves() -> None:
    os._exit(3)


def hangs() -> None:
    ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock, as a kernel may


def raises() -> None:
    raise ValueError("no such kernel")


WAYS = {function.__name__: function for function in (segfault, hangs, leaves, raises)}


@dataclass(frozen=True)
class AddOne:
    """Adds one to its number, but something else first at each of some numbers, once: files in `folder` remember."""

    folder: Path
    way: str = "segfault"
    at: tuple[int, ...] = ()

    def __call__(self, x: Array) -> list[Array]:
        number = int(x[0])
        if number in self.at:
            try:
                (self.folder / f"{self.way}-{number}").touch(exist_ok=False)
            except FileExistsError:
                return [x + 1]
            WAYS[self.way]()
        return [x + 1]


@dataclass(frozen=True)
class EndsLoading:
    """An operator whose backend dies while the model is loaded: only the first time where a file can remember that."""

    once: Path | None = None

    def __call__(self, x: Array) -> list[Array]:
        return [x + 1]

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return unpickled, (type(self), "leaves", self.once)


@dataclass(frozen=True)
class HangsLoading(EndsLoading):
    """An operator whose backend hangs while the model is loaded."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return unpickled, (type(self), "hangs", self.once)


def unpickled(kind: type[EndsLoading], way: str, once: Path | None) -> EndsLoading:
    try:
        if once:
            once.touch(exist_ok=False)
    except FileExistsError:
        return kind(once)
    WAYS[way]()
    return kind(once)


def children_of(pid: int) -> set[int]:
    """Return the processes that a process has started."""
    return {int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()}


HOLDER = """
import ctypes, sys, time
SEIZE, STOP_AT_EXIT = 0x4206, 0x40
print(ctypes.CDLL(None).ptrace(SEIZE, int(sys.argv[1]), 0, STOP_AT_EXIT), flush=True)
time.sleep(1000)
"""


@contextmanager
def held(process: int) -> Iterator[None]:
    """Keep a process from ending, as a driver may: it stops on its way out for whoever traces it."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(process)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout
            if holder.stdout.readline().strip() != "0":
                pytest.skip("this system lets no process trace another one")
            yield
        finally:
            holder.kill()
