"""The share of a compile that is done grows from the first pass to the link, and the rest is told with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")

from tests.support.onnx_models import write_picture_net
from tvm_pipeline.frontends import load
from tvm_pipeline_tvm.relay.build import build_library
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.work_done import LINKING, WorkDone


@pytest.mark.thorough
def test_a_compile_tells_growing_shares_and_the_rest(own_cache: Path) -> None:
    lines = log_lines("INFO")
    build_library(load("mlp"), "llvm")
    shares = [int(found[1]) for line in lines if (found := re.search(r"compiling mlp for llvm: (\d+) %", line))]
    assert shares == sorted(set(shares))
    assert len(shares) >= 6
    assert shares[-1] == round(100 * LINKING)
    assert all(re.search("%, about [0-9]+ (s|min) left$", line) for line in lines if "%" in line)


def test_a_share_is_told_once_and_the_rest_follows_from_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 1000.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = log_lines("INFO")
    done = WorkDone("sorting")
    done.reach(0.25)
    done.reach(0.25)
    done.reach(0.5)
    assert lines == ["sorting: 25 %, about 30 s left", "sorting: 50 %, about 17 min left"]


def test_an_import_tells_growing_shares(tmp_path: Path) -> None:
    lines = log_lines("INFO")
    import_model(load(write_picture_net(tmp_path / "net.onnx")))
    shares = [int(found[1]) for line in lines if (found := re.search(r"importing net: (\d+) %, about", line))]
    assert shares == sorted(set(shares))
    assert len(shares) >= 2
