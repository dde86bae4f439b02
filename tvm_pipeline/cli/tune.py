"""`tvm-pipeline tune`: search for faster kernels of a model by measuring, and keep what wins."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from tvm_pipeline.backends.contract import TuningReport
from tvm_pipeline.cli.options import (
    DeviceOption,
    JsonOption,
    PlatformOption,
    RemoteOption,
    ShapesOption,
    ToleranceOption,
    ValuesOption,
    check_remote,
    shapes_of,
    values_of,
)
from tvm_pipeline.cli.output import measured_json, print_json, show, spinner
from tvm_pipeline.core.model import TOLERANCE, with_tolerance
from tvm_pipeline.core.platform import read_platform
from tvm_pipeline.core.problem import checked_objective
from tvm_pipeline.frontends import load
from tvm_pipeline.report import TextTable, comparison_table, in_units_of
from tvm_pipeline.workflow.machine import opened_machine
from tvm_pipeline.workflow.tune_plan import PlanTuning, tune_plan
from tvm_pipeline.workflow.tune_targets import SECONDS, check_seconds


def command(
    model: Annotated[str, typer.Argument(help="A model file, or with Relay a network such as resnet-50.")],
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", help="Seconds of the search, for each target; 0 says what is tuned and measures nothing."
        ),
    ] = SECONDS,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            help="Tune only what bounds the best plan for throughput, latency or energy, and plan again meanwhile.",
        ),
    ] = None,
    tolerance: ToleranceOption = TOLERANCE,
    remote: RemoteOption = None,
    platform: PlatformOption = None,
    device: DeviceOption = "",
    input_shapes: ShapesOption = None,
    input_values: ValuesOption = None,
    json: JsonOption = False,
) -> None:
    """Search for faster kernels of a model by measuring; later compilations of it on this machine use them.

    CPU cores and GPUs of the platform are tuned, one after the other. A board tunes with its own compiler, and what it
    finds serves later compilations here for the board.

    Give `compile` the same --tolerance: with 0, results stay the same bit for bit. A search that was stopped goes on
    where it ended when the command is repeated.

    Example: tvm-pipeline tune model.onnx --seconds 60
    """
    shapes, values = shapes_of(input_shapes), values_of(input_values)
    check_remote(remote, {"objective": objective}, "plans are measured meanwhile; run the command on the board")
    with spinner(), opened_machine(remote) as machine:
        if objective:
            found = tune_plan(
                model,
                checked_objective(objective),
                seconds,
                shapes,
                platform,
                device,
                tolerance=tolerance,
                values=values,
            )
            reports = list(found.reports)
        else:
            check_seconds(seconds)
            asked = with_tolerance(load(model, shapes, values), tolerance)
            given = read_platform(platform) if platform else None
            if device:
                given = machine.platform(given, asked).with_devices(device)
            found, reports = None, machine.tune(asked, given, seconds)
    if json:
        print_json({"targets": [asdict(report) for report in reports], **({"plan": _json(found)} if found else {})})
        return
    show(_table(reports), json)
    for report in reports:
        show(f"{report.target}: {_verdict(report)}", json)
    if found:
        unit = " frames a second" if found.objective == "throughput" else ""
        figures = in_units_of(found.objective, found.predicted)
        show(f"{found.objective} of the best plan, as predicted after each batch: {figures}{unit}", json)
    if found and found.measured:
        show(comparison_table(found.measured, ("before", "tuned")), json)


def _json(found: PlanTuning) -> dict[str, Any]:
    measured = {name: measured_json(result) for name, result in zip(("before", "tuned"), found.measured, strict=False)}
    return {"objective": found.objective, "predicted": found.predicted, **measured}


def _table(reports: list[TuningReport]) -> TextTable:
    rows = tuple(
        (
            report.target,
            f"{report.tuned} of {report.kernels}",
            f"{report.measured}",
            f"{report.candidates}",
            f"{report.seconds:.0f}",
            _milliseconds(report.default_s),
            _milliseconds(report.tuned_s),
        )
        for report in reports
    )
    columns = ("target", "tuned", "searched", "tried", "s", "default ms", "tuned ms")
    return TextTable("Kernels tuned (processor time of one core; time of a GPU)", columns, rows)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g}"


def _verdict(report: TuningReport) -> str:
    """Return what was gained, and why the search ended."""
    if report.ratio is not None and report.spread is not None:
        lower, upper = report.spread
        gained = (
            f"{report.ratio:.3f} times as fast as without tuning ({lower:.3f} to {upper:.3f} in repeated comparisons)"
        )
    elif report.measured:
        gained = "nothing that is faster in the whole network, so its kernels stay as they are"
    else:
        gained = "nothing new"
    return f"{gained}; the search ended: {report.stopped}"
