"""`tvm-pipeline loadgen`: MLPerf LoadGen drives a pipeline, and gives its verdict."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import tvm_pipeline as tp
from tvm_pipeline.cli.options import DeviceOption, JsonOption, PlatformOption, ShapesOption, check_outputs, shapes_of
from tvm_pipeline.cli.output import print_json, say, spinner
from tvm_pipeline.errors import OptionError, nearest
from tvm_pipeline_loadgen.compliance import check_answers, check_caching
from tvm_pipeline_loadgen.scenarios import SCENARIOS, run_test, settings_of
from tvm_pipeline_loadgen.under_test import Pace, UnderTest, samples


def command(
    model: Annotated[str, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    scenario: Annotated[
        str,
        typer.Option(
            help="One query after another (SingleStream), 8 samples a query (MultiStream), a random "
            "stream (Server), or all samples at once (Offline)."
        ),
    ] = "Offline",
    seconds: Annotated[float, typer.Option(help="The least duration of a test. MLPerf's rules ask for 600.")] = 60.0,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings in the format of MLPerf's user.conf, such as *.Server.target_qps = 30."),
    ] = None,
    compliance: Annotated[
        bool, typer.Option("--compliance", help="Run MLCommons' compliance tests TEST01 and TEST04, too.")
    ] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for LoadGen's logs. It must not exist yet.")
    ] = Path("loadgen-logs"),
    platform: PlatformOption = None,
    device: DeviceOption = "",
    input_shapes: ShapesOption = None,
    json: JsonOption = False,
) -> None:
    """Let MLPerf LoadGen drive a model as a pipeline, print its verdict and keep its logs.

    The samples are noise. A test first learns the pace of the pipeline, by which LoadGen prepares its queries. Server
    asks for 80 % of the full rate within 100 ms; set target_qps and target_latency by --config.

    The exit status is 1 if LoadGen calls the result invalid, or a compliance test fails.

    Example: tvm-pipeline loadgen model.tar --scenario MultiStream --compliance
    """
    if scenario not in SCENARIOS:
        raise OptionError(f"--scenario {scenario}: {nearest(scenario, SCENARIOS)}")
    if not 0 < seconds < 1e6:
        raise OptionError("--seconds must be positive, and below a million")
    if output.exists():
        raise OptionError(f"{output} exists; name a new folder for LoadGen's logs by --output")
    check_outputs(folder=output)
    settings = partial(settings_of, scenario, seconds, config=config, model=Path(model).stem)
    settings(Pace(alone_s=1.0, full_fps=1.0))  # a missing LoadGen or a wrong file is told before anything is compiled
    with ExitStack() as stack:
        stack.enter_context(spinner())
        pipe = stack.enter_context(_opened(model, scenario, platform, device, input_shapes))
        bundle = pipe.bundle
        pipeline = stack.enter_context(tp.Pipeline(pipe.compiled, bundle.plan, bundle.platform))
        system = stack.enter_context(UnderTest(pipeline, samples(bundle.graph)))
        at_its_pace = partial(settings, system.pace())
        verdict = run_test(system, at_its_pace(), scenario, output / "performance")
        checks = [test(system, at_its_pace, verdict, output) for test in (check_answers, check_caching) if compliance]
    if json:
        print_json(
            {
                "scenario": scenario,
                "valid": verdict.valid,
                "score": verdict.score,
                "unit": "s" if verdict.is_latency else "samples/s",
                "reasons": verdict.reasons,
                "compliance": [{"test": check.name, "passed": check.passed, "what": check.what} for check in checks],
                "logs": str(output),
            }
        )
    else:
        for line in (verdict, *checks):
            typer.echo(str(line))
    for reason in verdict.reasons:
        say(f"LoadGen: {reason}")
    if seconds < 600:
        say(f"MLPerf's rules ask for tests of 600 s; this one was asked for {seconds:g} s")
    say(f"LoadGen's logs are in {output}")
    if not verdict.valid or not all(check.passed for check in checks):
        raise typer.Exit(1)


def _opened(
    model: str, scenario: str, platform: Path | None, device: str, input_shapes: str | None
) -> tp.CompiledPipeline:
    """Open a bundle, or compile a model: for the latency of a frame where one is sent after another."""
    if model.endswith(".tar"):
        if platform or device or input_shapes:
            raise OptionError(
                "a bundle has its own devices and inputs: leave --platform, --device and --input-shapes out"
            )
        return tp.open(model)
    if platform and device:
        raise OptionError("give --platform or --device")
    return tp.compile(
        model,
        devices=platform or device or "auto",
        objective="latency" if scenario == "SingleStream" else "throughput",
        input_shapes=shapes_of(input_shapes),
    )
