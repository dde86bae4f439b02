"""Lose hosts, the head, raylets, agents and services of a fleet, and count what that costs each camera.

    nice -n 5 python benchmarks/fleet_faults.py                     # each fault --times times
    nice -n 5 python benchmarks/fleet_faults.py --only killed,head --times 5
    nice -n 5 python benchmarks/fleet_faults.py --soak 7200         # a loss every five minutes
    python benchmarks/fleet_faults.py --short                       # a host, 2 cameras, its service killed once, for CI

The fleet is a real one: `fleet up`, `fleet join` and `fleet run` as a user begins them, with TLS and a token, but all
hosts are on this machine, each with an address of loopback. Cameras are synthetic, of 2, 5 and 10 fps. The model is one
mean of a picture, so that two cores carry all hosts; that one host is as fast as the two others together is only said
in fleet.toml, for the placement.

A fault hits all processes of a machine (its keeper, Ray, its services), or a part of them. Printed for each: seconds
between the last line before it and the first one after it, of the cameras that were hit, as the collector's file gets
them, which includes opening the source; frames lost of all other cameras, by gaps in their lines and as the coordinator
counts them; lines that came twice. A gap over WORST_GAP_S and what opening takes (for a service, also what its start
takes), a frame lost of another camera, or a line that comes twice is an error, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


from rich.console import Console
from rich.table import Table

from tests.plugins.hosts.fleet_host import write_service_bundle
from tests.plugins.hosts.ray_fleet import HEAD, LocalFleet, local_fleet, wait_for

RATES = (2, 5, 10)
WORST_GAP_S = 3.0
SETTLED_S = 60.0  # for all cameras to have lines again
QUIET_S = 2.0  # without a fault, before the next one
BEGIN_S = 6.0  # for a service to begin anew on a busy machine
OPENING_S = 1.0  # what is allowed for opening a source on a busy machine
CONSOLE = Console(width=150)

Seen = tuple[str, int, int, float]  # host, epoch, frame, when its line came


class Lines:
    """The collector's file, each line with the time at which it was there."""

    def __init__(self, path: Path) -> None:
        self.seen: dict[str, list[Seen]] = defaultdict(list)
        self.twice = 0
        self._path, self._stopped = path, threading.Event()
        self._known: set[tuple[str, int, int]] = set()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def last(self, camera: str) -> float:
        return self.seen[camera][-1][3] if self.seen[camera] else float("-inf")

    def host(self, camera: str) -> str:
        return self.seen[camera][-1][0]

    def gaps(self, camera: str, since_s: float) -> int:
        """Return the frames that lack between lines of the same epoch."""
        recent = [one for one in self.seen[camera] if one[3] >= since_s]
        pairs = itertools.pairwise(recent)
        return sum(after[2] - before[2] - 1 for before, after in pairs if after[1] == before[1])

    def epochs(self, camera: str, since_s: float) -> int:
        return len({epoch for _, epoch, _, came_s in self.seen[camera] if came_s >= since_s})

    def longest(self, camera: str, since_s: float) -> float:
        """Return the longest seconds between two lines, one of which came since then."""
        times = [one[3] for one in self.seen[camera]]
        pairs = itertools.pairwise(times)
        return max((after - before for before, after in pairs if after >= since_s), default=0.0)

    def _follow(self) -> None:
        rest, place = b"", 0
        while not self._stopped.wait(0.02):
            if not self._path.exists():
                continue
            with self._path.open("rb") as file:
                file.seek(place)
                content = file.read()
            now_s = time.monotonic()
            place += len(content)
            *lines, rest = (rest + content).split(b"\n")
            for text in lines:
                line = json.loads(text)
                key = (line["camera"], line["epoch"], line["frame"])
                self.twice += key in self._known
                self._known.add(key)
                self.seen[line["camera"]].append((line["host"], line["epoch"], line["frame"], now_s))


@dataclass
class Found:
    """What faults of a kind have cost."""

    kind: str
    times: int = 0
    gaps_s: list[float] = field(default_factory=list)
    others_lost: int = 0
    moved: int = 0
    twice: int = 0
    wrong: list[str] = field(default_factory=list)


class Bench:
    """A fleet with its cameras running."""

    def __init__(self, fleet: LocalFleet, cameras: int, hosts: dict[str, int]) -> None:
        self.fleet, self.hosts = fleet, tuple(hosts)
        self.folder, self.results = fleet.folder, fleet.folder / "all.jsonl"
        write_service_bundle(self.folder / "means.tar", "1")
        names = [f"c{number:02}" for number in range(cameras)]
        self.rates = {name: RATES[number % 3] for number, name in enumerate(names)}
        text = 'alone = "keep"\n[[model]]\nname = "means"\nfile = "means.tar"\n'
        for name, fps in hosts.items():
            text += f'[[host]]\nname = "{name}"\nfps = {{ means = {fps} }}\n'
        for name, rate in self.rates.items():
            text += f'[[camera]]\nname = "{name}"\nsource = "synthetic:64x64@{rate}"\nmodels = ["means@{rate}"]\n'
        (self.folder / "fleet.toml").write_text(text)

    def start(self) -> None:
        began_s = time.monotonic()
        self.fleet.up()
        up_s = time.monotonic()
        self.fleet.join(*self.hosts)
        joined_s = time.monotonic()
        CONSOLE.print(f"head up in {up_s - began_s:.1f} s, {len(self.hosts)} hosts in {joined_s - up_s:.1f} s")

    def run(self) -> None:
        words = ("run", str(self.folder / "fleet.toml"), "--key", str(self.fleet.key), "--results", str(self.results))
        began_s = time.monotonic()
        done = self.fleet.ask(*words, "--detach", "--address", "127.0.0.2")
        if done.returncode:
            raise SystemExit(done.stderr)
        self.lines = getattr(self, "lines", None) or Lines(self.results)
        self.settle(began_s)
        CONSOLE.print(done.stderr.strip(), highlight=False)
        CONSOLE.print(f"all cameras have lines {time.monotonic() - began_s:.1f} s after `fleet run` began")

    def settle(self, since_s: float) -> None:
        """Wait until every camera has had a line since then, and for a quiet moment."""
        lines = self.lines
        wait_for(lambda: all(lines.last(name) > since_s for name in self.rates), SETTLED_S, "lines of all cameras")
        time.sleep(QUIET_S)

    def of(self, host: str) -> list[str]:
        return [name for name in self.rates if self.lines.host(name) == host]

    def largest(self) -> str:
        return max(self.hosts, key=lambda host: sum(self.rates[name] for name in self.of(host)))

    def counted_lost(self) -> dict[str, int]:
        """Return the frames of each camera that the coordinator counts as lost."""
        done = self.fleet.ask("status", "--json", "--key", str(self.fleet.key), "--address", "127.0.0.2")
        found: Counter[str] = Counter()
        for duty in json.loads(done.stdout)["duties"]:
            found[duty["camera"]] += sum(duty["lost"].values())
        return found

    def fault(
        self, found: Found, hits: list[str], does: Callable[[], None], mends: Callable[[], None], extra_s: float = 0.0
    ) -> None:
        """Do a fault that hits some cameras, wait until they have lines again, and mend it.

        Args:
            extra_s: seconds that the gap may be longer.
        """
        before = self.counted_lost()
        twice, began_s = self.lines.twice, time.monotonic()
        last = {name: self.lines.last(name) for name in self.rates}
        does()
        hit_s = time.monotonic()
        if hits:
            wait_for(lambda: all(self.lines.last(name) > hit_s + 0.3 for name in hits), SETTLED_S, "lines of those hit")
            gaps = {name: self.lines.longest(name, hit_s) for name in hits}
            found.gaps_s += gaps.values()
            limit_s = WORST_GAP_S + OPENING_S + 1 / min(RATES) + extra_s
            found.wrong += [f"{name}: {gap:.2f} s" for name, gap in gaps.items() if gap > limit_s]
        mends()
        self.settle(time.monotonic())
        others = [name for name in self.rates if name not in hits]
        after = self.counted_lost()
        lost = {name: self.lines.gaps(name, last[name]) + max(0, after[name] - before[name]) for name in others}
        found.others_lost += sum(lost.values())
        found.moved += sum(self.lines.epochs(name, began_s + 1.0) > 1 for name in others)
        found.twice += self.lines.twice - twice
        found.times += 1
        found.wrong += [f"{name} lost {frames}" for name, frames in lost.items() if frames]

    # The faults

    def killed(self, found: Found) -> None:
        host = self.largest()
        self.fault(found, self.of(host), lambda: self.fleet.send(signal.SIGKILL, host), lambda: self.fleet.again(host))
        self.run()  # its cameras go home

    def frozen(self, found: Found) -> None:
        host = self.largest()
        self.fault(
            found,
            self.of(host),
            lambda: self.fleet.send(signal.SIGSTOP, host),
            lambda: self.fleet.send(signal.SIGCONT, host),
        )
        self.run()

    def head(self, found: Found) -> None:
        self.fault(found, [], lambda: self.fleet.send(signal.SIGKILL, HEAD), lambda: self.fleet.again(HEAD))

    def head_ray(self, found: Found) -> None:
        self.fault(found, [], lambda: self.fleet.send(signal.SIGKILL, HEAD, "ray"), lambda: None)

    def raylet(self, found: Found) -> None:
        host = self.largest()
        self.fault(found, self.of(host), lambda: self.fleet.send(signal.SIGKILL, host, "ray"), self._answers(host))
        self.run()

    def agent(self, found: Found) -> None:
        host = self.largest()
        self.fault(found, self.of(host), lambda: self._kill_actor(host), self._answers(host))

    def coordinator(self, found: Found) -> None:
        self.fault(found, [], lambda: self._kill_actor(HEAD), lambda: None)

    def service(self, found: Found) -> None:
        host = self.largest()
        self.fault(
            found, self.of(host), lambda: self.fleet.send(signal.SIGKILL, host, "services"), lambda: None, BEGIN_S
        )

    def _kill_actor(self, name: str) -> None:
        pid = json.loads((self.fleet.state(name) / "actor.json").read_bytes())[0]
        os.kill(pid, signal.SIGKILL)

    def _answers(self, host: str) -> Callable[[], None]:
        def mend() -> None:
            def alive() -> bool:
                done = self.fleet.ask("status", "--json", "--key", str(self.fleet.key), "--address", "127.0.0.2")
                return not done.returncode and json.loads(done.stdout)["hosts"][host]["state"] == "alive"

            wait_for(alive, SETTLED_S, f"{host} is back")

        return mend


FAULTS: dict[str, Callable[[Bench, Found], None]] = {
    "killed": Bench.killed,
    "frozen": Bench.frozen,
    "head": Bench.head,
    "head-ray": Bench.head_ray,
    "raylet": Bench.raylet,
    "agent": Bench.agent,
    "coordinator": Bench.coordinator,
    "service": Bench.service,
}


def memory_bytes(fleet: LocalFleet) -> int:
    """Return the proportional memory of all processes of a fleet."""
    total = 0
    for name in fleet.keepers:
        for pid in fleet.pids(name):
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return total


def cpu_share(fleet: LocalFleet, host: str, seconds: float) -> float:
    """Return the share of a core that Ray and the agent of a host use, without the services."""

    def used() -> dict[tuple[int, str], float]:
        # Finer than the ticks of `stat`, which are 0.1 % of ten seconds for each process.
        tasks = [(pid, task) for pid in fleet.pids(host, "keeper", "ray") for task in os.listdir(f"/proc/{pid}/task")]
        return {
            (pid, task): int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) / 1e9
            for pid, task in tasks
        }

    before, began_s = used(), time.monotonic()
    time.sleep(seconds)
    after = used()
    return sum(after[task] - before.get(task, 0.0) for task in after) / (time.monotonic() - began_s)


def show(all_found: list[Found]) -> int:
    table = Table("fault", "times", "gap median s", "worst s", "lost of others", "others moved", "twice", "wrong")
    for found in all_found:
        median, worst = (
            (f"{statistics.median(found.gaps_s):.2f}", f"{max(found.gaps_s):.2f}") if found.gaps_s else ("-", "-")
        )
        counts = (found.others_lost, found.moved, found.twice)
        table.add_row(
            found.kind, str(found.times), median, worst, *map(str, counts), "; ".join(found.wrong)[:200] or "nothing"
        )
    CONSOLE.print(table)
    return int(any(found.wrong or found.twice for found in all_found))


def soak(bench: Bench, seconds: float, every_s: float, seed: int) -> list[Found]:
    """Do a random fault every so often."""
    chance, until_s = random.Random(seed), time.monotonic() + seconds
    all_found = {kind: Found(kind) for kind in FAULTS}
    began = memory_bytes(bench.fleet)
    while time.monotonic() < until_s:
        next_s = time.monotonic() + every_s
        kind = chance.choice(list(FAULTS))
        FAULTS[kind](bench, all_found[kind])
        megabytes, found = memory_bytes(bench.fleet) / 1e6, all_found[kind]
        CONSOLE.print(
            f"{time.strftime('%H:%M:%S')} {kind}: worst gap of its kind {max(found.gaps_s, default=0.0):.2f} s, "
            f"{found.others_lost} frames of other cameras lost; {megabytes:.0f} MB, at first {began / 1e6:.0f}"
        )
        time.sleep(max(0.0, min(next_s, until_s) - time.monotonic()))
    return [found for found in all_found.values() if found.times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="how often each fault is done")
    parser.add_argument("--only", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--cameras", type=int, default=20)
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="random faults for so long")
    parser.add_argument("--every", type=float, default=300.0, metavar="SECONDS", help="between two losses of --soak")
    parser.add_argument("--cpu", type=float, default=10.0, metavar="SECONDS", help="for which CPU is measured; 0: not")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a host, 2 cameras, its service killed, for CI")
    given = parser.parse_args()
    if given.short:
        given.only, given.times, given.cameras, given.cpu = "service", 1, 2, 0.5
    hosts = {"barn": 100} if given.short else {"attic": 200, "barn": 100, "cellar": 100}
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder, local_fleet(Path(folder)) as fleet:
        bench = Bench(fleet, given.cameras, hosts)
        bench.start()
        if given.cpu:
            CONSOLE.print(f"CPU of a host's Ray and agent, idle: {cpu_share(fleet, 'barn', given.cpu):.1%} of a core")
        bench.run()
        if given.cpu:
            host = bench.largest()
            rate = sum(bench.rates[name] for name in bench.of(host))
            share = cpu_share(fleet, host, given.cpu)
            CONSOLE.print(f"CPU of a host's Ray and agent at {rate} lines a second: {share:.1%} of a core")
        began = memory_bytes(fleet)
        if given.soak:
            all_found = soak(bench, given.soak, given.every, given.seed)
        else:
            all_found = [Found(kind) for kind in given.only.split(",")]
            for found in all_found:
                for _ in range(given.times):
                    FAULTS[found.kind](bench, found)
                show([found])
        CONSOLE.print(f"memory of all processes: {began / 1e6:.0f} MB, then {memory_bytes(fleet) / 1e6:.0f} MB")
        bench.lines.close()
        return show(all_found)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.TimeoutExpired as error:
        sys.exit(str(error))
