"""Words that newcomers stumbled over stay out of the pages, of the help and of the tutorials."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The word, and what to write in its place.
BANNED = {
    r"\bat hand\b": "we have no ..., or the thing that is missing",
    r"(is|are|gets|get) said\b": "prints, reports, lists: the thing that says it is the subject",
    r"says so\b": "what it says",
    r"(of|in) the box\b": "built in",
    r"of our own\b": "our",
    r"[Cc]omes? again\b": "is reused, returns",
    r"made real\b": "applied, executed",
    r"listed alone\b": "only",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_plain_english(page: Path) -> None:
    """The help of the commands is in docs/commands.md, which is made of it."""
    text = " ".join(page.read_text().split())
    found = {f"{match[0]}: write {better}" for word, better in BANNED.items() for match in re.finditer(word, text)}
    assert found == set()
