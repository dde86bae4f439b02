"""`tvm-pipeline memory`: the memory that orders of the operators need, and where its peak is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tvm_pipeline.backends.contract import CompiledModel, StageArena
from tvm_pipeline.cli.options import JsonOption, ShapesOption, ValuesOption, check_outputs, shapes_of, values_of
from tvm_pipeline.cli.output import print_json, show, spinner, warn
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.partition import check_partition
from tvm_pipeline.core.plan import Plan, read_plan
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import OptionError, PlanError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.frontends import Shapes, Values, is_relay
from tvm_pipeline.memory.arena import Layout, exact_layout, lifetimes, plan_arena
from tvm_pipeline.memory.certificate import memory_certificate
from tvm_pipeline.memory.memory_graph import peak_bytes
from tvm_pipeline.memory.savings import Savings, savings
from tvm_pipeline.memory.stage_memory import Comparison, compare, peak_operators
from tvm_pipeline.memory.traffic import traffic
from tvm_pipeline.memory.traffic_order import traffic_order
from tvm_pipeline.report import TextTable, alive_at, draw_memory, orders_table, peak_table
from tvm_pipeline.report.parts_tables import savings_table, savings_text
from tvm_pipeline.workflow.steps import compile_source, opened_bundle

_log = logging.getLogger(__name__)


def command(
    source: Annotated[
        str, typer.Argument(help="A model, a bundle (.tar), or an operator graph (.json), which needs no TVM.")
    ],
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Examine each stage of this plan; a bundle has its own.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Memory over time, in the listed and in the best order: .svg or .png.")
    ] = None,
    on_chip: Annotated[
        int | None,
        typer.Option("--on-chip", help="Bytes of an on-chip memory: also list what each order moves to and from it."),
    ] = None,
    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Also list what doing concatenations and sums in parts would save."),
    ] = False,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Write what `tools/check_memory.py` needs to prove the bounds of the whole graph again."),
    ] = None,
    input_shapes: ShapesOption = None,
    input_values: ValuesOption = None,
    json: JsonOption = False,
) -> None:
    """Find the order of operators that needs the least memory, and list what the usual orders need.

    Activations are counted, with inputs and outputs alive to the end; `plan` and `show` list parameters. A
    concatenation is counted as a copy, which most runtimes make, and once more as free: readers read its parts. Of a
    model or a bundle, what its compiled stages really have is listed, too.

    Example: tvm-pipeline memory model.onnx --plot memory.svg
    """
    if on_chip is not None and on_chip <= 0:
        raise OptionError(f"--on-chip {on_chip}: give the bytes of the on-chip memory, above 0")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise OptionError(f"--plot {plot}: pictures are .png or .svg")
    check_outputs(plot, certificate, inputs=(Path(source), *([plan] if plan else ())))
    with spinner():
        graph, chosen, compiled = _read(source, shapes_of(input_shapes), values_of(input_values), plan)
        _say_empty(graph)
        _log.info("searching for the order that needs the least memory")
        parts: list[tuple[str, Sequence[str] | None]] = [(graph.name, None)]
        for index, stage in enumerate(chosen.stages if chosen else ()):
            parts.append((f"stage {index} on {', '.join(stage.devices)}", stage.operators))
        found = [compare(name, graph, operators) for name, operators in parts]
        free = [_free(part, graph, operators) for part, (_, operators) in zip(found, parts, strict=True)]
        saved = [savings(name, graph, operators) for name, operators in parts] if rewrite else []
        layouts = [exact_layout(lifetimes(part.graph, part.least.order)[0]) for part in found]
        arenas = [_arena(part, layout) for part, layout in zip(found, layouts, strict=True)]
        moved = [_moved(part, on_chip) for part in found] if on_chip else []
        if plot:
            draw_memory(found, plot)
        if certificate:
            write_bytes(certificate, memory_certificate(found[0].graph, found[0].least, layouts[0]).encode())
    if json:
        rows = [_json(part, arena) for part, arena in zip(found, arenas, strict=True)]
        for row, other in zip(rows, free, strict=True):
            row["free_concatenations"] = _orders(other) if other else None
        for row, traffics in zip(rows, moved, strict=False):
            row["traffic_bytes"] = traffics
        for row, saving in zip(rows, saved, strict=False):
            row["rewriting"] = _rewriting(saving)
        made = [{"stage": name, **asdict(arena)} for name, arena in compiled]
        print_json({"graph": graph.name, "parts": rows, "compiled": made, "plot": str(plot) if plot else None})
        return
    show(orders_table([row for both in zip(found, free, strict=True) for row in both if row]), json)
    show(_arena_table(found, arenas), json)
    if compiled:
        show(_compiled_table(compiled), json)
    if moved:
        show(_traffic_table(found, moved, on_chip or 0), json)
    if saved:
        show(savings_table(saved), json)
        for saving in saved:
            show(savings_text(saving), json)
    show(peak_table(found[0]), json)
    for written in filter(None, (plot, certificate)):
        show(f"written: {written}", json)


def _read(
    source: str, shapes: Shapes | None, values: Values | None, plan: Path | None
) -> tuple[OperatorGraph, Plan | None, list[tuple[str, StageArena]]]:
    """Return the graph, the plan whose stages are to be examined, and what the compiled stages have."""
    chosen, arenas = read_plan(plan) if plan else None, list[tuple[str, StageArena]]()
    if source.endswith(".tar"):
        with opened_bundle(Path(source)) as bundle:
            graph, chosen = bundle.graph, chosen or bundle.plan
            _check_plan(graph, chosen, plan or source)
            arenas = _stage_arenas(bundle.compiled, bundle.platform, chosen)
    elif source.endswith(".json") and not is_relay(source):
        graph = read_graph(source)
    else:
        made = compile_source(source, shapes, None, values=values)
        graph = made.compiled.graph
        arenas = _stage_arenas(made.compiled, made.platform, chosen)
    if chosen is not None:
        _check_plan(graph, chosen, plan or source)
    return graph, chosen, arenas


def _check_plan(graph: OperatorGraph, plan: Plan, file: Path | str) -> None:
    """Raise PlanError, which names the file, where a plan is of another graph."""
    with blamed(file, PlanError, "plan it anew with `tvm-pipeline plan`"):
        check_partition(graph, [stage.operators for stage in plan.stages])


def _stage_arenas(compiled: CompiledModel, platform: Platform, plan: Plan | None) -> list[tuple[str, StageArena]]:
    """Return what compiled stages have; without a plan the whole model on the first device that computes all of it."""
    names = compiled.graph.operator_names
    able = [device.name for device in platform.devices if compiled.computes(device) == names]
    stages = [(stage.operators, stage.devices[0]) for stage in plan.stages] if plan else [(names, able[0])] * bool(able)
    own = set(names)  # a plan may have work around the model, too
    return [
        (f"stage {index} on {device}", arena)
        for index, (operators, device) in enumerate(stages)
        if (inside := [name for name in operators if name in own])
        and (arena := compiled.stage_arena(inside, platform.device(device)))
    ]


def _free(part: Comparison, graph: OperatorGraph, operators: Sequence[str] | None) -> Comparison | None:
    """Return the part with concatenations that take no memory of their own; None if it has none of these."""
    free = compare(f"{part.name}, concatenations free", graph, operators, "free")
    return free if len(free.graph) < len(part.graph) else None


def _say_empty(graph: OperatorGraph) -> None:
    empty = [name for name, tensor in graph.tensors.items() if not tensor.bytes]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        named = ", ".join(empty[:3])
        warn(f"tensors of no bytes: {named}{more}; they take no memory, check their shapes")


def _arena(found: Comparison, layout: Layout) -> dict[str, int]:
    """Return the bytes of the arena: greedy in the listed order; greedy, exact and the bound in the best one."""
    return {
        "listed": plan_arena(lifetimes(found.graph, found.listed)[0])[1],
        "greedy": plan_arena(lifetimes(found.graph, found.least.order)[0])[1],
        "exact": layout.arena_bytes,
        "bound": layout.bound_bytes,
    }


def _moved(found: Comparison, on_chip: int) -> dict[str, int]:
    """Return the bytes to and from the on-chip memory by each order, and a bound for every order."""
    best = traffic_order(found.graph, on_chip, [found.least.order])
    moved = {name: traffic(found.graph, order, on_chip).bytes for name, order in found.orders.items()}
    return {**moved, "least_traffic": best.traffic_bytes, "bound": best.bound_bytes}


def _orders(found: Comparison) -> dict[str, Any]:
    graph, least = found.graph, found.least
    return {
        "name": found.name,
        "operators": len(graph),
        "peak_bytes": {name: peak_bytes(graph, order) for name, order in found.orders.items()},
        "bound_bytes": least.bound_bytes,
        "status": least.status,
        "gap": least.gap,
        "order": [graph.operators[index] for index in least.order],
    }


def _json(found: Comparison, arena: dict[str, int]) -> dict[str, Any]:
    graph, least = found.graph, found.least
    return {
        **_orders(found),
        "fullest": [
            {
                "operator": graph.operators[index],
                "alive": [{"name": t.name, "bytes": t.bytes} for t in alive_at(found, least.order, index)],
            }
            for index in peak_operators(graph, least.order)
        ],
        "arena_bytes": arena,
    }


def _rewriting(found: Savings) -> dict[str, Any]:
    """Return the least peaks without and with operators in parts, and which operators these are."""
    columns = {"partitioned": found.partitioned, "every": found.every}
    return {
        "peak_bytes": found.plain.peak_bytes,
        **{
            name: {
                "peak_bytes": made.ordering.peak_bytes,
                "status": made.ordering.status,
                "operators": made.operators,
            }
            for name, made in columns.items()
        },
        "int32_bytes": found.carried_bytes,
        "why": found.why,
    }


def _arena_table(found: list[Comparison], arenas: list[dict[str, int]]) -> TextTable:
    rows = [
        (part.name, *(f"{arena[name]:,}" for name in ("listed", "greedy", "exact", "bound")))
        for part, arena in zip(found, arenas, strict=True)
    ]
    columns = ("bytes of the arena", "listed order", "least, greedy", "least, exact", "bound")
    return TextTable("Layout in one arena", columns, tuple(rows))


def _compiled_table(compiled: Sequence[tuple[str, StageArena]]) -> TextTable:
    rows = [
        (
            name,
            f"{arena.arena_bytes:,}",
            "-" if arena.apart_bytes is None else f"{arena.apart_bytes:,}",
            str(arena.in_place),
            str(arena.copied),
        )
        for name, arena in compiled
    ]
    columns = ("bytes of the arena", "as it runs", "nothing shared", "concatenations in place", "copied")
    return TextTable("Compiled stages, whose outputs lie in the caller's buffers", columns, tuple(rows))


def _traffic_table(found: list[Comparison], moved: list[dict[str, int]], on_chip: int) -> TextTable:
    rows = [(part.name, *(f"{figure:,}" for figure in row.values())) for part, row in zip(found, moved, strict=True)]
    columns = ("bytes moved", "listed order", "Kahn's order", "least memory", "least traffic", "bound")
    return TextTable(f"Traffic of an on-chip memory of {on_chip:,} bytes", columns, tuple(rows))
