"""One service of a host: the process that runs a bundle on the sources of its duties, and the folder with its files.

The process has a session of its own and outlives the agent. Nobody but the agent starts it again: one process less for
each model, and the agent itself is started again by who runs it. Read next: service_files.py (what lies in the folder),
agent.py (what should run).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tvm_pipeline.documents import DAMAGED
from tvm_pipeline.errors import RunError
from tvm_pipeline.processes import how_ended
from tvm_pipeline_hosts.fleet.host_processes import STOPPED, HostProcess
from tvm_pipeline_hosts.fleet.host_results import write_at_once
from tvm_pipeline_hosts.fleet.messages import Duty, ModelSettings
from tvm_pipeline_hosts.fleet.model_settings import TEXTS, bundle_id, named
from tvm_pipeline_hosts.fleet.service_files import (
    CONFIG,
    LOG,
    OWN,
    STATUS,
    ServiceRecord,
    ServiceStatus,
    SourceStatus,
    added,
    settings_text,
    tag_of,
)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a service is started again after its second death, and later
STEADY_S = 60.0  # after so long without a death the waits begin anew
KILL_S = 10.0  # between SIGTERM and SIGKILL
STARTING_S = 60.0  # after so long without a word from a process that is a problem
TAKES_S = 15.0  # for which a process may not have taken its sources before that is a problem
UNSEEN_S = 2.0  # until a source that was never seen open counts as closed
MOST_BEFORE = 1000  # sources whose counts are remembered
MOST_LOG_BYTES = 4 << 20


@dataclass(slots=True)
class ClosingDuty:
    """A duty whose source is being closed.

    Attributes:
        told_s: when the process was told to; None before.
        closed_s: when it was found closed; None before.
        end: the place behind its last line; None until it is closed.
    """

    duty: Duty
    seen_open: bool
    told_s: float | None = None
    closed_s: float | None = None
    end: tuple[int, int] | None = None


class ServiceProcess:
    """A service, whether its process lives or not.

    Attributes:
        model, bundle: what it runs, named as `Duty.bundle`.
        settings: of the model; they must be those of that name before the process starts.
        duties: tag -> duty: the sources that it should have.
        endings: tag -> a duty that it has no more, until its end was reported.
        status: what its process said last; None before it did.
        problem: why it does not run as it should; empty where it does.
        wanted: whether its process is to live.

    Args:
        folder: of its files, which is made.
        find: returns the file of a bundle by its id; raises BundleError where it is not here.
        command: runs the command line of tvm-pipeline.
        environment: of the process.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        bundle: str,
        find: Callable[[str], Path],
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.folder, self.model, self.bundle = folder, model, bundle
        self.settings = ModelSettings()
        self.duties: dict[str, Duty] = {}
        self.endings: dict[str, ClosingDuty] = {}
        self.status: ServiceStatus | None = None
        self.problem = ""
        self.wanted = True
        self.process: HostProcess | None = None
        self._find = find
        self._command, self._environment = (*command, "run", "--config", str(folder / CONFIG)), environment
        self._path: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._unwritten = True  # the files are not as wanted
        self._stale: bool | None = False  # the process was not told of the file as it is now; None: nobody knows
        self._told_s = 0.0
        self._seen: tuple[int, int] | None = None
        self._waits: Iterator[float] = _waits()
        self._began_s = self._due_s = time.monotonic()
        self._ending_s: float | None = None
        self._deaths, self._death = 0, ""
        self._before: dict[str, SourceStatus] = {}  # counts of sources that are not in the status any more

    @classmethod
    def found(
        cls,
        folder: Path,
        find: Callable[[str], Path],
        command: Sequence[str],
        environment: Mapping[str, str],
        process: HostProcess | None,
    ) -> ServiceProcess:
        """Return the service of a folder as an agent before has left it, with its process if that lives.

        Raises OSError, or one of DAMAGED, where the folder does not tell what it is of.
        """
        own = msgspec.json.decode((folder / OWN).read_bytes(), type=ServiceRecord)
        service = cls(folder, own.model, own.bundle, find, command, environment)
        service.settings = own.settings
        if process:
            service.duties = {tag_of(duty): duty for duty in own.duties}
            service.process, service._path = process, Path(own.path)
            service._stale, service._unwritten = None, False
        else:
            service.wanted = False
        return service

    @property
    def ready(self) -> bool:
        """Return whether its process is warm, so that the first frame of a source meets nothing cold."""
        return self.status is not None and self.status.ready

    def source(self, tag: str) -> SourceStatus:
        """Return what is known of a source, with the counts of processes before."""
        now = self.status.tags.get(tag, SourceStatus()) if self.status else SourceStatus()
        before = self._before.get(tag)
        return added(before, now) if before else now

    def why_not(self, tag: str) -> str:
        """Return why a source gives no frames; empty where it gives some, or nothing is known."""
        if self.problem:
            return self.problem
        if self.status is None:
            since_s = time.monotonic() - self._began_s
            said = (
                f"the service of model {self.model} has been starting for {since_s:.0f} s; its log is in {self.folder}"
            )
            return said if since_s > STARTING_S else ""
        source = self.status.tags.get(tag, SourceStatus())
        return source.problem or ("the source has ended" if source.ended else "")

    def set_duties(self, duties: Mapping[str, Duty]) -> None:
        """Have these sources and no others; the process hears of it at the next `look`."""
        for tag in self.duties.keys() - duties.keys():
            shown = self._shows(tag)
            self.endings[tag] = ClosingDuty(self.duties[tag], shown)
        for tag in duties:
            self.endings.pop(tag, None)
        self.duties, self._unwritten = dict(duties), True

    def look(self) -> None:
        """See whether the process lives and what it says; start, tell or end it as is wanted. It does not wait.

        Raises PipelineError where the bundle is not here, OSError where a file of the service cannot be written.
        """
        now_s = time.monotonic()
        self._see(now_s)
        try:
            if not self.wanted:
                self._end(now_s)
                return
            self._ending_s = None
            if self.process is None:
                if now_s < self._due_s:
                    return
                self._due_s = now_s + FIRST_WAIT_S
                path = self._find(bundle_id(self.bundle))
                if named(bundle_id(self.bundle), self.settings) != self.bundle:
                    raise RunError("the settings of its model did not come with the order")
                self._unwritten |= path != self._path
                self._path = path
                self._write(path)
                self._start(now_s)
            elif self._path:
                self._write(self._path)
                if self._stale is None and self.status:
                    self._stale = {tag for tag in self.status.tags if self._shows(tag)} != self.duties.keys()
                if self._stale and self.status:
                    self.process.send(signal.SIGHUP)
                    self._stale, self._told_s = False, now_s
        finally:
            self._see_endings(now_s)

    def end_now(self) -> None:
        """Let the process drain its frames and end."""
        self.wanted = False
        self._end(time.monotonic())

    def kill(self) -> None:
        """End the process at once, with all that it started."""
        if self.process:
            self.process.send(signal.SIGKILL)

    def _see(self, now_s: float) -> None:
        """Notice a death, and read the status where it has changed."""
        if self.process is None:
            return
        state = self.process.state()
        if not state:
            self._has_died(now_s, self._child.wait() if self._child else None)
            return
        self._read_status()
        if self._deaths and now_s - self._began_s > STEADY_S:
            self._deaths, self._death, self._waits = 0, "", _waits()
        if state in STOPPED:
            self.problem = f"the service of model {self.model} is stopped (process {self.process.pid}); send it SIGCONT"
        elif self._lags(now_s):
            self.problem = f"the service of model {self.model} does not take its sources{self._last_words()}"
        else:
            self.problem = self._death if self._deaths > 1 or self.status is None else ""

    def _lags(self, now_s: float) -> bool:
        """Return whether the process has been told of sources long ago, and does not know them."""
        return bool(
            self.status
            and self._stale is False
            and now_s - self._told_s > TAKES_S
            and now_s - self._began_s > TAKES_S
            and self.duties.keys() - self.status.tags.keys()
        )

    def _read_status(self) -> None:
        try:
            found = os.stat(self.folder / STATUS)
            seen = found.st_mtime_ns, found.st_ino
            if seen == self._seen:
                return
            self._seen = seen
            status = msgspec.json.decode((self.folder / STATUS).read_bytes(), type=ServiceStatus)
        except (OSError, *DAMAGED):
            return
        if not self.process or status.pid != self.process.pid:
            return  # of a process before
        for tag in self.status.tags.keys() - status.tags.keys() if self.status else ():
            self._before[tag] = self.source(tag)
        self.status = status

    def _has_died(self, now_s: float, code: int | None) -> None:
        assert self.process is not None
        if self.status:
            for tag in self.status.tags:
                self._before[tag] = self.source(tag)
        while len(self._before) > MOST_BEFORE:
            del self._before[next(iter(self._before))]
        self.process = self._child = self.status = self._seen = None
        if not self.wanted:
            self.problem = ""
            return
        if now_s - self._began_s > STEADY_S:
            self._deaths, self._waits = 0, _waits()
        self._deaths += 1
        wait_s = next(self._waits)
        self._due_s = now_s + wait_s
        self.problem = self._death = (
            f"the service of model {self.model} {'has ended' if code is None else how_ended(code)} and is started "
            f"again {f'after {wait_s:g} s' if wait_s else 'at once'}"
            f"{f' (it died {self._deaths} times)' if self._deaths > 1 else ''}"
            f"{self._last_words() if code is None or code >= 0 else ''}"
        )

    def _write(self, bundle: Path) -> None:
        """Write the files where they are not as wanted."""
        if not self._unwritten:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = ServiceRecord(self.model, self.bundle, str(bundle), list(self.duties.values()), self.settings)
        write_at_once(self.folder / OWN, msgspec.json.encode(own))
        for key, text in self.settings.texts.items():
            write_at_once(self.folder / TEXTS[key], text.encode())
        write_at_once(self.folder / CONFIG, settings_text(bundle, self.duties, self.settings))
        self._unwritten, self._stale = False, True

    def _start(self, now_s: float) -> None:
        temporary = self.folder / "tmp"  # what a process that was killed left there, such as an unpacked bundle, goes
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(exist_ok=True)
        self.bound_log()
        (self.folder / STATUS).unlink(missing_ok=True)
        self._began_s = now_s
        try:
            with open(self.folder / LOG, "ab") as log:
                self._child = subprocess.Popen(
                    self._command,
                    cwd=self.folder,
                    env={**self._environment, "TMPDIR": str(temporary)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            self._deaths += 1
            self._due_s = now_s + next(self._waits)
            self.problem = f"the service of model {self.model} cannot be started: {error}"
            return
        self.process = HostProcess.of(self._child.pid)
        if self.process is None:  # it has ended already
            self.process = HostProcess(self._child.pid, -1)
        self._stale, self._told_s = False, now_s

    def _end(self, now_s: float) -> None:
        if self.process is None:
            return
        if self._ending_s is None:
            self._ending_s = now_s
            self.process.send(signal.SIGTERM)
            self.process.send(signal.SIGCONT)
        elif now_s - self._ending_s > KILL_S:
            self.kill()

    def _see_endings(self, now_s: float) -> None:
        for tag, ending in self.endings.items():
            if ending.closed_s is not None:
                continue
            if ending.told_s is None and self._stale is False and not self._unwritten:
                ending.told_s = now_s
            shown = self._shows(tag)
            ending.seen_open |= shown
            unseen = ending.told_s is not None and now_s - ending.told_s > UNSEEN_S
            if self.process is None or (ending.told_s is not None and not shown and (ending.seen_open or unseen)):
                ending.closed_s = now_s

    def _shows(self, tag: str) -> bool:
        """Return whether the process has a source, as it said last."""
        source = self.status.tags.get(tag) if self.status else None
        return source is not None and not source.gone

    def bound_log(self) -> None:
        """Empty the log where it has grown too long; who writes appends."""
        path = self.folder / LOG
        if path.exists() and path.stat().st_size > MOST_LOG_BYTES:
            os.truncate(path, 0)

    def _last_words(self) -> str:
        """Return the end of the log behind a colon; nothing where it is empty."""
        try:
            with open(self.folder / LOG, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        last = max((i for i, line in enumerate(lines) if re.match(r"(\w*[Ee]rror|warning)\b", line)), default=-1)
        return f": {' '.join(lines[last:])[:500]}" if lines else ""


def _waits() -> Iterator[float]:
    yield 0.0
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
