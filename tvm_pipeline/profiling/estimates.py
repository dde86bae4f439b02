"""The figures of a device from what was timed on it: medians of undisturbed samples, with their confidence intervals.

The time of the whole model sets the level, the operators' times only how it is shared out. Next: `device_bench.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.partition import slice_ends
from tvm_pipeline.core.platform import Transfer
from tvm_pipeline.core.profile import DeviceProfile
from tvm_pipeline.profiling.links import SIZES, fit_transfer
from tvm_pipeline.profiling.timings import Rows, Samples, Timing, TrustedTimings, best_reference_s, relative_half_width

# The reference kernel tells nothing beside other devices: it is fastest in a moment in which they do not work.
BESIDE_OTHERS = 0.0


@dataclass
class DeviceTimings:
    """All that was timed on one device, or on several equal ones.

    Attributes:
        operators: passes in which each operator was timed.
        received: transfers to the device, a column for each of SIZES.
        sent: transfers from the device.
        whole: passes over the whole model while no other device worked.
        busy: passes over the whole model while other devices worked too.
    """

    operators: list[Rows] = field(default_factory=list)
    received: list[Rows] = field(default_factory=list)
    sent: list[Rows] = field(default_factory=list)
    whole: list[Timing] = field(default_factory=list)
    busy: list[Timing] = field(default_factory=list)

    @classmethod
    def of_one(cls, parts: Iterable[DeviceTimings]) -> DeviceTimings:
        """Return what was timed on several devices as if they were one."""
        found = cls()
        for part in parts:
            for name in cls.__dataclass_fields__:
                getattr(found, name).extend(getattr(part, name))
        return found

    @property
    def best_alone_s(self) -> float:
        """The seconds of the reference kernel while nothing disturbs the core and no other device works."""
        return best_reference_s([*(rows.window for rows in self.operators), *(timing.window for timing in self.whole)])


@dataclass(frozen=True)
class Estimate:
    """The figures of a device, and the passes that they rest on: alone, and beside other devices."""

    figures: DeviceProfile
    whole: TrustedTimings
    busy: TrustedTimings


def estimate(graph: OperatorGraph, measured: DeviceTimings, least: int, stages: Sequence[Sequence[str]]) -> Estimate:
    """Return the figures of a device; an operator that is in no stage has no seconds.

    The uncertainty of an operator is that of its share of the model and that of the whole model's time, which were
    measured independently, so that their squares add up.

    Args:
        least: how many undisturbed passes are enough.
        stages: the operators of a pass, in the stages that ran.
    """
    best_s = measured.best_alone_s
    computed = [graph.edges.index[name] for stage in stages for name in stage]
    rows = _undisturbed(measured.operators, best_s, least)[:, computed]
    median = np.median(rows, axis=0)
    low, high = np.quantile(rows, [0.25, 0.75], axis=0)
    whole = TrustedTimings(measured.whole, best_s, least)
    busy = TrustedTimings(measured.busy, BESIDE_OTHERS, least)
    receive, send = (_fitted(samples, best_s, least) for samples in (measured.received, measured.sent))
    compute_s = whole.median - sum(moved_s(graph, stage, receive, send) for stage in stages)
    if compute_s <= 0:  # The transfers take nearly all the time, and the difference is noise.
        compute_s = float(median.sum())
    seconds: list[float | None] = [None] * len(graph)
    spread, uncertainty = np.zeros((2, len(graph)))
    for index, figure in zip(computed, (median * compute_s / median.sum()).tolist(), strict=True):
        seconds[index] = figure
    spread[computed] = (high - low) / median
    uncertainty[computed] = np.hypot(relative_half_width(rows), whole.uncertainty)
    found = DeviceProfile.in_order(
        graph,
        seconds=seconds,
        spread=spread.tolist(),
        busy_factor=max(busy.median / whole.median, 1.0) if measured.busy else 1.0,
    )
    by_name = dict(zip(found.seconds, uncertainty.tolist(), strict=True))
    return Estimate(replace(found, receive=receive, send=send, uncertainty=by_name), whole, busy)


def undisturbed_rows(batches: Sequence[Rows], best_s: float) -> int:
    """Return how many passes were timed in undisturbed windows."""
    return sum(len(rows.seconds) for rows in batches if not rows.window.is_disturbed(best_s))


def _undisturbed(batches: Sequence[Rows], best_s: float, least: int) -> Samples:
    """Return the passes of undisturbed windows. If they are too few, those of the least disturbed join them.

    Their medians are still good: a program that takes the core away meets few of the short operators.
    """
    chosen: list[Samples] = []
    for rows in sorted(batches, key=lambda rows: rows.window.lost(best_s)):
        if not rows.window.is_disturbed(best_s) or sum(map(len, chosen)) < least:
            chosen.append(rows.seconds)
    return np.concatenate(chosen)


def _fitted(batches: Sequence[Rows], best_s: float, least: int) -> Transfer | None:
    """Return the line through the medians of each size; None where the device has no transfers."""
    return fit_transfer(SIZES, np.median(_undisturbed(batches, best_s, least), axis=0)) if batches else None


def moved_s(graph: OperatorGraph, stage: Sequence[str], receive: Transfer | None, send: Transfer | None) -> float:
    """Return the seconds in which a device receives what a stage reads and sends what it gives, as predicted."""
    taken, given = slice_ends(graph, stage)
    seconds = 0.0
    if receive is not None:
        seconds += receive.seconds(sum(tensor.bytes for tensor in taken))
    if send is not None:
        seconds += send.seconds(sum(tensor.bytes for tensor in given))
    return seconds
