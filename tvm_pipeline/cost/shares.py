"""How the replicas of a stage share its frames, where some of them serve other stages as well.

Replicas take frames as they become free. A device d of the stage spends f_d seconds of every frame on stages that it
serves alone, and t_d seconds on each frame that it takes of the replicated stage. With P seconds between frames it has
P - f_d of them for the replicated stage, so it takes the share max(0, (P - f_d) / t_d) of the frames. P is the least
with which the shares add up to 1. Without other stages this is the sum of the rates, P = 1 / sum(1 / t_d).

This is a limit: enough frames must be inside, so that no replica waits for one. Next: `evaluate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence


def shared_frames(replicas: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Return the frames a second of a stage on replicas, and the share of the frames of each.

    The time of a device that serves other stages for longer than this stage needs is not counted: its share is 0.

    Args:
        replicas: for each device its seconds for a frame of the stage, t_d, and for all its other stages, f_d.
    """
    taken_s = [max(own_s, 1e-12) for own_s, _ in replicas]
    if not any(fixed_s for _, fixed_s in replicas):
        rates = [1 / own_s for own_s in taken_s]
        return sum(rates), [rate / sum(rates) for rate in rates]
    # The devices with the least other work take frames first; each further one joins where it has time left.
    period_s, work, rate = 0.0, 1.0, 0.0
    for own_s, fixed_s in sorted(zip(taken_s, (fixed_s for _, fixed_s in replicas), strict=True), key=lambda r: r[1]):
        if rate and period_s <= fixed_s:
            break
        work, rate = work + fixed_s / own_s, rate + 1 / own_s
        period_s = work / rate
    shares = [max(0.0, (period_s - fixed_s) / own_s) for own_s, (_, fixed_s) in zip(taken_s, replicas, strict=True)]
    return 1 / period_s, shares
