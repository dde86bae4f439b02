"""The tables of `docs/papers`: every item has a state, the index has their counts, and what a row names is there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAPERS = ROOT / "docs/papers"
STATES = ("as published", "beyond", "in part", "missing")
# How many items the papers have, by an audit of the papers themselves (issue 38).
ITEMS = {"ieee-access-2023": 23, "sec-2022": 20, "dac-2023": 15, "milcom-2024": 15, "mlsys-2020": 16}


def rows(page: str) -> list[list[str]]:
    """Return the cells of the rows under a page's heading `Item by item`."""
    section = (PAPERS / f"{page}.md").read_text().split("\n## Item by item\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def faults(where: str) -> list[str]:
    """Return the files and tests that a row names and that are not there."""
    found = []
    for name in re.findall(r"`([^`\s]+/[^`\s]+)`", where):
        path, _, test = name.partition("::")
        if not (ROOT / path).is_file():
            found.append(path)
        elif test and f"def {test}(" not in (ROOT / path).read_text():
            found.append(name)
    return found


@pytest.mark.parametrize("page", ITEMS)
def test_every_item_has_a_state_and_names_what_is_there(page: str) -> None:
    found = rows(page)
    assert [int(number) for number, *_ in found] == list(range(1, ITEMS[page] + 1))
    for _, item, where, state in found:
        assert state in STATES, item
        assert where, item
        assert faults(where) == [], item
        assert state not in ("as published", "beyond") or re.search(r"`[^`]+/[^`]+`|\]\(", where), item


def test_the_index_has_the_counts_of_the_pages() -> None:
    counted = {page: Counter(state for *_, state in rows(page)) for page in ITEMS}
    table = rows("index")
    assert len(table) == len(ITEMS) + 1
    for paper, *cells in table:
        page = re.search(r"\((.+)\.md#item-by-item\)", paper)
        states = counted[page[1]] if page else sum(counted.values(), Counter[str]())
        assert list(map(int, cells)) == [states.total(), *(states[state] for state in STATES)], paper
    assert sum(ITEMS.values()) == 89
    assert sum(counted.values(), Counter[str]())["missing"] <= 3


def test_a_file_that_is_not_there_is_noticed() -> None:
    assert faults("`docs/papers/none.md`, `tests/plugins/papers/test_paper_items.py::test_nothing_of_this`") == [
        "docs/papers/none.md",
        "tests/plugins/papers/test_paper_items.py::test_nothing_of_this",
    ]
    assert (
        faults("`tests/plugins/papers/test_paper_items.py::test_a_file_that_is_not_there_is_noticed`, `--x a/b`") == []
    )
