"""The agent of a host: it keeps the services that the coordinator orders, and tells what they do and found.

    agent = Agent("attic", Path("/var/lib/fleet"), beat, Parcels(Path("/var/lib/fleet/parcels")))
    agent.run(stopped)  # a threading.Event

It knows the coordinator as one function from a HostReport to an Order. Each turn compares what the order wants with
what runs, and takes the next step there; nothing is remembered of how it came about. The services outlive the agent:
the next one finds their processes and goes on with their results. What goes wrong with a service, a bundle or a file
is a problem in the report, and never an exception. Read next: service_process.py, host_results.py, messages.py.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tvm_pipeline import PipelineError
from tvm_pipeline.documents import DAMAGED
from tvm_pipeline_hosts.fleet.beats import Beats, locked_for_agent
from tvm_pipeline_hosts.fleet.duty_steps import next_duties
from tvm_pipeline_hosts.fleet.host_figures import HostFigures
from tvm_pipeline_hosts.fleet.host_processes import HostProcess, processes_of
from tvm_pipeline_hosts.fleet.host_results import Batch, HostResults, write_at_once
from tvm_pipeline_hosts.fleet.messages import Duty, HostOrder, HostReport, ModelSettings, RunningDuty
from tvm_pipeline_hosts.fleet.model_settings import bundle_id, named
from tvm_pipeline_hosts.fleet.service_files import folder_name
from tvm_pipeline_hosts.fleet.service_process import KILL_S, ServiceProcess

if TYPE_CHECKING:  # which reads bundles, and the agent only asks where they are
    from tvm_pipeline_hosts.remote.parcels import Parcels

UNUSED_S = 60.0  # for which a service stays that is neither warm nor has a duty
DRAINED_S = 0.5  # after a source was closed, until its last line counts as written
TOLD_S = 5.0  # for which a duty that has ended stays in the reports while its last lines do not get through
CLEAN_S = 60.0  # between two looks for results to delete
KEEP_S, KEEP_BYTES = 86400.0, 1 << 30  # of results that are safe
LEAST_FREE_BYTES = 64 << 20  # below which no results are kept that are safe
LONGEST_PROBLEM = 400

_log = logging.getLogger(__name__)


class Agent:
    """Keeps the services of a host.

    Args:
        host: its name in the fleet.
        folder: what this host keeps; one agent at a time.
        beat: carries a report to the coordinator and returns its order. It may raise or wait long: it is called in a
            thread of its own, one call at a time.
        parcels: the bundles that are here.
        python: the interpreter with tvm-pipeline for the services.
        environment: of the services; that of this process unless given.
        unused_s: seconds for which a service stays that no order wants.
        keep_s, keep_bytes: how long and how much results stay that the coordinator has.

    Attributes:
        name: of this agent; another after every start.
        refused: why the coordinator does not take this host; empty where it does.

    Raises RunError where another agent has the folder, or it cannot be written.
    """

    def __init__(
        self,
        host: str,
        folder: Path,
        beat: Callable[[HostReport], HostOrder],
        parcels: Parcels,
        python: str = sys.executable,
        *,
        environment: Mapping[str, str] | None = None,
        unused_s: float = UNUSED_S,
        keep_s: float = KEEP_S,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        self.host, self.name, self.refused = host, f"{os.getpid()}-{secrets.token_hex(4)}", ""
        self._folder = folder.resolve()
        self._parcels = parcels
        self._command = (python, "-m", "tvm_pipeline.cli")
        self._environment = dict(os.environ if environment is None else environment)
        self._unused_s, self._keep = unused_s, (keep_s, keep_bytes)
        self._lock = locked_for_agent(self._folder)
        self._beats = Beats(beat)
        self._results = HostResults(self._folder / "services")
        self._services: dict[str, ServiceProcess] = {}  # folder name -> service
        self._unused: dict[str, float] = {}  # folder name -> since when no order wants it
        self._begun: dict[tuple[str, str], float] = {}  # (folder name, tag) -> since when a ready service has it
        self._figures = HostFigures(self._folder)
        self._problems: dict[str, str] = {}  # what it is about -> a sentence
        self._order = HostOrder(-1)
        self._duties: tuple[Duty, ...] = ()  # that are to run now
        self._clashes: dict[tuple[str, str], str] = {}  # camera and model -> why it cannot run
        self._ordered = False  # by the coordinator, since this agent began
        self._told: list[tuple[str, str]] = []  # endings whose last lines are in the report that is out
        self._heard_s = self._cleaned_s = time.monotonic()
        self._saved_order = b""
        self._waiting = 0
        self._unheard = ""
        self._adopt()

    @property
    def bundles(self) -> frozenset[str]:
        """The ids of the bundles that services here run, or are to run."""
        return frozenset(bundle_id(service.bundle) for service in self._services.values())

    def run(self, stopped: threading.Event) -> None:
        """Take turns until `stopped` is set; the services go on. Call `close` afterwards."""
        while not stopped.is_set():
            began_s = time.monotonic()
            more = self.step()
            period_s = self._order.beat_s / (4 if more else 1)
            stopped.wait(max(0.0, period_s - (time.monotonic() - began_s)))

    def step(self) -> bool:
        """Take one turn: look at the services, report, and follow the order if it comes within a beat's time.

        An order that comes later is followed in a later turn. Return whether more lines wait to be sent at once.
        """
        more = self._take_reply(0.0)
        self._follow()
        if not self._beats.is_out:
            self._beats.send(self._report(self._read_batch()))
            more = self._take_reply(self._order.beat_s)
            self._follow()
        self._tidy()
        return more

    def close(self, leave_services: bool = True) -> None:
        """Give the folder free; end the services first, unless they are to go on for the next agent."""
        if not leave_services:
            for service in self._services.values():
                service.end_now()
            until_s = time.monotonic() + KILL_S
            while time.monotonic() < until_s and any(one.process for one in self._services.values()):
                time.sleep(0.05)
                self._look()
            for service in self._services.values():
                service.kill()
        self._beats.close()
        with suppress(OSError):
            self._results.save(at_once=True)
        os.close(self._lock)

    # What is there

    def _adopt(self) -> None:
        """Find what an agent before has left: services that live, results, and the order that it followed."""
        with suppress(OSError, *DAMAGED):
            self._saved_order = (self._folder / "order.json").read_bytes()
            self._order = msgspec.structs.replace(msgspec.json.decode(self._saved_order, type=HostOrder), version=-1)
        self._results.recall()
        living: dict[str, HostProcess] = {}
        for path, process in processes_of(self._results.folder):
            if path.parent.name in living:
                process.send(signal.SIGKILL)  # never two of one service
            else:
                living[path.parent.name] = process
        for folder in self._results.folder.iterdir():
            if not folder.is_dir():
                continue
            own = living.get(folder.name)
            try:
                service = ServiceProcess.found(folder, self._parcels.bundle, self._command, self._environment, own)
            except (OSError, *DAMAGED) as error:
                self._problems[folder.name] = f"{folder} tells no service and is left as it is: {error}"
                continue
            living.pop(folder.name, None)
            self._services[folder.name] = service
            self._results.models[folder.name] = service.model
        for name, process in living.items():
            _log.warning("%s: process %d runs a service that is not known; it is ended", name, process.pid)
            process.send(signal.SIGKILL)

    # What should be

    def _follow(self) -> None:
        """Take the next step from what runs to what is ordered, and see to the services."""
        now_s, order = time.monotonic(), self._order
        silent = now_s - self._heard_s > order.late_s
        # A new agent leaves all as it is until it has heard, or must take the coordinator for lost.
        if self._ordered or (silent and self._saved_order):
            self._assign(() if silent and order.alone == "stop" else order.duties, order.warm, now_s)
        self._look()

    def _assign(self, duties: tuple[Duty, ...], warm: Mapping[str, str], now_s: float) -> None:
        """Have a service for each bundle and settings that are ordered, and give each its duties."""
        self._duties = duties
        wanted = {(duty.camera, duty.model): duty for duty in duties}
        homes = {(duty.model, duty.bundle) for duty in duties} | set(warm.items())
        for model, bundle in sorted(homes):
            name = folder_name(model, bundle)
            if name not in self._services:
                self._services[name] = ServiceProcess(
                    self._results.folder / name, model, bundle, self._parcels.bundle, self._command, self._environment
                )
                self._results.models[name] = model
            settings = self._order.settings.get(model, ModelSettings())
            if named(bundle_id(bundle), settings) == bundle:
                self._services[name].settings = settings
        given, self._begun, self._clashes = next_duties(wanted, self._services, self._begun, now_s)
        for name, service in self._services.items():
            if given[name] != service.duties:
                service.set_duties(given[name])
            if service.duties or (service.model, service.bundle) in homes:
                self._unused.pop(name, None)
                service.wanted = True
            elif service.process is None or now_s - self._unused.setdefault(name, now_s) > self._unused_s:
                service.wanted = False

    def _look(self) -> None:
        """See to every service; what fails is its problem."""
        now_s = time.monotonic()
        for name, service in self._services.items():
            try:
                service.look()
                for ending in service.endings.values():
                    # What was inside the pipeline comes out shortly after.
                    if ending.closed_s is not None and ending.end is None and now_s - ending.closed_s > DRAINED_S:
                        ending.end = self._results.end(name)
            except (PipelineError, OSError, ValueError) as error:
                service.problem = f"the service of model {service.model}: {error}"

    # What is told

    def _read_batch(self) -> Batch:
        batch = Batch((), "", "", {})
        with self._blamed("results"):
            batch = self._results.batch()
            self._waiting = self._results.waiting(batch)
        return batch

    def _report(self, batch: Batch) -> HostReport:
        """Return what the host does now, with these lines."""
        now_s = time.monotonic()
        running: list[RunningDuty] = []
        self._told = []
        for name, service in self._services.items():
            for tag, ending in service.endings.items():
                running.append(_running(service, tag, ending.duty))
                if ending.closed_s is not None and ending.end is not None:
                    at = batch.ends.get(name)
                    if (at and at.reaches(ending.end)) or now_s - ending.closed_s > TOLD_S:
                        self._told.append((name, tag))
            running += [_running(service, tag, duty) for tag, duty in service.duties.items()]
        listed = {(one.camera, one.model, one.epoch) for one in running}
        running += [
            RunningDuty(
                duty.camera,
                duty.model,
                duty.bundle,
                duty.epoch,
                problem=self._clashes.get((duty.camera, duty.model))
                or self._services[folder_name(duty.model, duty.bundle)].problem,
            )
            for duty in self._duties
            if (duty.camera, duty.model, duty.epoch) not in listed
        ]
        return HostReport(
            host=self.host,
            agent=self.name,
            version=self._order.version,
            running=tuple(running),
            ready=self._ready(),
            lines=batch.lines,
            since=batch.since,
            upto=batch.upto,
            waiting=self._waiting,
            figures=self._read_figures(),
            problems=tuple(self._said()),
        )

    def _ready(self) -> dict[str, str]:
        """Return the bundle that is warm for each model; where there are several, the one that is ordered."""
        found = {service.model: service.bundle for service in self._services.values() if service.ready}
        ordered = [*((duty.model, duty.bundle) for duty in self._order.duties), *self._order.warm.items()]
        for model, bundle in ordered:
            service = self._services.get(folder_name(model, bundle))
            if service and service.ready:
                found[model] = bundle
        return found

    def _said(self) -> list[str]:
        """Return what is wrong, in sentences."""
        said = [service.problem for service in self._services.values() if service.problem]
        said += self._problems.values()
        if self._results.damaged:
            said.append(f"{self._results.damaged} lines of results could not be read, and are lost")
        if 0 < self._figures.disk_free_bytes < LEAST_FREE_BYTES:
            said.append(
                f"only {self._figures.disk_free_bytes >> 20} MB are free for {self._folder}; make space, or its "
                "services end when they cannot write"
            )
        return [one[:LONGEST_PROBLEM] for one in said]

    def _read_figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        with self._blamed("figures"):
            figures, fresh = self._figures.read(self._services.values())
            if fresh:
                for service in self._services.values():
                    service.bound_log()
                if self._figures.disk_free_bytes < LEAST_FREE_BYTES:
                    self._results.clean(0.0, 0)
        return figures

    # What is heard

    def _take_reply(self, wait_s: float) -> bool:
        """Take the order that a beat brought, waiting for it for so long; return whether more lines wait."""
        reply = self._beats.reply(wait_s)
        if reply is None:
            return False
        if isinstance(reply, Exception):
            said = f"{type(reply).__name__}: {reply}"
            if said != self._unheard:
                _log.warning("no beat reaches the coordinator; it is tried again: %s", said)
            self._unheard = said
            return False
        self._unheard, self._heard_s, self._ordered = "", time.monotonic(), True
        if reply.refused and reply.refused != self.refused:
            _log.warning("the coordinator does not take this host: %s", reply.refused)
        self._order, self.refused = reply, reply.refused
        for name, tag in self._told:
            if name in self._services:
                self._services[name].endings.pop(tag, None)
        self._told = []
        with self._blamed("order"):
            saved = msgspec.json.encode(msgspec.structs.replace(reply, version=0, taken="", safe=""))
            if saved != self._saved_order:
                write_at_once(self._folder / "order.json", saved)
                self._saved_order = saved
        return self._results.acknowledge(reply.taken, reply.safe) and self._waiting > 0

    def _tidy(self) -> None:
        """Save how far the results are safe, and delete what is not needed any more."""
        with self._blamed("cursor"):
            self._results.save()
        if time.monotonic() - self._cleaned_s < CLEAN_S:
            return
        self._cleaned_s = time.monotonic()
        with self._blamed("cleaning"):
            self._results.clean(*self._keep)
            for name, service in list(self._services.items()):
                old = self._results.is_taken(name) and self._results.age_s(name) > self._keep[0]
                if old and not (service.wanted or service.process or service.endings):
                    shutil.rmtree(service.folder, ignore_errors=True)
                    del self._services[name]
                    self._results.forget(name)

    @contextmanager
    def _blamed(self, what: str) -> Iterator[None]:
        """Make a file that cannot be read or written a problem, as long as that lasts."""
        try:
            yield
        except OSError as error:
            self._problems[what] = f"the agent cannot keep its {what} in {self._folder}: {error.strerror or error}"
        else:
            self._problems.pop(what, None)


def _running(service: ServiceProcess, tag: str, duty: Duty) -> RunningDuty:
    source = service.source(tag)
    return RunningDuty(
        camera=duty.camera,
        model=duty.model,
        bundle=duty.bundle,
        epoch=duty.epoch,
        frames=source.frames,
        opened=source.opened,
        problem=service.why_not(tag)[:LONGEST_PROBLEM],
        dropped=source.dropped,
    )
