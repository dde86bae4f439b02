"""`tvm-pipeline slice`: a TFLite file cut into one file for each stage, for those who only want the files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tvm_pipeline.cli.common import JsonOption, print_json, show
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.plan import read_plan
from tvm_pipeline.report import TextTable, size


def command(
    model: Annotated[Path, typer.Argument(help="A .tflite, int8 or float; not one that edgetpu_compiler made.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan of this file's operator graph.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the stages' files.")] = Path("out"),
    graph: Annotated[
        Path | None, typer.Option("--graph", help="Write the file's operator graph, as JSON, to plan for.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Cuts a TFLite file into stage0.tflite, stage1.tflite, ... and says in stages.json what goes in and out of each.

    The plan names the operators of the file as its operator graph calls them, so there are three steps:

      tvm-pipeline slice model.tflite --graph graph.json

      tvm-pipeline plan graph.json --platform profiles/platforms/coral-usb-2.toml -o plan.txt

      tvm-pipeline slice model.tflite --plan plan.txt -o stages

    A stage's inputs and outputs bear the names of the model's tensors; hand each on to whatever stage reads it.

    Example: tvm-pipeline slice model.tflite --plan plan.txt -o stages
    """
    if not plan and not graph:
        raise OptionError("give --plan to cut the file, or --graph to write the operator graph that a plan is made for")
    read_model, slice_model = _slicer()
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
    slices = slice_model(parsed, stages)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output {output}: {error.strerror}; name a folder") from error
    described = [
        {
            "file": f"stage{index}.tflite",
            "devices": stage.devices,
            "operators": stage.operators,
            "inputs": part.inputs,
            "outputs": part.outputs,
        }
        for index, (stage, part) in enumerate(zip(stages, slices, strict=True))
    ]
    listed = {"model": parsed.name, "inputs": parsed.graph.inputs, "outputs": parsed.graph.outputs, "stages": described}
    for index, part in enumerate(slices):
        write_bytes(output / f"stage{index}.tflite", part.content)
    # Last, so that it lists no file that is not there.
    write_bytes(output / "stages.json", msgspec.json.format(msgspec.json.encode(listed)))
    if json:
        print_json(listed)
        return
    rows = tuple(
        (
            f"stage{index}.tflite",
            " + ".join(stage.devices),
            str(len(stage.operators)),
            size(len(part.content)),
            ", ".join(tensor.name for tensor in part.inputs),
            ", ".join(tensor.name for tensor in part.outputs),
        )
        for index, (stage, part) in enumerate(zip(stages, slices, strict=True))
    )
    title = f"{parsed.name} in {len(slices)} files in {output}"
    show(TextTable(title, ("file", "device", "operators", "size", "in", "out"), rows), json)


def _slicer() -> tuple[Any, Any]:
    """What reads and cuts TFLite files, whose library is an extra."""
    try:
        from tvm_pipeline_edgetpu.model import read_model
        from tvm_pipeline_edgetpu.slicer import slice_model
    except ImportError as error:
        raise PipelineError(
            f"cutting a TFLite file needs an extra: pip install 'tvm-pipeline[edgetpu]' ({error})"
        ) from error
    return read_model, slice_model
