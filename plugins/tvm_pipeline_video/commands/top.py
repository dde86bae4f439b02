"""`tvm-pipeline top`: show a running pipeline in the terminal, from /state of its `--watch`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from tvm_pipeline import PipelineError, Plan
from tvm_pipeline.cli.output import PlainConsole
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import statistics_table
from tvm_pipeline.report.tables import UNKNOWN, TextTable, duration, fps, percent
from tvm_pipeline_video.watch.state import State

LOOK_EVERY_S = 1.0
SILENCE_S = 5.0  # after which a server that sends nothing counts as gone
LARGEST_BYTES = 1 << 25
SHOWN_EVENTS = 8

_State = TypeVar("_State")  # what a kind of server tells


def command(
    url: Annotated[str, typer.Argument(help="The address at which `run --watch` listens.")] = "http://127.0.0.1:9600/",
    token: Annotated[
        str | None, typer.Option(help="The token that `run --token` was given.", envvar="TVM_PIPELINE_TOKEN")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state of now and end.")] = False,
) -> None:
    """Show a running pipeline, once a second, until Ctrl-C: throughput, latency, stages, sources, decisions.

    The run: tvm-pipeline run model.tar --source camera:0 --watch 9600

    Example: tvm-pipeline top http://127.0.0.1:9600/
    """
    server = server_at(url, token)
    show_live(_views(server, first_state(server, State)), once)


def first_state(server: Server, kind: type[_State]) -> _State:
    """Return what a server tells; raise PipelineError, which says what to start, where there is none."""
    try:
        return server.state(kind)
    except OSError as error:
        raise PipelineError(
            f"no answer from {server.url} ({_why(error)}); start `tvm-pipeline {server.command} ... --watch "
            f"{server.port}`, or give the URL that it printed"
        ) from error


def show_live(views: Iterator[Group], once: bool) -> None:
    """Show one view after the other in the terminal until Ctrl-C, or print the first."""
    if once:
        PlainConsole().print(next(views))
        return
    with suppress(KeyboardInterrupt), Live(console=PlainConsole(), auto_refresh=False) as live:
        for shown in views:
            live.update(shown, refresh=True)


@dataclass(frozen=True, slots=True)
class Server:
    """A server of a run. No proxy and no redirection is used, since either may carry the token elsewhere."""

    secure: bool
    host: str
    port: int
    token: str | None
    command: str = "run"  # that serves, for messages

    @property
    def url(self) -> str:
        """The URL for messages, without the token that the user's may hold."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}/"

    def state(self, kind: type[_State]) -> _State:
        """Ask once, for what this kind of server tells.

        Raises:
            OSError: nothing answers there.
            PipelineError: the server refuses, cannot answer, or is something else.
        """
        connection = (HTTPSConnection if self.secure else HTTPConnection)(self.host, self.port, timeout=SILENCE_S)
        try:
            connection.request("GET", "/state", headers={"Authorization": f"Bearer {self.token}"} if self.token else {})
            answer = connection.getresponse()
            body = answer.read(LARGEST_BYTES)
        except OSError:
            raise
        except HTTPException as error:
            raise self._stranger(f"{type(error).__name__}: no HTTP") from error
        finally:
            connection.close()
        if answer.length:
            raise ConnectionError("it hung up")
        text = body[:200].decode(errors="replace").strip()
        if answer.status == 403:
            raise OptionError(f"{self.url} refuses: {text}")
        if answer.status == 401:
            what = "does not take this token" if self.token else "wants a token"
            raise OptionError(
                f"{self.url} {what}; give --token, or set TVM_PIPELINE_TOKEN, as `{self.command}` was given it"
            )
        if answer.status >= 500:
            raise ConnectionError(f"{answer.status}: {text}")
        if answer.status != 200:
            raise self._stranger(f"status {answer.status}")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise self._stranger(str(error)) from error

    def _stranger(self, why: str) -> PipelineError:
        return PipelineError(
            f"what answers at {self.url} is no `tvm-pipeline {self.command} --watch` of this version ({why}); "
            f"give the URL that `{self.command}` printed"
        )


def server_at(url: str, token: str | None, command: str = "run") -> Server:
    """Read `http://host:port/`, also without http://, and with the page's ?token=."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port, scheme = parts.hostname, parts.port, parts.scheme
    except ValueError:
        host, port, scheme = None, None, ""
    if not host or scheme not in ("http", "https"):
        # The message leaves out the token, which the rest may hold.
        raise OptionError(f"{url.partition('?')[0]!r} is no URL of a run; give one such as http://127.0.0.1:9600/")
    token = token or parse_qs(parts.query).get("token", [None])[0]
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise OptionError("--token: a token is plain ASCII without blanks; give the one that `run` was given")
    return Server(scheme == "https", host, port or (443 if scheme == "https" else 80), token, command)


def states(server: Server, state: _State) -> Iterator[tuple[_State, str]]:
    """Yield a state, and what the server tells once a second after it.

    The text beside a state says why there is no newer one, and is empty where there is; the server is asked again.
    """
    seen_s, gone = time.monotonic(), ""
    while True:
        yield state, gone
        time.sleep(LOOK_EVERY_S)
        try:
            state, seen_s, gone = server.state(type(state)), time.monotonic(), ""
        except OSError as error:
            gone = f"no answer from {server.url} for {time.monotonic() - seen_s:.0f} s ({_why(error)}); still asking"


def _views(server: Server, state: State) -> Iterator[Group]:
    """Yield what to show each time it may have changed."""
    rate = state.statistics.throughput_fps
    for new, gone in states(server, state):
        if new is not state:
            # Another run may have begun there meanwhile.
            later = new.now_s > state.now_s and new.frames >= state.frames
            rate = (new.frames - state.frames) / (new.now_s - state.now_s) if later else new.statistics.throughput_fps
            state = new
        yield view(state, rate, gone)


def view(state: State, rate_fps: float | None, gone: str = "") -> Group:
    """Return all of the state as one renderable.

    Args:
        rate_fps: frames a second of the last interval.
        gone: why there is no newer state; empty where there is.
    """
    health = Text(gone or ("healthy" if state.healthy else f"unhealthy: {state.why}"))
    health.stylize("bold green" if state.healthy and not gone else "bold red")
    head = Text(
        f"{state.graph}: plan {state.plan_version} by {state.scheduler}, objective {state.objective}\n"
        f"{fps(rate_fps)} fps now, {state.frames} frames out, {state.in_flight} inside   "
    )
    parts: list[Any] = [
        head.append(health),
        statistics_table(
            state.predicted,
            state.statistics,
            state.energy,
            Plan.parse(state.plan).frames_inside,
            paced=state.paced,
        ),
        _stages(state),
    ]
    if state.sources:
        parts.append(_sources(state.sources))
        problems = ((name, found.get("problem")) for name, found in state.sources.items())
        parts += [Text(f"{name}: {problem}", "bold red") for name, problem in problems if problem]
    if state.factors:
        factors = ", ".join(f"{device} x{factor:.2f}" for device, factor in state.factors.items())
        parts.append(Text(f"Slower than their profile: {factors}"))
    parts.append(_events(state.events, state.now_s))
    return Group(*parts)


def _stages(state: State) -> TextTable:
    """Return a row for each stage and device; the queue is that of the whole stage."""
    rows = []
    for found in state.statistics.stages:
        stage = state.stages[found.stage] if found.stage < len(state.stages) else None  # between two plans
        queue = state.queue_depths[found.stage] if found.stage < len(state.queue_depths) else None
        row = [f"{found.stage} on {found.device}", str(len(stage.operators)) if stage else UNKNOWN]
        row += [UNKNOWN if queue is None else str(queue), *map(duration, (found.compute_s, found.transfer_s))]
        rows.append((*row, duration(found.wait_s), percent(found.bubble_share)))
    columns = ("stage", "operators", "queue", "compute", "transfer", "wait", "bubble")
    return TextTable("Stages, a frame", columns, tuple(rows))


def _sources(sources: Mapping[str, Mapping[str, Any]]) -> TextTable:
    rows = [
        (
            name,
            str(found["read"]),
            duration(found["age_p50_s"]),
            duration(found["age_p99_s"]),
            ", ".join(f"{frames} {reason}" for reason, frames in found["dropped"].items()) or "none",
            str(found["reconnects"]),
        )
        for name, found in sources.items()
    ]
    return TextTable("Sources", ("source", "frames", "age, median", "99 %", "dropped", "opened again"), tuple(rows))


def _events(events: Sequence[Mapping[str, Any]], now_s: float) -> Text:
    shown = [
        f"{now_s - event.get('time_s', now_s):.0f} s ago: {event.get('kind', '')}: {event.get('reason', '')}"
        for event in events[: -SHOWN_EVENTS - 1 : -1]
    ]
    return Text("\n".join(["Decided lately", *shown]))


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
