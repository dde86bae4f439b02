"""The figures of devices as arrays, and the loops that add up what a stage costs on one: the formula of the searches.

A stage on device d, which receives a frame from device p, costs

    call + added + max(work, spill * fetched bytes)   computing
    + receive + link[p] + send                        transfers, each a fixed part and a part for each byte

where `added` and `work` are sums over its operators (`device_costs.py`), and the fetched bytes are the parameters
beyond the cache. The transfers of a device with `concurrent_copies` occupy no device but a bus of their own. Searches
differ in how they come to these sums, and add up costs here. Only CP-SAT does not: it states them as integers and
constraints (`planning/sat/placement.py`). `evaluate.py`, which judges every plan, computes the same without these
arrays, and so checks them. A new kind of cost is a field of `DeviceTable` and a term of `moving`, or of `computing` and
`computed`.

A loop takes the table out of another NamedTuple once, since numba counts references to its arrays each time.

Next: `planning/search/cost_tables.py`, the sums over all cuts of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import Floats, cost_of
from tvm_pipeline.solvers.hot import hot


class DeviceTable(NamedTuple):
    """The figures of D devices, in seconds or in another unit that seconds are scaled to.

    Attributes:
        call: D; of a stage.
        spill: D; of a byte of parameters beyond the cache, which every frame fetches again.
        cached: D; the capacity of the cache in bytes; infinite where all parameters stay.
        receive, send: 2 x D; the fixed cost of a transfer, and the cost of a byte.
        link: 2 x (D + 1) x D; the same, from the device of the row. Row D is the source of the frames, which is free.
    """

    call: Floats
    spill: Floats
    cached: Floats
    receive: Floats
    send: Floats
    link: Floats


def device_table(
    problem: Problem,
    devices: Sequence[Device],
    scale: Sequence[float] | None = None,
    bus: str = "",
    *,
    occupied: bool = False,
) -> DeviceTable:
    """Return the figures of devices.

    Args:
        scale: a factor for the seconds of each device, such as how much slower it is beside others; 1 without it.
        bus: count only the seconds for which a stage occupies this bus: fetches, links and concurrent copies.
        occupied: count only the seconds for which a stage occupies its device, so no concurrent copies.
    """
    costs = [cost_of(problem, device) for device in devices]
    factor = np.ones(len(devices)) if scale is None else np.array(scale, np.float64)
    copied = [cost.copies_bus == bus if bus else not (occupied and cost.copies_bus) for cost in costs]
    receive = [[cost.receive.latency_s for cost in costs], [cost.receive.s_per_byte for cost in costs]]
    send = [[cost.send.latency_s for cost in costs], [cost.send.s_per_byte for cost in costs]]
    link = np.zeros((2, len(devices) + 1, len(devices)))
    for p, source in enumerate(devices):
        for d, device in enumerate(devices):
            hop = problem.link(source.name, device.name)
            if source != device and (copied[d] if not bus else bus == (hop.bus or costs[d].copies_bus)):
                link[:, p, d] = hop.latency_s, hop.transfer.s_per_byte
    return DeviceTable(
        call=np.array([0.0 if bus else cost.call_s for cost in costs]) * factor,
        spill=np.array([cost.spill_s_per_byte if bus in ("", cost.shared_bus) else 0.0 for cost in costs]) * factor,
        cached=np.array([cost.cached_bytes for cost in costs], np.float64),
        receive=np.array(receive) * factor * copied,
        send=np.array(send) * factor * copied,
        link=link * factor,
    )


@hot
def fetched(table: DeviceTable, d: int, params: float) -> Any:
    """Return the bytes of parameters that the cache does not hold."""
    return max(0.0, params - table.cached[d])


@hot
def fetched_share(table: DeviceTable, d: int, params: float, all_params: float) -> Any:
    """Return the bytes that a stage fetches if all stages on the device, which share the cache, have so many."""
    beyond = fetched(table, d, all_params)
    return beyond * params / all_params if beyond > 0.0 else 0.0


@hot
def computing(table: DeviceTable, d: int, added: float, work: float, fetched_bytes: float) -> Any:
    """Return the cost of computing a stage with these sums over its operators."""
    return table.call[d] + added + max(work, table.spill[d] * fetched_bytes)


def computed(call: float, spill: float, cached: float, added: Floats, work: Floats, param_bytes: Floats) -> Floats:
    """Return `computing` of many stages, which have so many bytes of parameters, on a device with these figures."""
    return np.asarray(call + added + np.maximum(work, spill * np.maximum(0.0, param_bytes - cached)))


@hot
def over_link(table: DeviceTable, p: int, d: int, received: float) -> Any:
    """Return the cost of receiving so many bytes over the link from device p alone."""
    return table.link[0, p, d] + received * table.link[1, p, d]


@hot
def moving(table: DeviceTable, p: int, d: int, received: float, sent: float) -> Any:
    """Return the cost of the transfers of a stage that receives and sends so many bytes."""
    own = table.receive[0, d] + received * table.receive[1, d] + table.send[0, d] + sent * table.send[1, d]
    return own + over_link(table, p, d, received)
