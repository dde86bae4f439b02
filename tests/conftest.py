"""Every run of the tests takes the same examples: a failure on one machine is a failure on all."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# A shell starts a job in the background with SIGINT ignored; tests of Ctrl-C and their processes need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, print_blob=False)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that at the end no core waits for another.
    items.sort(key=lambda item: item.path.name != "test_examples.py")
