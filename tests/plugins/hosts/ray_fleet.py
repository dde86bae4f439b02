"""A fleet on this machine: the commands `fleet up`, `join` and `run` as processes, each host with an IP of loopback."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.plugins.hosts.fleet_host import install
from tvm_pipeline_hosts.fleet.host_processes import processes_of
from tvm_pipeline_hosts.fleet.ray_node import PORTS

HEAD = "head"
UP_S = 150.0


class LocalFleet:
    """The processes of a fleet; `close` ends all of them, also those that were stopped.

    Args:
        first: of the addresses 127.0.0.*, the one of the first machine that begins, which is the head.

    Attributes:
        keepers: `head` or a host -> its `fleet up` or `fleet join`.
    """

    def __init__(self, folder: Path, first: int = 2) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.key, self._first = folder, folder / "fleet.key", first
        self.keepers: dict[str, subprocess.Popen[bytes]] = {}
        folders = {"XDG_STATE_HOME": str(folder / "state"), "TVM_PIPELINE_CACHE": str(folder / "cache")}
        self.environment = {**install(folder / "installed"), **folders}
        self._bases: dict[str, int] = {}

    def up(self) -> None:
        self._begin(HEAD, "up", "--head", "--key", str(self.key))
        self.wait(HEAD, "the head runs")

    def join(self, *hosts: str, key: Path | None = None) -> None:
        for host in hosts:
            self._begin(host, "join", str(key or self.key), "--name", host)
        for host in hosts:
            self.wait(host, "is in the fleet")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "tvm_pipeline.cli", "fleet", *words]

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the group and return when it has ended."""
        command = self.command(*words)
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=UP_S)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait(self, name: str, text: str, limit_s: float = UP_S) -> None:
        """Wait until a command has said something."""

        def heard() -> bool:
            if text not in self.said(name) and self.keepers[name].poll() is not None:
                raise AssertionError(f"{name} ended: {self.said(name)}")
            return text in self.said(name)

        wait_for(heard, limit_s, f"{name}: {text}")

    def state(self, name: str) -> Path:
        """Return the folder of the head or a host."""
        return self.folder / name

    def pids(self, name: str, *parts: str) -> list[int]:
        """Return the processes of the head or a host.

        Args:
            parts: of `keeper`, `ray` and `services`; all of them by default. The keeper comes first.
        """
        leaders = []
        if "keeper" in parts or not parts:
            leaders.append(self.keepers[name].pid)
        if "ray" in parts or not parts:
            with suppress(OSError, ValueError):
                leaders.append(int((self.state(name) / "ray.pid").read_text().strip("[]").split(",")[0]))
        if "services" in parts or not parts:
            leaders += [process.pid for _, process in processes_of(self.state(name))]
        return [pid for leader in leaders for pid in _session(leader)]

    def send(self, number: signal.Signals, name: str, *parts: str) -> None:
        """Send a signal to processes of the head or a host at once; see `pids`."""
        for pid in self.pids(name, *parts):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def again(self, name: str) -> None:
        """Begin the head or a host anew after its keeper was killed."""
        self.keepers[name].wait(10.0)
        if name == HEAD:
            self.up()
        else:
            self.join(name)

    def close(self) -> None:
        for name, keeper in self.keepers.items():
            self.send(signal.SIGCONT, name)
            if keeper.poll() is None:
                keeper.terminate()
        until_s = time.monotonic() + 30.0
        for name, keeper in self.keepers.items():
            with suppress(subprocess.TimeoutExpired):
                keeper.wait(max(0.0, until_s - time.monotonic()))
            self.send(signal.SIGKILL, name)
            keeper.wait()
        self.keepers.clear()

    def _begin(self, name: str, *words: str) -> None:
        base = self._bases.setdefault(name, free_base())
        address = f"127.0.0.{self._first + list(self._bases).index(name)}"
        rest = ("--address", address, "--port-base", str(base), "--folder", str(self.state(name)))
        with (self.folder / f"{name}.log").open("wb") as log:
            self.keepers[name] = subprocess.Popen(
                self.command(*words, *rest),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextmanager
def local_fleet(folder: Path) -> Iterator[LocalFleet]:
    made = LocalFleet(folder)
    try:
        yield made
    finally:
        made.close()


def wait_for(true: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait until something is true; AssertionError after the limit."""
    until_s = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.02)


def free_base() -> int:
    """Return the first of as many free ports as a node needs, below those that the kernel gives."""
    for _ in range(200):
        base = random.SystemRandom().randrange(15000, 32000)
        if all(map(_is_free, range(base, base + PORTS))):
            return base
    raise AssertionError("no ports are free")


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


def _session(leader: int) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                fields = Path(entry.path, "stat").read_bytes().rpartition(b") ")[2].split()
                if int(fields[3]) == leader:
                    found.append(int(entry.name))
    return sorted(found)
