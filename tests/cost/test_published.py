"""The published rows in `profiles/published/`: each says where it is from, and names a graph that is there, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROFILES = Path(__file__).parents[2] / "profiles"
# Figures of a paper and the sizes of its graphs, which are no times of a network.
NO_TIMES = {"sec2022-figures", "sec2022-table-3"}
TABLES = [path for path in sorted((PROFILES / "published").glob("*.json")) if path.stem not in NO_TIMES]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_published_table_can_be_compared_with(path: Path) -> None:
    table = json.loads(path.read_text())
    assert table["source"]
    assert table["what"].startswith("ms ")
    platforms = {each.stem for each in (PROFILES / "platforms").glob("*.toml")}
    assert table["rows"]
    for row in table["rows"]:
        assert row["ms"] > 0
        assert row["side"] in (224, 299)
        assert row["network"] is None or (PROFILES / "keras" / f"{row['network']}.json").exists()
        assert row["network"] or row["published_as"]
        assert row["stages"] == 1 or f"{table['platform']}-{row['stages']}" in platforms


def test_no_row_is_lost() -> None:
    """As many rows as the papers' tables have, and as Coral's has classifiers that are not made for the Edge TPU."""
    assert {path.stem: len(json.loads(path.read_text())["rows"]) for path in TABLES} == {
        "coral-usb": 12,
        "sec2022-table-1": 10,
        "sec2022-table-2": 9,
    }
