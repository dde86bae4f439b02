"""How many examples Hypothesis draws: all in the thorough profile, and one in 16 in the quick one."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

THOROUGH = 25  # examples of a test that states no number, and the most of any: `make fuzz` draws more
LEAST = 3


def seeds(count: int) -> range:
    """Return the seeds of a test that draws `count` problems by itself in the thorough profile."""
    return range(_quick_or(count))


def examples(count: int, **options: Any) -> settings:
    """Return the settings of a test that draws `count` examples in the thorough profile."""
    return settings(max_examples=_quick_or(count), **options)


def _quick_or(count: int) -> int:
    is_quick = settings.get_current_profile_name() == "quick"
    return min(count, max(LEAST, count // 16) if is_quick else THOROUGH)
