"""Kernels are called from one place on the stack, whatever stands above them."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import pytest

from tests.support.parts import needs

needs("tvm")

import tvm

from tvm_pipeline_tvm.relay import stack_placement as placement

here = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(not here, reason="only x86-64 Linux tells the stack pointer")


def from_depth(depth: int, call: Any) -> Any:
    return call() if depth == 0 else max(map(lambda _: from_depth(depth - 1, call), [None]))  # noqa: C417


def test_every_multiple_of_sixteen_can_be_reached():
    assert sorted(placement._moves()) == list(range(0, placement.PAGE, 16))


def test_the_padding_moves_the_stack_to_the_place(monkeypatch):
    """The callee is getcontext itself, in TVM's stead, so it reports where it was called from."""
    context = (ctypes.c_uint64 * 256)()
    libc = ctypes.CDLL(None)

    def pretended(_handle, *rest):
        return libc.getcontext(context, *rest) and 0

    class Library:
        TVMFuncCall = staticmethod(pretended)

    class Function:
        handle = ctypes.c_void_p()

    monkeypatch.setattr(placement, "_LIB", Library)
    call = placement.placed(Function)
    seen = [from_depth(depth, lambda: (call(), context[20] % placement.PAGE)[1]) for depth in range(12)]
    assert len(set(seen)) == 1  # one place from every depth; the stand-in's own frames lie between it and PLACE


def test_integers_and_failures_go_through():
    received = []

    def note(number: int) -> None:
        received.append(number)

    def fail() -> None:
        raise ValueError("kernel broke")

    placement.placed(tvm.runtime.convert(note))(7)
    assert received == [7]
    with pytest.raises((ValueError, tvm.TVMError), match="kernel broke"):
        placement.placed(tvm.runtime.convert(fail))()
