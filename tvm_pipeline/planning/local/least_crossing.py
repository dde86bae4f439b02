"""The least bytes that cross a cut, by the work in front of it: minimum cuts in windows of work.

The first stages of a pipeline hold a downset D of the graph: with each operator all that it needs. Let w(D) be the work
of its operators and X(D) the bytes of the tensors that cross behind it. For every interval of w this module bounds X
from below, over all downsets, which are too many to list. For any price p,

    X(D) >= p w(D) + min over downsets D' of (X(D') - p w(D')),

and that minimum is a minimum cut: a tensor is a node between its writer and its readers, so that it is cut once however
many read it. In a window of work some operators stand in front of every cut (all that does not need them weighs too
little) and some behind (what they need weighs too much). They are fixed, and the bound holds for each window by itself,
where one price for the whole graph would say little.

Minimum cuts with prices on their contents: Picard, "Maximal closure of a graph and applications to combinatorial
problems", Management Science 22(11), 1976. Next: `chain_bound.py`, which makes a bound of pipelines of this.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from tvm_pipeline.planning.local.cut_flow import FREE, INSIDE, OUTSIDE, Network
from tvm_pipeline.planning.search.cuts import Floats, Integers

INTERVALS = 4096
# The numbers of windows, one after another, up to one for each operator. The last ones are left out where time is over.
WINDOWS = (16, 128, 512)
PRICES = 7  # that are tried in each window


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """Bounds of the bytes that cross a cut, for M intervals of the work in front of it.

    Attributes:
        work: M + 1; the ends of the intervals, ascending from 0 to all work.
        least: M; no cut with so much work in front of it has fewer bytes cross; infinite where there is no such cut.
    """

    work: Floats
    least: Floats


def least_crossing(network: Network, work: Floats, price: float, deadline: float = math.inf) -> Crossing:
    """Return bounds of the bytes that cross the cuts of a graph.

    Args:
        work: of each operator, none of it negative, such as seconds.
        price: bytes for a unit of work; prices up to this one are tried. With 0 the bounds are 0.
        deadline: of `time.monotonic`; the bounds are 0 where it leaves no time.

    Examples:
        >>> from tvm_pipeline.testing import example_graph
        >>> crossing = least_crossing(Network(example_graph()), np.array([1.0, 1.0]), price=100.0)
        >>> crossing.least[[0, 2048, -1]]  # in front of the first operator, between the two, and behind both
        array([4., 4., 4.])
    """
    total = float(work.sum())
    edges = np.linspace(0.0, total, INTERVALS + 1)
    least = np.zeros(INTERVALS)
    if network.needs is None or total <= 0 or price <= 0:
        return Crossing(edges, least)
    upstream, downstream = network.with_needs(work)
    for count in WINDOWS:
        if count > max(WINDOWS[0], len(network)):
            break
        size = INTERVALS // count
        for start in range(0, INTERVALS, size):
            if time.monotonic() > deadline:
                return Crossing(edges, least)
            here = slice(start, start + size)
            ends = edges[start : start + size + 1]
            inside = total - downstream < ends[0] * (1 - 1e-9)
            outside = upstream > ends[-1] * (1 + 1e-9)
            if (inside & outside).any():
                least[here] = np.inf  # an operator can stand neither in front of such a cut nor behind it
                continue
            state = np.where(inside, INSIDE, np.where(outside, OUTSIDE, FREE))
            least[here] = np.maximum(least[here], _least_in(network, state, work, ends, price))
    return Crossing(edges, least)


def _least_in(network: Network, state: Integers, work: Floats, ends: Floats, most_price: float) -> Floats:
    """Return bounds for the intervals between `ends`, by prices that bisection finds for the middle of the window."""
    found = np.zeros(len(ends) - 1)
    middle = (ends[0] + ends[-1]) / 2
    low, high, price = -most_price, most_price, 0.0
    for _ in range(PRICES):
        least, cut = network.least_cut(work, price, state)
        line = least + price * ends
        found = np.maximum(found, np.minimum(line[:-1], line[1:]))
        if work[cut].sum() < middle:
            low = price
        else:
            high = price
        price = (low + high) / 2
    return found
