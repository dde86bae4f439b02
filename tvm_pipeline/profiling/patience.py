"""How long to try to measure again what was disturbed."""

from __future__ import annotations

import math
import random
import time

AGAIN = 3.0  # measuring again takes at most so many times as long as measuring once
LONGEST_S = 30.0  # and at most so long
LEAST_STRICT_S, LONGEST_STRICT_S = 20.0, 60.0  # who would rather have no figures than doubtful ones tries for longer
HOPELESS = 0.5  # a machine on which so much of the time brings nothing is taken to be never quiet
LONGEST_PAUSE_S = 0.1


class Patience:
    """Decides whether to measure again.

    Args:
        once_s: seconds that measuring once took.
        strict: whether to try for longer, and to go on even where nothing is gained.
    """

    def __init__(self, once_s: float, strict: bool = False) -> None:
        self._once_s, self._strict = once_s, strict
        least_s, most_s = (LEAST_STRICT_S, LONGEST_STRICT_S) if strict else (0.0, LONGEST_S)
        self.until_s = once_s + min(max(AGAIN * once_s, least_s), most_s)
        self._fewest, self._gained_at_s = math.inf, once_s

    def lasts(self, spent_s: float, lacking: int) -> bool:
        """Return whether to go on after so many seconds in all, where so many undisturbed passes are lacking."""
        if lacking < self._fewest:
            self._fewest, self._gained_at_s = lacking, spent_s
        is_hopeless = spent_s - self._gained_at_s >= HOPELESS * self._once_s and not self._strict
        return lacking > 0 and spent_s < self.until_s and not is_hopeless


def pause(longest_s: float) -> float:
    """Wait for a random moment, so as not to keep step with a load that comes and goes; return its seconds."""
    seconds = min(longest_s, LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
    time.sleep(seconds)
    return seconds
