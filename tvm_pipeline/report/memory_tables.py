"""Memory of activations: the orders of operators beside each other, the tensors alive at the peak, and a picture.

Read next: `memory/stage_memory.py`, which finds the orders; `tables.py`, which has the tables of plans and runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.cost.evaluate import param_bytes_of
from tvm_pipeline.memory.arena import Lifetime, lifetimes
from tvm_pipeline.memory.memory_graph import footprint, peak_bytes
from tvm_pipeline.memory.stage_memory import Comparison, least_peak, listed_peak, peak_operators
from tvm_pipeline.report.drawing import CUT, INK, PALE, new_figure, save_figure
from tvm_pipeline.report.tables import TextTable, percent, size

# How many operators at the peak are shown; on a long plateau their tables are nearly the same.
SHOWN = 3


def orders_table(comparisons: Sequence[Comparison]) -> TextTable:
    """Return the peak of each order, how much it is above the least, and how far that is proven."""
    columns = ("bytes at the peak", "operators", "listed order", "Kahn's order", "least", "proven")
    rows = []
    for found in comparisons:
        least = found.least.peak_bytes
        peaks = [peak_bytes(found.graph, order) for order in (found.listed, found.kahn)]
        cells = [f"{peak:,} ({percent(peak / least - 1 if least else 0.0, signed=True)})" for peak in peaks]
        proven = "optimal" if found.least.status == "optimal" else f"within {percent(found.least.gap)}"
        rows.append((found.name, str(len(found.graph)), *cells, f"{least:,}", proven))
    return TextTable("Memory of activations", columns, tuple(rows))


def peak_table(found: Comparison) -> TextTable:
    """Return the operators at the peak of the best order, and the tensors alive there, the largest first."""
    order = found.least.order
    operators = peak_operators(found.graph, order)
    rows = []
    for index in operators[:SHOWN]:
        for position, tensor in enumerate(alive_at(found, order, index)):
            rows.append(("" if position else found.graph.operators[index], tensor.name, f"{tensor.bytes:,}"))
    more = f" ({len(operators) - SHOWN} more of the same peak)" if len(operators) > SHOWN else ""
    return TextTable(f"Alive at the peak of {found.name}{more}", ("operator", "tensor", "bytes"), tuple(rows))


def alive_at(found: Comparison, order: Sequence[int], operator: int) -> list[Lifetime]:
    """Return the tensors alive while an operator of `order` runs, the largest first."""
    step = list(order).index(operator)
    alive = [tensor for tensor in lifetimes(found.graph, order)[0] if tensor.first <= step <= tensor.last]
    return sorted(alive, key=lambda tensor: -tensor.bytes)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory that one stage of a plan needs on one of its devices.

    Attributes:
        activation_bytes, listed_bytes: the peak in the order that needs least, and in the listed one.
        held_bytes: parameters of all stages of the device.
        memory_bytes: the memory of the device; None if it is unknown.
    """

    stage: int
    device: str
    parameter_bytes: int
    activation_bytes: int
    listed_bytes: int
    held_bytes: int
    memory_bytes: int | None

    @property
    def needs_its_order(self) -> bool:
        """Return whether it fits in the order that needs least, and not in the listed one."""
        capacity = math.inf if self.memory_bytes is None else self.memory_bytes - self.held_bytes
        return self.activation_bytes <= capacity < self.listed_bytes


def stage_memories(graph: OperatorGraph, platform: Platform, plan: Plan) -> list[StageMemory]:
    """Return a row for each stage and device; raise GraphError if tensors have impossible sizes."""
    return [
        StageMemory(
            index,
            name,
            param_bytes_of(graph, [stage]),
            least_peak(graph, stage.operators).peak_bytes,
            listed_peak(graph, stage.operators),
            param_bytes_of(graph, [other for other in plan.stages if name in other.devices]),
            platform.device(name).memory_bytes,
        )
        for index, stage in enumerate(plan.stages)
        for name in stage.devices
    ]


def stages_memory_table(memories: Sequence[StageMemory]) -> TextTable:
    """Return the table of the stages' memory; a stage that fits in the best order only is marked."""
    rows = tuple(
        (
            f"{found.stage} on {found.device}",
            size(found.parameter_bytes),
            size(found.activation_bytes),
            size(found.listed_bytes),
            size(found.memory_bytes),
        )
        for found in memories
    )
    marked = frozenset(row for row, found in enumerate(memories) if found.needs_its_order)
    title = "Memory of the stages" + (
        " (marked: fits in the order of least memory only, which `compile` then takes)" if marked else ""
    )
    columns = ("stage", "parameters", "activations", "in the listed order", "the device has")
    return TextTable(title, columns, rows, marked)


def draw_memory(comparisons: Sequence[Comparison], path: Path | str) -> None:
    """Draw the bytes alive while each operator runs: a row for each stage, in the listed and in the best order.

    Raises:
        PipelineError: matplotlib is not installed, or the file cannot be written.
        OptionError: `path` is neither .png nor .svg.
    """
    figure = new_figure(11, 0.6 + 2.9 * len(comparisons))
    figure.set_layout_engine("constrained")
    for row, found in enumerate(comparisons):
        axes = figure.add_subplot(len(comparisons), 1, row + 1)
        unit, name = next((u for u in ((1e6, "MB"), (1e3, "kB")) if found.least.peak_bytes >= u[0]), (1.0, "bytes"))
        for label, order, colour in (("listed order", found.listed, PALE), ("least memory", found.least.order, CUT)):
            alive = [count / unit for count in footprint(found.graph, order)]
            axes.stairs(alive, color=colour, label=f"{label}, {size(max(alive, default=0) * unit)}", linewidth=1.2)
            axes.axhline(max(alive, default=0), color=colour, linestyle=":", linewidth=0.8)
        axes.set_xlim(0, len(found.graph))
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"alive, {name}")
        axes.set_xlabel("operators run")
        axes.set_title(found.name, loc="left", fontsize=10, color=INK)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
        axes.grid(axis="y", alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    save_figure(figure, path)
