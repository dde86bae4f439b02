"""Certificates of memory, as `tools/check_memory.py` checks them, against every order that there is."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import certificates
from tests.support.certificates import mutated
from tests.support.generators import nasnet, randwire
from tests.support.graphs import randoms
from tests.support.memory import least_peak, random_memory_graph, simulated_peak
from tools import check_memory
from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory.arena import ALIGNMENT, Lifetime, check_layout, exact_layout, lifetimes, most_alive
from tvm_pipeline.memory.certificate import memory_certificate
from tvm_pipeline.memory.memory_graph import Buffer, MemoryGraph, check_order
from tvm_pipeline.memory.minimum_peak import minimum_peak
from tvm_pipeline.memory.stage_memory import stage_graph

Stated = dict[str, Any]


def certificate_of(graph: MemoryGraph) -> Stated:
    found = minimum_peak(graph)
    layout = exact_layout(lifetimes(graph, found.order)[0], time_limit_s=1)
    stated: Stated = json.loads(memory_certificate(graph, found, layout))
    return stated


def certified(rng: random.Random) -> Stated:
    """Return the certificate of a small random graph without operators in place and without workspaces."""
    return certificate_of(replace(random_memory_graph(rng, 6), workspace_bytes=(), in_place=()))


def is_checked(stated: Stated) -> bool:
    return certificates.is_checked(check_memory, stated)


def is_true(stated: Stated) -> bool:
    """Return whether all that a certificate claims holds, by trying every order."""
    position = {name: index for index, name in enumerate(stated["operators"])}
    order = [position[name] for name in stated["order"]]
    buffers = tuple(
        Buffer(
            buffer["name"],
            buffer["bytes"],
            tuple({position[name] for name in buffer["writers"]}),
            tuple({position[name] for name in buffer["readers"]}),
            buffer["kept"],
        )
        for buffer in stated["buffers"]
    )
    where = {op: place for place, op in enumerate(order)}  # the order stands for the program's order
    moved = tuple(
        replace(b, producers=tuple(where[o] for o in b.producers), consumers=tuple(where[o] for o in b.consumers))
        for b in buffers
    )
    graph = MemoryGraph("net", tuple(stated["order"]), moved)
    program = range(len(graph))
    check_order(graph, program)
    tensors, tensor_of = lifetimes(graph, program)
    assert stated["alignment"] > 0
    unit, offsets = stated["alignment"], [0] * len(tensors)
    for buffer, place in zip(buffers, tensor_of, strict=True):
        if place >= 0 and buffer.bytes:  # no bytes lie nowhere
            offsets[place] = stated["offsets"][buffer.name]
    full = [Lifetime(t.first, t.last, -(-t.bytes // unit) * unit) for t in tensors]
    check_layout(full, offsets, stated["arena"])
    used = [offset + tensor.bytes for offset, tensor in zip(offsets, full, strict=True) if tensor.bytes]
    return (
        simulated_peak(graph, program) == stated["peak"]
        and least_peak(graph) >= stated["bound"]
        and max(used, default=0) == stated["arena"]
        and most_alive(full, 1) >= stated["arena_bound"]
        and not any(offset % unit for offset in offsets)
    )


@given(rng=randoms())
def test_certificates_are_checked_and_true(rng: random.Random) -> None:
    stated = certified(rng)
    assert is_true(stated)
    assert is_checked(stated)


@given(rng=randoms())
def test_a_bound_above_the_least_is_refused(rng: random.Random) -> None:
    stated = certified(rng)
    stated["bound" if rng.random() < 0.7 else "arena_bound"] += 1
    assert not is_checked(stated)


@given(rng=randoms(), many=st.just(5))
def test_a_broken_certificate_is_refused_or_true(rng: random.Random, many: int) -> None:
    stated = certified(rng)
    names = [*stated["operators"], *(buffer["name"] for buffer in stated["buffers"])]
    for _ in range(many):
        other = mutated(rng, stated, names)
        if is_checked(other):
            assert is_true(other), other


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["WS(16)", "NASNet-A"])
def test_irregular_networks_are_checked_and_a_byte_more_is_refused(name: str) -> None:
    rng = random.Random(1)
    graph = nasnet(1) if name == "NASNet-A" else randwire(rng, 16)
    stated = certificate_of(stage_graph(graph))
    assert stated["peak"] == stated["bound"]
    assert is_checked(stated)
    assert not is_checked({**stated, "bound": stated["bound"] + 1})


def test_the_checker_stands_alone(tmp_path: Path) -> None:
    certificates.check_stands_alone(check_memory, certified(random.Random(0)), tmp_path)


@pytest.mark.parametrize("written", ["", "[]", "{}", "\xff", '{"certificate": 1}', "1e999", "[" * 100_000])
def test_other_files_are_refused(written: str) -> None:
    with pytest.raises(check_memory.Refused):
        check_memory.check(written.encode("latin-1"))


def test_operators_in_place_have_no_certificate() -> None:
    buffers = (Buffer("x", 4, (), (0,)), Buffer("y", 4, (0,), (), True))
    graph = MemoryGraph("net", ("op",), buffers, in_place=((0,),))
    found = minimum_peak(graph)
    with pytest.raises(OptionError, match="operators of net overwrite inputs"):
        memory_certificate(graph, found, exact_layout(lifetimes(graph, found.order)[0], ALIGNMENT))
