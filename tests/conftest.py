"""Every run of the tests takes the same examples: a failure on one machine is a failure on all."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, print_blob=False)
settings.load_profile("repeatable")
