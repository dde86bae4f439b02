"""docs/figures.csv has each figure in a row; docs/figures.md is made of it.

After a change: python -c "from tests.test_figures import *; PAGE.write_text(page())".
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/figures.md"
# They make models, graphs or loads, or run in another environment, for other benchmarks; the last is given a network.
TOOLS = {
    *("int8_models.py", "loads.py", "export_networks.py", "export_swiftnet.py", "relax_worker.py", "relax_gpu.py"),
    "gpu_acceptance.py",  # of a machine with a GPU; the steps that it runs have figures
    *("emulated_board.py", "emulated_relax.py"),  # of root, a mirror of Debian and minutes
}
MACHINES = {
    "A": "a shared virtual machine with 2 x86-64 cores (AMD EPYC, AVX2), TVM 0.19, `-mcpu=x86-64-v3`",
    "B": "a shared virtual machine with 2 x86-64 cores (AMD EPYC, AVX-512), TVM 0.19, `-mcpu=znver5` unless a target"
    " is named",
    "C": "a shared virtual machine with 2 x86-64 cores (Intel Xeon with AMX; hyper-threads of other guests slow each by"
    " up to 1.3 for seconds), TVM 0.19, `-mcpu=rocketlake`",
    "H100": "virtual machines with an NVIDIA H100 (80 GB, driver 580.159, CUDA 13.0) and 16 cores of an Intel Xeon"
    " (Emerald Rapids), lent for 15 minutes each",
    "any": "a count, or the value of a model: it does not depend on the machine",
}
TOP = f"""\
---
hide: [toc]
---

# Figures

The {{}} figures that matter most. `/` separates values that the row or the unit names in the same order.

{{}}
`slices.py` runs as `python benchmarks/slices.py`, as do all scripts. Ratios and errors hold on other machines,
too; absolute times do not: other guests slow machine A by up to 30 % for seconds. The commit is the first whose pages
have the figure; without one, it is that of the row. `make bench` runs all commands in about four hours,
with Relay unless the row or its section names Relax, as the figures were measured. What we
measured of a paper's own tables and figures is on the [page of the paper](papers/index.md). This page is made of
[figures.csv](figures.csv).

| Machine | What it is |
|---|---|
{"".join(f"| **{name}** | {about} |{chr(10)}" for name, about in MACHINES.items())}"""
# What a reader must know before the rows of a section.
ABOUT = {
    "Kernels": "Above 1, ours is better. Both sides run the same weights, in float32 unless a row names int8; a ratio"
    " is the median of 11 rounds in which they alternate. Kernels are not tuned unless a row names `tune`. Engines were"
    " compared on a quiet machine. The other figures are CPU time beside other programs; those of TOPI's schedules and"
    " of single operators are older than the schedules of grouped convolutions and maximum pooling.",
    "Relax": "TVM 0.27, and beside it TVM 0.19 with our kernels in another process, alternating.",
    "Edge TPUs": "We have no Edge TPU. Slices run on TFLite's CPU kernels; everything else is a model.",
    "GPUs": "Only H100 is a GPU. On the other machines software takes its place: [PoCL](https://portablecl.org), which"
    " is OpenCL on a CPU core, and the CUDA device of the tests. Software proves function, not speed.",
    "While it runs": "These figures do not reproduce Table 5 of Velasco-Montero et al., whose devices are a GPU and a"
    " CPU: see [its page](papers/ieee-access-2023.md).",
    "Memory": "A concatenation counts as a copy. [SERENITY](papers/mlsys-2020.md) does not count it, so its ratios are"
    " others.",
}
HEAD = "| What | Figure | Command | Machine, date, commit |\n|---|---|---|---|\n"
GROWTH = "\n![Time to plan against operators, stages and devices](planner_growth.png)\n"


def figures() -> list[dict[str, str]]:
    with (ROOT / "docs/figures.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page() -> str:
    """The page of all figures."""
    rows = figures()
    top = [row for row in rows if row["top"]]
    parts = [TOP.format(len(top), table(top))]
    for section, listed in groupby(rows, lambda row: row["section"]):
        about = f"\n{ABOUT[section]}\n" if section in ABOUT else ""
        parts.append(f"\n## {section}\n{about}\n{table(listed)}{GROWTH if section == 'Planner' else ''}")
    return "".join(parts)


def table(rows: Iterable[dict[str, str]]) -> str:
    lines = []
    for row in rows:
        measured = ", ".join(filter(None, (row["machine"], row["date"], row["commit"])))
        command = row["command"].removeprefix("python benchmarks/")
        lines.append(f"| {row['what']} | **{row['value']}** {row['unit']} | `{command}` | {measured} |\n")
    return HEAD + "".join(lines)


def test_the_page_is_that_of_the_data() -> None:
    assert PAGE.read_text() == page()


def test_fifteen_figures_are_on_top() -> None:
    assert len([row for row in figures() if row["top"] == "yes"]) == 15


def test_a_row_is_short_and_says_what_where_and_when() -> None:
    for row in figures():
        assert 0 < len(row["what"]) <= 120, row
        assert 0 < len(row["value"]) <= 40, row
        assert len(row["unit"]) <= 70, row
        if row["value"] != "not measured":
            assert row["machine"]
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"]), row
            assert re.fullmatch("([0-9a-f]{8})?", row["commit"]), row


def test_every_benchmark_has_a_figure() -> None:
    benchmarks = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    told = [row["command"] for row in figures()]
    told += [path.read_text() for path in (ROOT / "docs/papers").glob("*.md")]
    quoted = {name for text in told for name in re.findall(r"python benchmarks/(\w+\.py)", text)}
    assert benchmarks - TOOLS <= quoted <= benchmarks
