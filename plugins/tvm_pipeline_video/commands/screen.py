"""The terminal as a listener of a run: a table that is drawn again while it runs, and the figures at its end.

It needs the libraries of the extra `video`, and so is imported only by the command that runs a service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.live import Live
from rich.status import Status
from rich.text import Text

from tvm_pipeline.addresses import shown
from tvm_pipeline.cli.output import errors, every_few_seconds, print_json, say, show, warn
from tvm_pipeline.core.plan import describe
from tvm_pipeline.report import TextTable, statistics_table
from tvm_pipeline.report.tables import percent
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.mqtt_results import is_broker
from tvm_pipeline_video.service.records import ModelReport
from tvm_pipeline_video.service.settings import Settings


class Screen(Listener):
    """Prints what it hears. As a context manager it ends the table however the run ends."""

    def __init__(self) -> None:
        self._settings = Settings()
        self._live: Live | None = None
        self._status: Status | None = None
        self._steps = every_few_seconds(say)  # where standard error is no terminal

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_table()

    def step(self, line: str) -> None:
        """Show a step of measuring and planning, before the run begins."""
        if self._live is not None:
            return
        if not errors.is_terminal:
            self._steps(line)
            return
        if self._status is None:
            self._status = errors.status("")
            self._status.start()
        self._status.update(Text(line))

    def say(self, line: str) -> None:
        say(line)

    def warn(self, line: str) -> None:
        warn(line)

    def begin(self, settings: Settings) -> None:
        self._close_table()
        self._settings = settings

    def look(self, reports: Callable[[], Sequence[ModelReport]]) -> None:
        if self._settings.json or not errors.is_terminal:  # a service's figures are in its status and its metrics
            return
        if self._live is None:
            self._close_table()
            self._live = Live(console=errors, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Group(*map(_table, reports())), refresh=True)

    def end(self, reports: Sequence[ModelReport]) -> None:
        self._close_table()
        if self._settings.json:
            found = [report.to_json() for report in reports]
            print_json(found[0] if len(found) == 1 else {"models": found})
            return
        lines_on_output = self._settings.results == "-"
        for report in reports:
            if report.label:
                show(report.label, lines_on_output)
            show(_figures(report), lines_on_output)
            for line in (*_lines(report), *_outcome(report)):
                say(line)
        if written := _written(self._settings):
            say(f"written: {', '.join(written)}")

    def _close_table(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._live is not None:
            self._live.stop()
            self._live = None


def _written(settings: Settings) -> list[str]:
    """Return the names of what a run writes, a broker's without its password."""
    files = [path for path in (settings.output, settings.results_file) if path]
    if settings.segment is not None:
        files = [path.with_name(f"{path.stem}-*{path.suffix}") for path in files]
    broker = [shown(settings.results)] if settings.results and is_broker(settings.results) else []
    return [*map(str, files), *broker, *([str(settings.report / "report.md")] if settings.report else [])]


def _table(report: ModelReport) -> Group:
    title = Text(f"{report.label or report.plan.graph} on {report.source}: frame {report.frame}")
    return Group(title, _figures(report))


def _figures(report: ModelReport) -> TextTable:
    predicted, inside = report.plan.predicted, report.plan.frames_inside
    return statistics_table(predicted, report.statistics, report.energy, inside, paced=report.paced)


def _outcome(report: ModelReport) -> list[str]:
    """Return what was found, and which plan ran."""
    lines = []
    if report.deadline:
        lines.append(f"deadline: {report.deadline}: {percent(report.late_share)} took longer")
    if report.found:
        most = sorted(report.found, key=lambda label: -report.found[label])[:5]
        found = ", ".join(f"{report.found[label]} {label}" for label in most)
        lines.append(f"found: {found}{', ...' if len(report.found) > 5 else ''}, in {report.found_in} frames")
    changed = any(event.kind == "switch" for event in report.events)
    why = f", chosen by {report.chosen_by}" if report.chosen_by and not changed else ""
    inside, batch = report.plan.frames_inside, report.plan.batch
    holds = f"{inside} frame{'s' * (inside > 1)}{f', {batch} a call' if batch > 1 else ''}"
    return [*lines, f"plan: {describe(report.plan)}{why}; a full pipeline holds {holds}"]


def _lines(report: ModelReport) -> list[str]:
    """Return what was decided, and what became of the frames of each source."""
    lines = [f"{event.time_s:.1f} s: {event.kind}: {event.reason}" for event in report.events]
    for name, found in report.sources.items():
        dropped = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items()) or "none"
        lines.append(f"{name}: {found.delivered} frames, dropped {dropped}, opened again {found.reconnects} times")
    if report.damaged:
        lines.append(f"warning: {report.source}: {report.damaged} damaged pieces skipped")
    return lines
