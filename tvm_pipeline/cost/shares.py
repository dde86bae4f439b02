"""How the replicas of a stage share its frames, where some of them serve other stages as well.

Replicas take frames as they become free. A device d of the stage spends f_d seconds of every frame on stages that it
serves alone, and t_d seconds on each frame that it takes of the replicated stage. With P seconds between frames it has
P - f_d of them for the replicated stage, so it takes the share max(0, (P - f_d) / t_d) of the frames. Where a device
copies beside its computing, both have such a share, and the device takes the smaller one. P is the least with which the
shares add up to 1. Without other stages this is the sum of the rates, P = 1 / sum(1 / t_d).

This is a limit: enough frames must be inside, so that no replica waits for one. Next: `evaluate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

LEAST_S = 1e-12


def shared_frames(replicas: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, list[float]]:
    """Return the frames a second of a stage on replicas, and the share of the frames of each.

    The time of a device that serves other stages for longer than this stage needs is not counted: its share is 0.

    Args:
        replicas: the loads of each device: one, or computing and copies where both run at once. A load has the
            seconds for a frame of the stage, t_d, and for all other stages of the device, f_d.
    """
    loads = [[(max(own_s, LEAST_S), fixed_s) for own_s, fixed_s in load] for load in replicas]
    if not any(fixed_s for load in loads for _, fixed_s in load):
        rates = [1 / max(own_s for own_s, _ in load) for load in loads]
        return sum(rates), [rate / sum(rates) for rate in rates]

    def taken(period_s: float) -> list[float]:
        return [max(0.0, min((period_s - fixed_s) / own_s for own_s, fixed_s in load)) for load in loads]

    # Between two of these periods each device has one limit: it takes no frames, or computing or copies limit it.
    changes = {fixed_s for load in loads for _, fixed_s in load}
    for load in loads:
        for (own_s, fixed_s), (other_s, beside_s) in combinations(load, 2):
            if own_s != other_s:
                changes.add((fixed_s * other_s - beside_s * own_s) / (other_s - own_s))
    last_s = max(change_s for change_s in changes if sum(taken(change_s)) <= 1)
    next_s = min((change_s for change_s in changes if change_s > last_s), default=last_s + 1)
    beyond_s = (last_s + next_s) / 2
    limits = [min(load, key=lambda one: (beyond_s - one[1]) / one[0]) for load in loads]
    taking = [(own_s, fixed_s) for own_s, fixed_s in limits if fixed_s < beyond_s]
    period_s = (1 + sum(fixed_s / own_s for own_s, fixed_s in taking)) / sum(1 / own_s for own_s, _ in taking)
    return 1 / period_s, taken(period_s)
