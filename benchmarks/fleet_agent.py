"""Measure the agent of a host: its CPU, how soon a camera gives lines, and what an agent that is killed costs.

    nice -n 5 python benchmarks/fleet_agent.py           # two minutes
    nice -n 5 python benchmarks/fleet_agent.py --short   # a few seconds, for CI

The agent is a process of its own, whose beats come here over a Unix socket, four a second. Its service is a real one,
`tvm-pipeline run --wait`, with a model of one operator on pictures of 32 x 32, so that nearly all that is measured is
the agent's. CPU is what /proc tells of the agent's process, in the share of a core.

Required: no frame lost and none twice when the agent is killed by SIGKILL and followed by another. The exit status is 1
otherwise.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.plugins.hosts.fleet_host import agent_command, answering, install, write_service_bundle  # noqa: E402
from tvm_pipeline_hosts.fleet.host_processes import HostProcess, processes_of  # noqa: E402
from tvm_pipeline_hosts.fleet.messages import Duty, HostOrder, HostReport  # noqa: E402
from tvm_pipeline_hosts.remote.parcels import Parcels, manifest_of, parts_of  # noqa: E402

CAMERAS, FPS = 20, 10.0
CONSOLE = Console(width=120)


class Coordinator:
    """Orders what the benchmark says, and takes each line once."""

    def __init__(self) -> None:
        self.order = HostOrder(0)
        self.report = HostReport("", "")
        self.frames: dict[str, list[int]] = {}
        self.first_s: dict[str, float] = {}
        self.beats = self.lines = 0

    def beat(self, report: HostReport) -> HostOrder:
        for line in report.lines:
            seen = self.frames.setdefault(f"{line.camera}@{line.epoch}", [])
            if not seen or line.frame > seen[-1]:
                seen.append(line.frame)
                self.first_s.setdefault(line.camera, time.monotonic())
                self.lines += 1
        self.report = report
        self.beats += 1
        return msgspec.structs.replace(self.order, taken=report.upto, safe=report.upto)

    def orders(self, bundle: str, cameras: list[str]) -> float:
        """Order these cameras; return when."""
        duties = tuple(Duty(name, f"synthetic:32x32@{FPS:g}", "m", bundle, 1, 2 * FPS) for name in cameras)
        self.order = HostOrder(self.order.version + 1, duties, {"m": bundle})
        return time.monotonic()


class Host:
    """A host's folder with one bundle, and the process that is its agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "host"
        self.environment = install(folder / "site")
        write_service_bundle(folder / "net.tar", "1")
        parcels, manifest = Parcels(self.folder / "parcels"), manifest_of(folder / "net.tar")
        for part in parts_of(folder / "net.tar", parcels.missing(manifest)):
            parcels.put(*part)
        self.bundle = parcels.assemble(manifest)
        self.coordinator = Coordinator()
        self.starts = 0

    def agent(self, stack: ExitStack) -> subprocess.Popen[bytes]:
        """Start an agent, which ends with the stack."""
        self.starts += 1
        socket = self.folder / f"socket{self.starts}"
        stack.enter_context(answering(socket, self.coordinator.beat))
        agent = subprocess.Popen(agent_command("attic", self.folder, socket), env=self.environment)
        stack.callback(agent.wait)
        stack.callback(agent.kill)
        return agent

    def written(self) -> dict[str, int]:
        """Return how many lines of each source stand in the files of the service."""
        counts: dict[str, int] = {}
        for path in (self.folder / "services").glob("*/results-*.jsonl"):
            for text in path.read_bytes().splitlines(keepends=True):
                if text.endswith(b"\n"):
                    tag = msgspec.json.decode(text)["tag"]
                    counts[tag] = counts.get(tag, 0) + 1
        return counts


def until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> float:
    """Wait until a condition holds, and return for how long."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > seconds:
            raise SystemExit(f"{what} took more than {seconds:g} s")
        time.sleep(0.005)
    return time.monotonic() - began_s


def share(pid: int, seconds: float) -> float:
    """Return the share of a core for which a process computes."""
    process = HostProcess.of(pid)
    assert process
    before, began_s = process.usage()[0], time.monotonic()
    time.sleep(seconds)
    return (process.usage()[0] - before) / (time.monotonic() - began_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which CPU is measured, idle and at work")
    parser.add_argument("--short", action="store_true", help="a few seconds, for CI")
    arguments = parser.parse_args()
    seconds, added = (0.5, 2) if arguments.short else (arguments.seconds, 10)
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder))
        try:
            return measured(host, seconds, added)
        finally:
            for _, process in processes_of(host.folder.resolve()):
                process.send(signal.SIGKILL)


def measured(host: Host, seconds: float, added: int) -> int:
    coordinator = host.coordinator
    table = Table("what", "figure", title="The agent of a host", title_justify="left")
    with ExitStack() as stack:
        agent = host.agent(stack)
        coordinator.orders(host.bundle, [])
        until(lambda: coordinator.report.ready, "the service")
        beats, began_s = coordinator.beats, time.monotonic()
        idle = share(agent.pid, seconds)
        rate = (coordinator.beats - beats) / (time.monotonic() - began_s)
        process = HostProcess.of(agent.pid)
        table.add_row("CPU, idle, one warm service", f"{idle:.2%} of a core ({rate:.1f} beats a second)")
        table.add_row("memory of its process", f"{process.usage()[1] / 1e6 if process else 0:.0f} MB resident")

        names: list[str] = []
        waits = []
        for index in range(added):
            names.append(f"new{index}")
            ordered_s = coordinator.orders(host.bundle, names)
            until(lambda: names[-1] in coordinator.first_s, "the first line of a camera")
            waits.append(coordinator.first_s[names[-1]] - ordered_s)
        table.add_row(
            "from an order with a new camera to its first line in a report",
            f"median {statistics.median(waits):.2f} s, longest {max(waits):.2f} s, of {added}",
        )

        names = [f"camera{index}" for index in range(CAMERAS)]
        coordinator.orders(host.bundle, names)
        until(lambda: all(name in coordinator.first_s for name in names), "the first lines")
        lines, began_s = coordinator.lines, time.monotonic()
        busy = share(agent.pid, seconds)
        rate = (coordinator.lines - lines) / (time.monotonic() - began_s)
        table.add_row(f"CPU, {rate:.0f} lines a second", f"{busy:.2%} of a core")

        agent.kill()
        agent.wait()
        killed_s, beats = time.monotonic(), coordinator.beats
        time.sleep(1.0)
        host.agent(stack)
        until(lambda: coordinator.beats > beats, "the next agent")
        table.add_row(
            "from SIGKILL of the agent to a beat of one begun 1 s later", f"{time.monotonic() - killed_s:.2f} s"
        )
        adopted = len(coordinator.report.running)
        until(lambda: coordinator.report.waiting == 0 and coordinator.beats > beats + 8, "the lines that waited")
        coordinator.orders(host.bundle, [])
        until(lambda: not coordinator.report.running, "closing the cameras")
    written = host.written()
    came = {tag: len(frames) for tag, frames in coordinator.frames.items()}
    lost = sum(max(0, count - came.get(tag, 0)) for tag, count in written.items())
    table.add_row("cameras that the next agent found running", f"{adopted} of {CAMERAS}")
    table.add_row("lines that were written and did not come", f"{lost} of {sum(written.values())}")
    CONSOLE.print(table)
    if lost or came != written or adopted != CAMERAS:
        CONSOLE.print("[red]lines were lost or came twice, or cameras were not adopted")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
