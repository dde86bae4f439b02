"""A fleet as arrays, and placements of it: index of a camera -> index of its host, -1 where it starves.

Next: placement.py, which searches; spare_hosts.py, which takes hosts away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_hosts.fleet.description import Fleet
from tvm_pipeline_hosts.fleet.placement_loops import Pairs
from tvm_pipeline_hosts.fleet.takeover import Shares, shares

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FleetArrays:
    """The cameras and hosts of a fleet.

    Attributes:
        shares: names, and what `reassigned` needs.
        share: cameras x hosts, what the camera adds to the host's load; inf where the host cannot take it.
    """

    fleet: Fleet
    shares: Shares
    share: Floats

    @classmethod
    def of(cls, fleet: Fleet) -> FleetArrays:
        names = [host.name for host in fleet.hosts]
        found = shares(
            {camera.name: camera.rates_fps for camera in fleet.cameras},
            {host.name: host.work_s for host in fleet.hosts},
            {camera.name: camera.hosts or names for camera in fleet.cameras},
        )
        share = np.full((len(fleet.cameras), len(names)), np.inf)
        share[np.repeat(np.arange(len(share)), np.diff(found.options.first)), found.options.host] = found.options.share
        return cls(fleet, found, share)

    def load(self, host_of: Indices) -> Floats:
        """Return the load of each host."""
        load = np.zeros(self.share.shape[1])
        placed = np.flatnonzero(host_of >= 0)
        np.add.at(load, host_of[placed], self.share[placed, host_of[placed]])
        return load

    def most(self, host_of: Indices) -> float:
        """Return the greatest load."""
        return float(self.load(host_of).max(initial=0.0))


def pairs_of(share: Floats) -> Pairs:
    """Return the arrays of `annealed` for cameras x hosts, whose entries are inf where a host cannot take a camera."""
    # Contiguous as those of one camera are: the loops are compiled for that.
    of, hosts = map(np.ascontiguousarray, np.nonzero(np.isfinite(share)))
    by_host, cameras = map(np.ascontiguousarray, np.nonzero(np.isfinite(share).T))
    first = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=len(share)))])
    begin = np.concatenate([[0], np.cumsum(np.bincount(by_host, minlength=share.shape[1]))])
    return Pairs(first, hosts, begin, cameras, share)
