"""Measure what the coordinator of a fleet costs.

    python benchmarks/fleet_coordinator.py                # 100 hosts, 1000 cameras at 10 fps, 4 beats a second
    python benchmarks/fleet_coordinator.py --short        # 10 hosts, 40 cameras, for CI

Hosts are simulated: they follow orders and send a line of 300 bytes for every frame, as JSON, which the coordinator
decodes and writes into a file. Figures are CPU seconds of the coordinator's side alone:

1. of a beat: the mean over all hosts, decoding, writing the lines and encoding the order included;
2. of a tick, of the status, and of the decision who takes the cameras of a lost host;
3. and the seconds by the fleet's own clock until other hosts have all cameras of the lost one, and lines twice.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.plugins.hosts.simulated_fleet import SimulatedHost
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.coordinator import Coordinator
from tvm_pipeline_hosts.fleet.messages import FleetPlan, HostOrder, HostReport
from tvm_pipeline_hosts.fleet.takeover import take_over

BEAT_S, FPS = 0.25, 10.0
CONTENT = ',"time_s":12.34,"latency_s":0.0123,"source":"rtsp://10.0.0.1/stream","annotations":[' + ",".join(
    ['{"label":"person","score":0.87,"box":[0.125,0.25,0.375,0.5]}'] * 3
)


class Costs:
    """CPU seconds of calls, by what they are for."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def measured(self, what: str, call: Callable[[], Any]) -> Any:
        began_s = time.thread_time()
        answer = call()
        self.of.setdefault(what, []).append(time.thread_time() - began_s)
        return answer


class Host(SimulatedHost):
    """A host whose lines are as long as real ones."""

    def report(self) -> HostReport:
        report = super().report()
        lines = [
            msgspec.structs.replace(line, line=msgspec.Raw(f'{{"frame":{line.frame}{CONTENT}]}}'.encode()))
            for line in report.lines
        ]
        return msgspec.structs.replace(report, lines=tuple(lines))


def random_plan(hosts: int, cameras: int, results: Path, seed: int) -> FleetPlan:
    """Return a plan for hosts of speeds 1 to 4, busy for half of the time, whose cameras have 3 to 10 hosts each."""
    chance = random.Random(seed)
    names = [f"host{index}" for index in range(hosts)]
    speeds = {name: chance.choice((1, 2, 4)) for name in names}
    least_s = 0.5 * sum(speeds.values()) / (cameras * FPS)
    asked: dict[str, tuple[str, dict[str, float]]] = {
        f"camera{index}": (f"rtsp://10.0.0.{index}/stream", {"faces": FPS}) for index in range(cameras)
    }
    reach = {name: tuple(chance.sample(names, min(hosts, chance.randint(3, 10)))) for name in asked}
    plan = FleetPlan(
        asked,
        {},
        reach,
        {name: {"faces": least_s / speed} for name, speed in speeds.items()},
        {name: {"faces": f"{speed}" * 64} for name, speed in speeds.items()},
        results=str(results),
    )
    return msgspec.structs.replace(plan, host_of=take_over(plan, {}, names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small fleet, for CI")
    short = parser.parse_args().short
    hosts, cameras, rounds, losses = (10, 40, 8, 2) if short else (100, 1000, 80, 10)
    costs, decode, encode = Costs(), msgspec.json.Decoder(HostReport), msgspec.json.Encoder()
    with tempfile.TemporaryDirectory() as folder:
        path, now = Path(folder) / "all.jsonl", [0.0]
        plan = random_plan(hosts, cameras, path, 1)
        coordinator = Coordinator(lambda: now[0], Path(folder) / "memory.json", Collector())
        coordinator.follow(plan)
        made = [Host(f"host{index}") for index in range(hosts)]

        def speak(report: HostReport) -> HostOrder:
            message = encode.encode(report)
            answer = costs.measured("beat", lambda: encode.encode(coordinator.beat(decode.decode(message))))
            return msgspec.json.decode(answer, type=HostOrder)

        def turn(step: int) -> None:
            now[0] += BEAT_S
            for host in made:
                host.work(2 + step % 2)  # 10 fps
                host.beat(speak)
            costs.measured("tick", coordinator.tick)
            if step % 4 == 0:
                coordinator.sync()

        for step in range(12):
            turn(step)
        costs.of.clear()
        for step in range(rounds):
            turn(step)
        usual, ticks = [*costs.of["beat"]], [*costs.of["tick"]]
        for _ in range(5):
            costs.measured("status", coordinator.status)
        gaps, starve = [], 0
        for index in range(losses):
            lost, began_s = made[index], now[0]
            had = set(coordinator.status().hosts[lost.name].cameras)
            lost.frozen = True
            while coordinator.status().hosts[lost.name].state == "alive":
                turn(0)
            costs.of.setdefault("decision", []).append(costs.of["tick"][-1])
            starving = {duty.camera for duty in coordinator.status().duties if duty.host is None and duty.problem}
            starve += len(starving)
            while not had - starving <= set().union(*(host.cameras() for host in made if not host.frozen)):
                turn(0)
            gaps.append(now[0] - began_s)
            lost.frozen = False
            for step in range(8):
                turn(step)
        lines = [json.loads(line) for line in path.open()]
        twice = len(lines) - len({(line["camera"], line["epoch"], line["frame"]) for line in lines})
        coordinator.close()
    print(f"{hosts} hosts, {cameras} cameras, {len(usual)} beats, {len(lines)} lines")
    print(f"a beat: {statistics.fmean(usual) * 1e3:.3f} ms of CPU in the mean, {max(usual) * 1e3:.2f} ms the longest")
    print(f"all beats of a second: {statistics.fmean(usual) * hosts / BEAT_S:.1%} of a core")
    print(f"a tick: {statistics.fmean(ticks) * 1e3:.2f} ms; the status: {min(costs.of['status']) * 1e3:.1f} ms")
    decisions = costs.of["decision"]
    print(
        f"{losses} hosts lost one after another: the decision {statistics.median(decisions) * 1e3:.1f} ms median, "
        f"{max(decisions) * 1e3:.1f} ms the longest; all cameras elsewhere after {max(gaps):.2f} s at most, "
        f"{starve} starved"
    )
    print(f"lines twice: {twice}")
    if twice or max(gaps) > 2.5:
        sys.exit("a line came twice, or a camera was without a host for more than 2.5 s")


if __name__ == "__main__":
    main()
