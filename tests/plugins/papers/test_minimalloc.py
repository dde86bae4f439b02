"""Arenas as minimalloc reads and writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.test_arena import LIFETIMES
from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory.arena import Lifetime, check_layout, exact_layout, plan_arena
from tvm_pipeline_papers.minimalloc import read_minimalloc, write_minimalloc


@given(LIFETIMES, st.booleans())
def test_minimalloc_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, row: list[Lifetime], lay: bool
) -> None:
    path = tmp_path_factory.mktemp("csv") / "net.csv"
    named = [Lifetime(t.first, t.last, t.bytes, f"t{index}") for index, t in enumerate(row)]
    offsets = plan_arena(row)[0] if lay else None
    write_minimalloc(path, named, offsets)
    assert read_minimalloc(path) == (named, offsets)


def test_the_example_of_minimalloc(tmp_path: Path) -> None:
    """The problem and the layout of its README, and the problem as its older files have it."""
    path = tmp_path / "output.12.csv"
    path.write_text("id,lower,upper,size,offset\nb1,0,3,4,8\nb2,3,9,4,8\nb3,0,9,4,4\nb4,9,21,4,4\nb5,0,21,4,0\n")
    row, offsets = read_minimalloc(path)
    assert offsets is not None
    check_layout(row, offsets, 12)
    assert exact_layout(row, 1).arena_bytes == 12
    write_minimalloc(tmp_path / "again.csv", row, offsets)
    assert (tmp_path / "again.csv").read_text() == path.read_text()
    path.write_text("buffer,start,end,size\nb1,0,2,4\nb2,3,8,4\nb3,0,8,4\nb4,9,20,4\nb5,0,20,4\n")
    assert read_minimalloc(path) == (row, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the columns are ;"),
        ("id,lower,upper\n", "line 1: the columns are id,lower,upper; write id"),
        ("id,lower,upper,size,alignment\n", "line 1"),
        ("id,lower,upper,size\na,0,2,4\n\nb,0,2\n", "line 4: 3 fields for 4 columns"),
        ("id,lower,upper,size\na,0,2,4\nb,0,two,4\n", "line 3: upper is 'two'"),
        ("id,lower,upper,size\na,0,2,-4\n", "line 2: size is '-4'"),
        ("id,lower,upper,size\na,2,2,4\n", "line 2: a ends at step 2, before it begins"),
        ("id,lower,upper,size\na,0,2,4\na,2,3,4\n", "line 3: a stands there twice"),
        ("\xff", "is no CSV"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=message) as caught:
        read_minimalloc(path)
    assert str(path) in str(caught.value)


def test_what_minimalloc_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="two tensors are called a"):
        write_minimalloc(tmp_path / "net.csv", [Lifetime(0, 1, 4, "a"), Lifetime(0, 1, 4, "a")])
    with pytest.raises(PlanError, match="1 offsets for 0 tensors"):
        write_minimalloc(tmp_path / "net.csv", [], [0])
    with pytest.raises(PlanError, match="cannot read"):
        read_minimalloc(tmp_path / "none.csv")
    assert not (tmp_path / "net.csv").exists()
