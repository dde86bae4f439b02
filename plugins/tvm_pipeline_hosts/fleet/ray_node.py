"""The processes of Ray on one machine: the head's or a host's, as children of a session of their own.

`ray start` starts them, and ends when one of them does. A RayNode starts it, tells when it is up or has ended,
and ends every process of its session; one that an earlier RayNode of the folder has left is ended first.

Ports, from the base: 0 the head's control store, 1 objects, 2 the raylet, 3 to 5 its helpers, 6 metrics, 8 Ray's
clients (only where grpcio is installed), 10 to 29 actors and commands.

Ray's own health check is for machines that are gone; what a camera waits for is the coordinator's. A raylet whose
processes were killed refuses connections and counts as dead after 3 s, and one that is silent (frozen, or cut off)
after a minute: one that is declared dead ends when it comes back, so a short limit would cost more than it brings.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tvm_pipeline import PipelineError
from tvm_pipeline.files import write_bytes
from tvm_pipeline_hosts.fleet.host_processes import HostProcess

PORTS = 30
STORE_BYTES = 80 << 20  # Ray's least is 75 MB; results and bundles are small messages
UP_S = 60.0  # for which a start may take on a busy machine
END_S = 5.0
_UP = b"Ray runtime started."
_LOG_TAIL = 4000
_FLAGS = ("block", "disable-usage-stats")

# What Ray is told by its environment, beside the credentials.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "3",
    # Raylets and actors wait a week for a head that is away; Ray's own minute would end them.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "604800",
    # The memory of a host is its services'; Ray must not kill the agent for it.
    "RAY_memory_monitor_refresh_ms": "0",
    # Services inherit from the agent how it shares a busy host. By Ray's own figures any other program would come
    # first, and where memory runs out the kernel would end a service before anything else.
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_ROTATION_MAX_BYTES": "4000000",
    "RAY_ROTATION_BACKUP_COUNT": "1",
}


@dataclass(slots=True)
class RayNode:
    """Ray on this machine.

    Attributes:
        folder: where its log and its state stand.
        arguments: of `ray start`; see `head_arguments` and `host_arguments`.
        environment: of its processes, and so of the actors.
    """

    folder: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]
    _process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / "ray.log"

    def start(self) -> None:
        """Start it, after what an earlier one has left has ended; return before it is up."""
        self.end()
        scratch = scratch_folder(self.folder)
        # It would say that the head runs already, after one that was killed.
        (scratch / "ray_current_cluster").unlink(missing_ok=True)
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", *self.arguments]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *_words({"temp-dir": str(scratch)})],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if leader := HostProcess.of(self._process.pid):
            write_bytes(self.folder / "ray.pid", json.dumps([leader.pid, leader.began_ticks]).encode())

    def is_up(self) -> bool:
        """Return whether it said so; raise PipelineError if it has ended."""
        if self.has_ended():
            raise PipelineError(f"Ray did not start: {self.why_ended()}; all of it is in {self.log}")
        return _UP in self._tail()

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def why_ended(self) -> str:
        """Return the last line of the log that tells an error; the last line if none does."""
        lines = [line.strip() for line in self._tail().decode(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "error" in line]
        return (told or lines or ["it said nothing"])[-1][:300]

    def end(self) -> None:
        """End every process of the session, also of one that an earlier RayNode of this folder has left."""
        process, self._process = self._process, None
        try:
            pid, began_ticks = json.loads((self.folder / "ray.pid").read_bytes())
        except (OSError, ValueError):
            return
        if process and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        until_s = time.monotonic() + END_S
        while (left := session_of(pid, began_ticks)) and time.monotonic() < until_s:
            for one in left:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            if process:
                process.poll()
            time.sleep(0.02)
        (self.folder / "ray.pid").unlink(missing_ok=True)

    def forget(self) -> None:
        """End it, and remove what it kept for itself: sockets and logs."""
        self.end()
        shutil.rmtree(scratch_folder(self.folder).parent, ignore_errors=True)

    def _tail(self) -> bytes:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_TAIL))
                return file.read()
        except OSError:
            return b""


def head_arguments(address: str, port_base: int) -> tuple[str, ...]:
    """Return the arguments of `ray start` for a head at this IP."""
    head: dict[str, str | int] = {"port": port_base, "include-dashboard": "false"}
    if find_spec("grpc"):
        # Ray would give its clients port 10001, and refuses to be told another where it has none.
        head["ray-client-server-port"] = port_base + 8
    # Its monitor would begin machines in a cloud.
    return _words(head | _common(address, port_base), "head", "no-monitor", *_FLAGS)


def host_arguments(address: str, port_base: int, head: str) -> tuple[str, ...]:
    """Return the arguments of `ray start` for a host; `head` is IP:PORT."""
    return _words({"address": head} | _common(address, port_base), *_FLAGS)


def head_environment(folder: Path, credentials: dict[str, str]) -> dict[str, str]:
    """Return the environment of the head's processes: what they must not forget is kept in the folder."""
    kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "store")}
    return {**os.environ, **SETTINGS, **credentials, **kept}


def host_environment(credentials: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **SETTINGS, **credentials}


def _common(address: str, port_base: int) -> dict[str, str | int]:
    ports = ("object-manager", "node-manager", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
    return {
        "node-ip-address": address,
        **{f"{name}-port": port_base + 1 + index for index, name in enumerate(ports)},
        "metrics-export-port": port_base + 6,
        "min-worker-port": port_base + 10,
        "max-worker-port": port_base + PORTS - 1,
        "object-store-memory": STORE_BYTES,
        "include-log-monitor": "false",
        "num-cpus": 0,
    }


def _words(options: Mapping[str, str | int], *flags: str) -> tuple[str, ...]:
    pairs = [(f"--{name}", str(value)) for name, value in options.items()]
    return (*(f"--{flag}" for flag in flags), *(word for pair in pairs for word in pair))


def scratch_folder(folder: Path) -> Path:
    """Return the folder for the sockets of a node, which this user owns; their paths must be short.

    Raises PipelineError where another user has a folder of that name.
    """
    name = f"tvm-fleet-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"
    path = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < 16 else "/tmp", name)
    path.mkdir(mode=0o700, exist_ok=True)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PipelineError(f"{path} belongs to another user, or others may write there; remove it")
    inner = path / "ray"  # which Ray gives to everyone
    inner.mkdir(exist_ok=True)
    return inner


def session_of(leader: int, began_ticks: int) -> list[int]:
    """Return the processes of Ray in the session that a process began, which need not live any more."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_bytes().rpartition(b") ")[2].split()
            words = Path(entry.path, "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        # A number comes again after all of a session have ended; then they are others, and no processes of Ray.
        if int(fields[3]) == leader and int(fields[19]) >= began_ticks and b"ray" in words:
            found.append(int(entry.name))
    return found
