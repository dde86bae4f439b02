"""How other processes ended, in words."""

from __future__ import annotations

import signal


def how_ended(status: int) -> str:
    """Return how a process ended, from its status as `subprocess` gives it.

    >>> how_ended(1), how_ended(-9)
    ('ended with status 1', 'was killed by SIGKILL')
    """
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
