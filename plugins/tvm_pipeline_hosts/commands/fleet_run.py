"""`tvm-pipeline fleet run`: the cameras of a fleet.toml on the hosts that have joined."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_pipeline import PipelineError
from tvm_pipeline.cli.output import say, steps_to, warn
from tvm_pipeline.errors import OptionError
from tvm_pipeline.signals import Requests, ending, handling
from tvm_pipeline_hosts.commands.fleet_up import AddressOption

if TYPE_CHECKING:
    from tvm_pipeline_hosts.fleet.fleet_file import FleetFile
    from tvm_pipeline_hosts.fleet.ray_door import FleetClient

KeyOption = Annotated[Path, typer.Option("--key", help="The fleet.key that `fleet up` has written.")]
LOOK_S = 1.0
Event = tuple[float, str, str]


def command(
    fleet: Annotated[Path, typer.Argument(help="fleet.toml: the hosts, models and cameras; see docs/fleet.md.")],
    key: KeyOption = Path("fleet.key"),
    results: Annotated[
        Path | None, typer.Option("--results", help="JSON lines of all cameras to append to, a file on the head.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="End as soon as the fleet has the plan.")] = False,
    watch: Annotated[
        str | None,
        typer.Option(help="PORT or ADDRESS:PORT: metrics, health and a page of the fleet; see `fleet top`."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="With --watch: the token that a client must send.", envvar="TVM_PIPELINE_TOKEN")
    ] = None,
    address: AddressOption = None,
) -> None:
    """Bring the fleet to a fleet.toml, and show what happens until Ctrl-C; the fleet goes on.

    On SIGHUP the file is read again. A camera stays where it is unless it must move, and a model with another bundle
    or other settings is changed on each host without a gap. A model file is compiled for each kind of host, and
    measured on one of them. Run it on the head or on a host that has joined.

    Example: tvm-pipeline fleet run fleet.toml --key fleet.key --results all.jsonl
    """
    from tvm_pipeline_hosts.fleet.credentials import read_key
    from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
    from tvm_pipeline_hosts.fleet.ray_door import connected
    from tvm_pipeline_hosts.fleet.rollout import bundles_of, settings_of

    if watch is not None and detach:
        raise OptionError("--watch goes with a run that stays, so without --detach")
    at = watch_address(watch)
    read = read_key(key)
    file = read_fleet(fleet)  # mistakes of it are told before anything is connected
    bundles_of(file)
    settings_of(file)
    requests = Requests()
    with (
        connected(read, address or "") as door,
        handling({**ending(requests.request_stop), signal.SIGHUP: requests.request_reread}),
        steps_to(say),
    ):
        rolled = _Rolling(door, fleet, str(results.resolve()) if results else "")
        rolled.out()
        if detach:
            return
        with _site(at, rolled, token):
            rolled.keep(requests)
    say("the fleet goes on; `fleet status` shows it")


class _Rolling:
    """Brings the fleet to the file, again where hosts have joined that lack their bundles."""

    def __init__(self, door: FleetClient, path: Path, results: str) -> None:
        from tvm_pipeline_hosts.fleet.rollout import Rollout

        self._door, self._path, self._results = door, path, results
        self._rollout = Rollout(door)
        self._shipped: set[str] = set()
        self._events: Sequence[Event] = ()
        self.status = self._rollout.status()  # of a second ago at most

    def out(self) -> None:
        """Read the file, ship its bundles and have its plan followed."""
        from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
        from tvm_pipeline_hosts.fleet.rollout import bundles_of, not_joined

        file = read_fleet(self._path)
        hosts = self._joined(file)
        if lacking := not_joined(file, hosts):
            warn(lacking)
        self._file = file = self._rollout.completed(file, hosts)
        self._bundles = bundles_of(file)
        plan = self._rollout.plan(file, self._bundles, self._results)
        self._rollout.ship(self._bundles, hosts)
        self._shipped = set(hosts)
        self._rollout.follow(plan)

    def keep(self, requests: Requests) -> None:
        """Tell what happens until the end is wanted; bring the fleet to the file again when that is wanted."""
        while not requests.stop:
            try:
                if requests.reread:
                    requests.reread = False
                    self.out()
                self.look()
            except PipelineError as error:
                warn(f"{error}; the fleet goes on as it was")
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Ship to hosts that have joined since, and tell what happened."""
        late = set(self._joined(self._file)) - self._shipped
        if self._file.to_compile(late):
            self._shipped |= late  # what cannot be compiled is told once
            self.out()
        elif late:
            self._rollout.ship(self._bundles, sorted(late))
            self._shipped |= late
        self.status = self._rollout.status()
        events = self.status.events
        for ago_s, kind, sentence in new_events(self._events, events):
            say(f"{time.strftime('%H:%M:%S', time.localtime(time.time() - ago_s))} {kind}: {sentence}")
        self._events = events

    def _joined(self, file: FleetFile) -> list[str]:
        names = {host.name for host in file.hosts}
        return [host for host in self._door.hosts() if host in names]


@contextmanager
def _site(at: tuple[str, int] | None, rolled: _Rolling, token: str | None) -> Iterator[None]:
    """Watch the fleet over HTTP while the block lasts, where that is wanted."""
    if at is None:
        yield
        return
    try:
        from tvm_pipeline_hosts.fleet.fleet_site import FleetSite
    except ImportError as error:
        raise OptionError(f"--watch needs {error.name}; pip install 'tvm-pipeline[watch]'") from error

    with FleetSite(lambda: rolled.status, *at, token=token) as site:
        say(f"watch the fleet at {site.url}, or with `tvm-pipeline fleet top {site.url}`")
        yield


def watch_address(watch: str | None) -> tuple[str, int] | None:
    """Return the address and the port of PORT or ADDRESS:PORT; None where nothing is given."""
    if watch is None:
        return None
    address, _, port = watch.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise OptionError(f"--watch {watch}: give it as PORT or ADDRESS:PORT")
    return address.strip("[]") or "127.0.0.1", int(port)


def new_events(before: Sequence[Event], now: Sequence[Event]) -> Sequence[Event]:
    """Return the events that are not among those told before; the oldest may have been forgotten meanwhile."""
    known, found = [event[1:] for event in before], [event[1:] for event in now]
    for gone in range(len(known) + 1):
        kept = known[gone:]
        if found[: len(kept)] == kept:
            return now[len(kept) :]
    return now
