"""`tvm-pipeline slice`: cut a TFLite file into one file for each stage, without a bundle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tvm_pipeline.cli.options import JsonOption
from tvm_pipeline.cli.output import print_json, say, show, spinner
from tvm_pipeline.core.plan import Stage, read_plan
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import OptionError, PipelineError, PlanError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report import TextTable, size

if TYPE_CHECKING:
    from tvm_pipeline_edgetpu.compiler import Report
    from tvm_pipeline_edgetpu.model import TfliteModel
    from tvm_pipeline_edgetpu.slicer import Slice


def command(
    model: Annotated[Path, typer.Argument(help="A .tflite, int8 or float; not one that edgetpu_compiler made.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan of this file's operator graph.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the stages' files.")] = Path("out"),
    graph: Annotated[
        Path | None, typer.Option("--graph", help="Write the file's operator graph, as JSON, to plan for.")
    ] = None,
    compile_: Annotated[
        bool,
        typer.Option("--compile", help="Compile each stage with edgetpu_compiler, too: stage0_edgetpu.tflite, ..."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Cut a TFLite file into stage0.tflite, stage1.tflite, ... and list in stages.json what goes in and out of each.

    The plan is one of the file's own operator graph: write the graph, plan it, and cut the file by the plan.

    A stage's inputs and outputs have the names of the model's tensors; pass each on to every stage that reads it.
    Operators that an Edge TPU does not take are listed with the reason.

    The graph: tvm-pipeline slice model.tflite --graph graph.json

    The plan: tvm-pipeline plan graph.json --platform profiles/platforms/coral-usb-2.toml -o plan.txt

    Example: tvm-pipeline slice model.tflite --plan plan.txt -o stages
    """
    if not plan and not graph:
        raise OptionError("give --plan to cut the file, or --graph to write the operator graph that a plan is made for")
    if compile_ and not plan:
        raise OptionError("--compile compiles the stages of a plan; give --plan")
    try:
        from tvm_pipeline_edgetpu.model import read_model
        from tvm_pipeline_edgetpu.slicer import slice_model
    except ImportError as error:
        raise PipelineError(
            f"cutting a TFLite file needs an extra: pip install 'tvm-pipeline[edgetpu]' ({error})"
        ) from error

    parsed = read_model(model)
    if graph:
        write_bytes(graph, msgspec.json.format(msgspec.json.encode(parsed.graph)))
    if not plan:
        if json:
            print_json(parsed.graph)
        else:
            show(f"written: {graph}, {len(parsed.graph)} operators", json)
        return
    stages = read_plan(plan).stages
    with blamed(plan, PlanError, "plan the graph of --graph"):
        slices = slice_model(parsed, stages)
    files = {f"stage{index}.tflite": part.content for index, part in enumerate(slices)}
    reports = _compiled(slices, files) if compile_ else [None] * len(slices)
    listed = _listed(parsed, stages, slices, reports)
    _write(output, files, listed)
    if json:
        print_json(listed)
        return
    show(_table(f"{parsed.name} in {len(slices)} files in {output}", stages, slices, reports), json)
    for operator, reason in _refused(parsed).items():
        say(f"an Edge TPU leaves {operator} to the CPU: {reason}", "yellow")


def _compiled(slices: Sequence[Slice], files: dict[str, bytes]) -> list[Report | None]:
    """Compile each stage with edgetpu_compiler and add its file; return the reports."""
    from tvm_pipeline_edgetpu.compiler import compile_parts

    reports: list[Report | None] = []
    with spinner():
        for index, part in enumerate(slices):
            [(content, report)] = compile_parts([part.content], [f"stage{index}"])
            files[f"stage{index}_edgetpu.tflite"] = content
            reports.append(report)
    return reports


def _refused(model: TfliteModel) -> dict[str, str]:
    """Return the operators that an Edge TPU does not take, each with the reason."""
    from tvm_pipeline_edgetpu.support import unsupported

    return unsupported(model)


def _listed(
    model: TfliteModel, stages: Sequence[Stage], slices: Sequence[Slice], reports: Sequence[Report | None]
) -> dict[str, Any]:
    """Return what stands in stages.json."""
    from tvm_pipeline_edgetpu.model import described

    refused = _refused(model)
    return {
        "model": model.name,
        "inputs": [described(model, tensor) for tensor in model.graph.inputs],
        "outputs": [described(model, model.graph.tensors[name]) for name in model.graph.outputs],
        "stages": [
            {
                "file": f"stage{index}.tflite",
                "devices": stage.devices,
                "operators": stage.operators,
                "inputs": [described(model, tensor) for tensor in part.inputs],
                "outputs": [described(model, tensor) for tensor in part.outputs],
                "refused_by_edge_tpu": {name: refused[name] for name in stage.operators if name in refused},
                "compiled": report and {"file": f"stage{index}_edgetpu.tflite", **asdict(report)},
            }
            for index, (stage, part, report) in enumerate(zip(stages, slices, reports, strict=True))
        ],
    }


def _table(title: str, stages: Sequence[Stage], slices: Sequence[Slice], reports: Sequence[Report | None]) -> TextTable:
    rows = tuple(
        (
            f"stage{index}.tflite",
            " + ".join(stage.devices),
            str(len(stage.operators)),
            size(len(part.content)),
            ", ".join(tensor.name for tensor in part.inputs),
            ", ".join(tensor.name for tensor in part.outputs),
            *([_figures(report)] if report else []),
        )
        for index, (stage, part, report) in enumerate(zip(stages, slices, reports, strict=True))
    )
    more = ["on the Edge TPU"] if any(reports) else []
    return TextTable(title, ("file", "device", "operators", "size", "in", "out", *more), rows)


def _figures(report: Report) -> str:
    """Return the figures of edgetpu_compiler for a stage, in a few words."""
    mapped = f"{report.mapped} of {report.mapped + report.on_cpu} operators"
    return f"{mapped}, {size(report.on_chip_used_bytes)} cached, {size(report.off_chip_bytes)} streamed"


def _write(folder: Path, files: dict[str, bytes], listed: dict[str, Any]) -> None:
    """Write the files and their list; remove those that an earlier plan of more stages left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("stage*.tflite"):
            if re.fullmatch(r"stage\d+(_edgetpu)?\.tflite", file.name) and file.name not in files:
                file.unlink()
    except OSError as error:
        raise OptionError(f"--output {folder}: {error.strerror}; name a folder") from error
    for name, content in files.items():
        write_bytes(folder / name, content)
    # Last, so that it lists no file that is not there.
    write_bytes(folder / "stages.json", msgspec.json.format(msgspec.json.encode(listed)))
