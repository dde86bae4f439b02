"""Certificates of memory: an order with its peak, its layout in an arena, and the lower bounds of both.

`tools/check_memory.py` defines what the fields mean, and proves the bounds again from them.
"""

from __future__ import annotations

import json

from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory.arena import ALIGNMENT, Layout, lifetimes, most_alive
from tvm_pipeline.memory.memory_graph import MemoryGraph
from tvm_pipeline.memory.orders import Ordering


def memory_certificate(graph: MemoryGraph, found: Ordering, layout: Layout) -> str:
    """Return the certificate of an order and of the layout of its buffers (`arena.lifetimes`), as JSON.

    Raises:
        OptionError: operators overwrite their inputs or need a workspace, of which there are no certificates.
    """
    if any(graph.in_place) or any(graph.workspace_bytes):
        raise OptionError(f"no certificate: operators of {graph.name} overwrite inputs, or need a workspace")
    tensors, tensor_of = lifetimes(graph, found.order)
    stated = {
        "certificate": 1,
        "graph": graph.name,
        "operators": graph.operators,
        "buffers": [
            {
                "name": buffer.name,
                "bytes": buffer.bytes,
                "writers": [graph.operators[index] for index in buffer.producers],
                "readers": [graph.operators[index] for index in buffer.consumers],
                "kept": buffer.pinned,
            }
            for buffer in graph.buffers
        ],
        "order": [graph.operators[index] for index in found.order],
        "peak": found.peak_bytes,
        "bound": found.bound_bytes,
        "alignment": ALIGNMENT,
        "offsets": {
            buffer.name: layout.offsets[place]
            for buffer, place in zip(graph.buffers, tensor_of, strict=True)
            if place >= 0
        },
        "arena": layout.arena_bytes,
        "arena_bound": most_alive(tensors),
    }
    return json.dumps(stated, indent=1) + "\n"
