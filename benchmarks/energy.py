"""Joules of a frame, predicted against measured, over one device, replicas and a pipeline.

    python benchmarks/energy.py                            # by the best sensor of this machine, where it has one
    python benchmarks/energy.py --power-sensor meter.csv
    python benchmarks/energy.py --cpu-watts 8              # by seconds of CPU time, as if each second drew 8 J

For each network: compile, profile with joules, plan, and run the best plan of each kind in turns. Where no sensor is,
each device counts `--active-w` while it is busy and the machine `--idle-w`: then both figures come from the platform's
watts, predicted with the seconds of the profile and stated with those of the run, and nothing was measured.

`--cpu-watts` is no sensor of power either. It takes the whole way of a sensor, from the joules of operators to those of
a frame, with joules that the kernel counts by itself: the CPU time of this process, on an idle machine of `--idle-w`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from networks import load_lively
from rich.console import Console

from tvm_pipeline import Problem, detect_platform, planning, profile_model, settle_platform
from tvm_pipeline.core.plan import Measured, Plan, describe
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.power import Meter, Reading, Sensor, chosen_sensor, survey
from tvm_pipeline.profiling.joules import Pace, profile_joules
from tvm_pipeline.report import TextTable, comparison_table
from tvm_pipeline.runtime.comparison import runner, side_by_side
from tvm_pipeline.runtime.metering import metered
from tvm_pipeline.workflow.power_meter import NONE

NETWORKS = ("squeezenet", "mobilenet", "resnet-18", "resnet-50")
SHORT = Pace(window_s=0.02, idle_window_s=0.02, settle_s=0.5, longest_s=0.1)


class CpuSeconds(Sensor):
    """Counts joules as CPU seconds of this process times watts, beside an idle machine."""

    name, covers, period_s = "CPU seconds", "this process", 0.01

    def __init__(self, active_w: float, idle_w: float) -> None:
        self._active_w, self._idle_w = active_w, idle_w

    def read(self) -> Sequence[Reading]:
        now_s = time.perf_counter()
        return [Reading(now_s, self._idle_w * now_s + self._active_w * time.process_time())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NETWORKS))
    parser.add_argument("--power-sensor", default="", help="as for `run`")
    parser.add_argument("--cpu-watts", type=float, help="joules of a CPU second, in place of a sensor")
    parser.add_argument("--active-w", type=float, default=8.0, help="of each device while it is busy, without a sensor")
    parser.add_argument("--idle-w", type=float, default=4.0, help="of the idle machine, without a sensor")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each plan in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="one small model, briefly: proves that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.models, arguments.seconds, arguments.rounds = ["branching"], 0.1, 1
        arguments.cpu_watts = 8.0 if new_sensor(arguments) is None else None

    console = Console(width=180)
    rows = [row for name in arguments.models for row in rows_of(console, name, arguments)]
    shown = tuple(
        (row["model"], row["plan"], f"{row['predicted_j']:.4f}", f"{row['energy_j']:.4f}", f"{row['error']:+.1%}")
        for row in rows
    )
    what = "measured" if rows[0]["measured"] else "by watts"
    title = f"Joules a frame by {rows[0]['by']}{'' if rows[0]['measured'] else ': nothing was measured'}"
    console.print(TextTable(title, ("model", "plan", "predicted", what, "error"), shown))
    errors = [abs(row["error"]) for row in rows]
    console.print(f"error: median {median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} plans")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def new_sensor(arguments: argparse.Namespace) -> Sensor | None:
    """Return the sensor to measure with; None where the platform's watts are taken."""
    if arguments.cpu_watts is not None:
        return CpuSeconds(arguments.cpu_watts, arguments.idle_w)
    return None if arguments.power_sensor == NONE else chosen_sensor(survey(), arguments.power_sensor)


def rows_of(console: Console, name: str, arguments: argparse.Namespace) -> list[dict]:
    """Return the figures of the best plan of each kind of one model."""
    backend, platform = settle_platform(detect_platform())
    if new_sensor(arguments) is None:
        platform = stated(platform, arguments.active_w, arguments.idle_w)
    compiled = backend.compile(load_lively(name), platform.devices)
    profile = profile_model(backend, compiled, platform, repeats=4 if arguments.short else 24)
    if sensor := new_sensor(arguments):
        profile = profile_joules(compiled, platform, profile, sensor, pace=SHORT if arguments.short else None)
        console.print(f"{name}: idle {profile.idle}", *profile.warnings, sep="\n")
    problem = Problem(compiled.graph, platform, profile)
    plans = kinds(planning.plan(problem).candidates)
    if sensor := new_sensor(arguments):
        with Meter(sensor) as meter:
            run = metered(runner(compiled, platform), problem, meter)
            found = side_by_side([(plan, run) for plan in plans], seconds=arguments.seconds, rounds=arguments.rounds)
    else:
        run = metered(runner(compiled, platform), problem, None)
        found = side_by_side([(plan, run) for plan in plans], seconds=arguments.seconds, rounds=arguments.rounds)
    console.print(f"[bold]{name}[/]", comparison_table(found))
    return [row_of(name, result) for result in found]


def stated(platform: Platform, active_w: float, idle_w: float) -> Platform:
    """Return the platform with watts for each core of a device, where it states none."""

    def watts(cores: int) -> float:
        return active_w * max(cores, 1)

    devices = tuple(
        device if device.active_w is not None else replace(device, active_w=watts(len(device.cores)))
        for device in platform.devices
    )
    return replace(platform, devices=devices, idle_w=idle_w if platform.idle_w is None else platform.idle_w)


def kinds(candidates: Iterable[Plan]) -> list[Plan]:
    """Return the best plan of one device, of replicas, and of several stages."""
    found: dict[str, Plan] = {}
    for plan in candidates:
        kind = "pipeline" if len(plan.stages) > 1 else "single" if len(plan.devices) == 1 else "replicas"
        found.setdefault(kind, plan)
    return list(found.values())


def row_of(model: str, found: Measured) -> dict:
    energy, predicted_j = found.energy, found.plan.predicted.energy_j
    if energy is None or predicted_j is None:
        raise SystemExit(f"{model}: nothing tells the joules of {describe(found.plan)}; see the warnings above")
    return {
        "model": model,
        "plan": describe(found.plan),
        "predicted_j": predicted_j,
        "energy_j": energy.energy_j,
        "active_j": energy.active_j,
        "error": predicted_j / energy.energy_j - 1,
        "by": energy.by,
        "measured": energy.is_measured,
    }


if __name__ == "__main__":
    main()
