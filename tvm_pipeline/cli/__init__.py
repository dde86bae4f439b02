"""The command line, in tvmc's manner: one file a command, each thin.

Exit codes: 0, 2 for wrong usage, 1 for a failure with its reason in one line (`--traceback` for the rest), 130 after
a second Ctrl-C; 70 tells the supervisor of `run --supervise` to start another worker.
"""

from __future__ import annotations

import sys
import traceback

import typer

from tvm_pipeline import __version__
from tvm_pipeline.cli import bench, compile, deploy, devices, memory, plan, profile, run, show, simulate, slice, top
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.service.common import say

app = typer.Typer(
    name="tvm-pipeline",
    help="Partitions a network over the processors of one machine, and runs it as a pipeline on live video.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (devices, profile, plan, simulate, deploy, compile, run, bench, top, show, slice, memory):
    app.command(command.__name__.rpartition(".")[2])(command.command)


@app.callback()
def _options(
    traceback: bool = typer.Option(False, "--traceback", help="Show where a failure happened."),
    version: bool = typer.Option(False, "--version", is_eager=True, help="Print the version and leave."),
) -> None:
    if version:
        typer.echo(f"tvm-pipeline {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point of the command `tvm-pipeline`."""
    arguments = sys.argv[1:]
    wants_traceback = "--traceback" in arguments
    try:
        app(args=[argument for argument in arguments if argument != "--traceback"])
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)
    except Exception as error:  # the last place where a failure can become one line
        if wants_traceback:
            traceback.print_exc()
        reason = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        hint = "" if isinstance(error, PipelineError) or wants_traceback else " (--traceback shows where)"
        lines = [line.strip() for line in reason.splitlines() if line.strip()]
        say(f"error: {' '.join(lines[:2])}{hint}", "red")
        sys.exit(2 if isinstance(error, OptionError) else 1)
