"""The command line, in tvmc's manner: one thin file for each command.

commands.py  the list of commands, each of which is imported when it runs
options.py  the options that several commands share
output.py   tables, JSON and errors; fields of the library as options of the command line

pyproject.toml registers each command as an entry point.

Exit codes: 0; 2 for wrong usage; 1 for a failure, whose reason is one line (`--traceback` shows the rest); 128 and the
number of the signal where one ended it at once, so 130 after Ctrl-C and 143 after SIGTERM; 70 tells the supervisor of
`run --supervise` to start another worker. It begins in the module `tvm_pipeline_command`.
"""

from __future__ import annotations

import signal
import sys

import typer

from tvm_pipeline import __version__
from tvm_pipeline.cli.commands import Commands
from tvm_pipeline.cli.output import logged, print_error, say
from tvm_pipeline.errors import OptionError
from tvm_pipeline.signals import Interrupts, ending, handling

INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt

app = typer.Typer(
    name="tvm-pipeline",
    cls=Commands,
    help="Partition a network over the processors of one machine, and run it as a pipeline on live video.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(requested: bool) -> None:
    if requested:
        from tvm_pipeline.backends.registry import find_backend
        from tvm_pipeline.errors import PlatformError

        try:
            tvm = find_backend("host").compiler()
        except PlatformError:
            tvm = "without a TVM that it can use; `tvm-pipeline devices` says why"
        typer.echo(f"tvm-pipeline {__version__} ({tvm})")
        raise typer.Exit


@app.callback()
def _options(
    traceback: bool = typer.Option(False, "--traceback", help="Show where a failure happened."),
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version and leave."
    ),
) -> None:
    """Take the options that stand before the command."""


def main() -> None:
    """The entry point of the command `tvm-pipeline`."""
    arguments = sys.argv[1:]
    wants_traceback = "--traceback" in arguments
    interrupts = Interrupts()
    try:
        with handling(ending(interrupts)), logged():
            for argument in arguments:
                if any("\udc80" <= letter <= "\udcff" for letter in argument):
                    raise OptionError(
                        f"{argument!r} is no text in UTF-8: rename the file, or set a locale of UTF-8, such as "
                        "LC_ALL=C.UTF-8"
                    )
            app(prog_name="tvm-pipeline", args=[argument for argument in arguments if argument != "--traceback"])
    except Exception as error:  # the last place where a failure can become one line
        sys.exit(print_error(error, wants_traceback))
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        say("stopped")
        sys.exit(128 + _signal_of(end))
    finally:
        interrupts.over()


def _signal_of(end: BaseException) -> int:
    """Return the number of the signal that an exception, or one that led to it, is about; that of Ctrl-C if none is."""
    cause: BaseException | None = end
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return next(iter(cause.args), signal.SIGINT) if cause else signal.SIGINT
