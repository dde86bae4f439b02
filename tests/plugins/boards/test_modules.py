"""The table of modules agrees with the rest: with the targets of GPUs, and with the page that shows it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.parts import needs
from tvm_pipeline_boards.modules import MODULES, Module

PAGE = Path(__file__).parents[3] / "docs" / "jetson.md"


def test_a_part_number_names_one_module() -> None:
    parts = Counter(part for module in MODULES for part in module.parts)
    assert all(re.fullmatch(r"p\d{4}-\d{4}", part) for part in parts)
    assert parts.most_common(1)[0][1] == 1
    assert Counter(module.name for module in MODULES).most_common(1)[0][1] == 1


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_the_target_is_what_the_gpu_itself_would_get(module: Module) -> None:
    needs("tvm")
    from tvm_pipeline_tvm.gpu.detection import Gpu
    from tvm_pipeline_tvm.gpu.targets import target_for

    number = int(module.target.rpartition("_")[2])
    assert target_for(Gpu("cuda", module.name, capability=divmod(number, 10))) == module.target


def test_the_page_shows_the_table() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| (TX|Nano|Xavier|AGX|IGX|Orin|T\d)", line)]
    assert rows == [
        f"| {module.name} | {', '.join(module.parts)} | {module.cores} | `{module.target}` | "
        f"{module.memory_bytes // 2**30} GiB |"
        for module in MODULES
    ]
