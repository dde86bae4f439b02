"""What the library says of fields is printed with the options of the command line."""

from __future__ import annotations

import logging

import pytest

from tvm_pipeline.cli import output
from tvm_pipeline.cli.output import (
    PlainConsole,
    every_few_seconds,
    logged,
    print_error,
    say,
    show,
    spinner,
    warn,
    with_options,
    without_warnings,
)
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import InfeasibleError, OptionError, PipelineError
from tvm_pipeline.report import devices_table


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (OptionError("`min_throughput_fps` -1: it must be positive", option="min_throughput_fps", value=-1),
         "error: --min-throughput -1: it must be positive", 2),
        (OptionError("it must be positive", option="max_latency_s", value=-1),
         "error: --max-latency -1: it must be positive", 2),
        (OptionError("give `children_together` or `stages`, not `both`"),
         "error: give --children-together or --stages, not `both`", 2),
        (InfeasibleError("no plan keeps all of: `stages` 2; `max_latency_s` 0.3"),
         "error: no plan keeps all of: --stages 2; --max-latency 0.3", 1),
        (ValueError("a bug"), "error: ValueError: a bug (--traceback shows where)", 1),
    ],
)  # fmt: skip
def test_an_error_is_one_line_about_options(capsys, error, line, status):
    assert print_error(error, False) == status
    assert capsys.readouterr().err.strip() == line


HOSTILE = "a \x1b]0;pwned\x9b31m [/red] [bold]b[/bold] :smile: \u202ec"
SHOWN = r"a \x1b]0;pwned\x9b31m [/red] [bold]b[/bold] :smile: \u202ec"


def hostile_platform():
    return Platform(HOSTILE, (Device("[/red]"),))


@pytest.mark.parametrize(
    "shown",
    [
        lambda: say(HOSTILE),
        lambda: warn(HOSTILE),
        lambda: show(HOSTILE, False),
        lambda: show(HOSTILE, True),
        lambda: show(devices_table(hostile_platform()), False),
        lambda: print_error(PipelineError(HOSTILE), False),
        lambda: print_error(PipelineError(HOSTILE), True),
        lambda: logging.getLogger("tvm_pipeline").warning(HOSTILE),
    ],
)
def test_what_strangers_wrote_is_text(capsys, monkeypatch, shown):
    monkeypatch.setenv("COLUMNS", "400")
    with logged():
        shown()
    printed = " ".join("".join(capsys.readouterr()).split())  # titles of tables are wrapped
    assert SHOWN in printed
    assert not (set(HOSTILE) - set(SHOWN)) & set(printed)


def test_a_spinner_shows_what_strangers_wrote_as_text(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # standard error is a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(output, "errors", PlainConsole(stderr=True))  # which looks at these when it is made
    with logged(), spinner():
        logging.getLogger("tvm_pipeline").info(HOSTILE)
    printed = capsys.readouterr().err
    assert SHOWN in printed
    assert "\x1b]0;" not in printed


def test_what_is_no_field_stays():
    text = "`compile` makes one; `chmod 600 a.toml`; Expected `int | null`, got `str`"
    assert with_options(text) == text


@pytest.mark.parametrize("name", ["tvm_pipeline.backends.registry", "tvm_pipeline_of_others.module"])
def test_what_the_library_and_its_guests_log_names_options(cli, monkeypatch, name):
    """A warning in the log that names a field is printed with the option, and the handler goes with the command."""
    logger = logging.getLogger(name)
    before = logging.getLogger().handlers[:]
    monkeypatch.setattr("tvm_pipeline.cli.devices.this_machine", lambda *_: logger.warning("give `platform`"))
    assert cli("devices").err.startswith("warning: give --platform ")
    assert logging.getLogger().handlers == before


def test_what_other_packages_log_is_printed_as_it_is(capsys):
    with logged():
        logging.getLogger("another_package").warning("set `platform`")
    assert capsys.readouterr().err == "set `platform`\n"


@pytest.mark.parametrize("name", ["tvm_pipeline.module", "tvm_pipeline_of_others.module"])
def test_a_spinner_shows_the_steps_that_the_library_and_its_guests_log(monkeypatch, name):
    lines: list[str] = []
    monkeypatch.setattr(output, "every_few_seconds", lambda _: lines.append)
    with logged():
        logging.getLogger(name).info("before")
        with spinner():
            logging.getLogger(name).info("step")
            logging.getLogger("another_package").info("noise")
        logging.getLogger(name).info("after")
    assert lines == ["step"]


def test_warnings_are_not_printed_again(capsys):
    logger = logging.getLogger("tvm_pipeline.module")
    with logged():
        with without_warnings():
            logger.warning("dropped")
        logger.warning("printed")
    assert capsys.readouterr().err == "warning: printed\n"


def test_without_a_terminal_a_line_of_progress_is_printed_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 5.0, 9.9, 10.5])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines: list[str] = []
    tell = every_few_seconds(lines.append)
    for line in ("1 s", "5 s", "9.9 s", "10.5 s"):
        tell(line)
    assert lines == ["5 s", "10.5 s"]
