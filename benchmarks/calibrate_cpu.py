"""A calibrated model of this machine's CPU against measured seconds of networks that it never saw, and plans from it.

    python benchmarks/calibrate_cpu.py
    python benchmarks/calibrate_cpu.py --short   # two tiny networks: proves that it works

One core and two cores are calibrated as `tvm-pipeline calibrate` does, from stages of a few networks. Other networks
are then profiled. `shipped` is the error of the model that comes with tvm-pipeline, `calibrated` that of the refitted
one: for the whole network and for random stages, against seconds that were measured of just these stages. Plans are
made from the calibrated models for all devices and judged with the measured profile: `of the best` is their throughput
over that of the plan that is made from the profile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tvm_pipeline import Device, Platform, Problem, planning, profile_model, settle_platform, stage_timer
from tvm_pipeline.calibration.measuring import MOST_SPREAD
from tvm_pipeline.calibration.shipped import shipped_model
from tvm_pipeline.calibration.stage_choice import Candidate, candidates
from tvm_pipeline.cli.calibrate import constants_table
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.cost.modelled_stage import stage_table
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.frontends import load
from tvm_pipeline.report import TextTable
from tvm_pipeline.report.tables import duration, percent
from tvm_pipeline.workflow.calibrating import calibrate_platform

CALIBRATED = ("squeezenet", "mobilenet", "resnet-18")
UNSEEN = ("squeezenet1.1", "resnet-34", "resnet-50", "vgg-11")
SHORT = ("squeezenet",), ("squeezenet",)
SIDE, SHORT_SIDE = 128, 32
STAGES = 12  # of each unseen network, that are measured one by one
REPEATS = 16


@dataclass(frozen=True)
class Checked:
    """A stage of an unseen network on a device: measured seconds, and those of both models."""

    network: str
    device: str
    is_whole: bool
    measured_s: float
    shipped_s: float
    calibrated_s: float

    @property
    def errors(self) -> tuple[float, float]:
        return self.shipped_s / self.measured_s - 1, self.calibrated_s / self.measured_s - 1


@dataclass(frozen=True)
class Worth:
    """The throughput of the plan from the calibrated models, over that of the plan from measured seconds."""

    network: str
    of_best: float
    error: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrated", nargs="+", default=list(CALIBRATED), help="networks whose stages are fitted")
    parser.add_argument("--unseen", nargs="+", default=list(UNSEEN), help="networks that judge")
    parser.add_argument("--side", type=int, default=SIDE, help="of the pictures")
    parser.add_argument("--stages", type=int, default=16, help="that are measured to calibrate a device")
    parser.add_argument("--short", action="store_true", help="one tiny network: proves that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.short:
        (arguments.calibrated, arguments.unseen), arguments.side, arguments.stages = SHORT, SHORT_SIDE, 6
    console = Console(width=140)
    shapes = {"data": (1, 3, arguments.side, arguments.side)}
    machine = machine_here(arguments.short)
    try:
        found = calibrate_platform(arguments.calibrated, machine, shapes, arguments.stages)
    except ProfileError as error:
        console.print(f"this machine is too busy to be calibrated: {error}")
        return
    for group in found.groups:
        console.print(constants_table(group))
    checked: list[Checked] = []
    worths: list[Worth] = []
    calibrated = only_modelled(found.platform)
    for network in arguments.unseen:
        of_network, worth = check(network, calibrated, shapes, 3 if arguments.short else STAGES)
        checked += of_network
        worths.append(worth)
        console.print(f"{network}: {len(of_network)} stages measured")
    console.print(errors_table(checked))
    console.print(worths_table(worths))
    summary = summed_up(checked, worths)
    console.print(summary)
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1))


def machine_here(short: bool) -> Platform:
    """Return the cores as devices, and two of them as one; the short form has one core."""
    cores = sorted(os.sched_getaffinity(0))[: 1 if short else 2]
    devices = [Device(f"cpu{core}", cores=(core,)) for core in cores]
    if len(cores) > 1:
        devices.append(Device("both", cores=tuple(cores)))
    return Platform("here", tuple(devices))


def only_modelled(platform: Platform) -> Platform:
    """Return the platform without devices whose measurements could not be fitted."""
    kept = {device.name: device for device in platform.devices if device.model}
    links = tuple(link for link in platform.links if {link.source, link.destination} <= kept.keys())
    return replace(platform, devices=tuple(kept.values()), links=links)


def check(
    network: str, platform: Platform, shapes: Mapping[str, tuple[int, ...]], stages: int
) -> tuple[list[Checked], Worth]:
    """Measure a network and some of its stages on each kind of device, and judge the plan from the models."""
    backend, settled = settle_platform(platform)
    with closing(backend.compile(load(network, shapes), settled.devices)) as compiled:
        graph = compiled.graph
        timer = stage_timer(compiled)
        kinds = {len(device.cores): device for device in reversed(settled.devices)}
        found = []
        for device in kinds.values():
            for stage in chosen(graph, stages):
                whole = len(stage.operators) == len(graph)
                timed = timer(stage.operators, device)
                if timed.spread > MOST_SPREAD:
                    print(f"{device.name}: {stage.name} is disturbed by {timed.spread:.0%}, and judges nothing")
                    continue
                measured_s = timed.seconds
                shipped_s, calibrated_s = (
                    modelled_s(stage, model) for model in (shipped_model(bare(device)), device.model) if model
                )
                found.append(Checked(graph.name, device.name, whole, measured_s, shipped_s, calibrated_s))
        profile = profile_model(backend, compiled, settled, REPEATS)
    truth, guess = Problem(graph, settled, profile), Problem(graph, settled, unmeasured(graph))
    best, made = planning.plan(truth).plan, planning.plan(guess).plan
    worth = judged(truth, made).predicted.throughput_fps
    return found, Worth(graph.name, worth / best.predicted.throughput_fps, made.predicted.throughput_fps / worth - 1)


def bare(device: Device) -> Device:
    return Device(device.name, device.backend, device.cores, device.target)


def chosen(graph: OperatorGraph, count: int) -> list[Candidate]:
    """Return the whole network and random stages of it."""
    whole, *others = candidates([graph])
    return [whole, *random.Random(1).sample(others, count - 1)]


def modelled_s(stage: Candidate, model: DeviceModel) -> float:
    return float(stage_table([(stage.graph, stage.operators)]).seconds(model)[0])


def errors_table(checked: Sequence[Checked]) -> TextTable:
    rows = []
    for network, device in dict.fromkeys((each.network, each.device) for each in checked):
        of_both = [each for each in checked if (each.network, each.device) == (network, device)]
        whole = next((each for each in of_both if each.is_whole), None)
        means = [mean_error(of_both, index) for index in (0, 1)]
        signed = [percent(error, signed=True) for error in (whole.errors if whole else (None, None))]
        measured = duration(whole.measured_s if whole else None)
        rows.append((network, device, measured, *signed, *map(percent, means)))
    columns = ("network", "device", "measured", "shipped", "calibrated", "stages: shipped", "calibrated")
    return TextTable("Networks that no stage was measured of", columns, tuple(rows))


def worths_table(worths: Sequence[Worth]) -> TextTable:
    rows = tuple((each.network, f"{each.of_best:.3f}", percent(each.error, signed=True)) for each in worths)
    return TextTable("Plans from the calibrated models", ("network", "of the best", "error of its prediction"), rows)


def mean_error(checked: Sequence[Checked], model: int) -> float:
    return statistics.fmean(abs(each.errors[model]) for each in checked)


def summed_up(checked: Sequence[Checked], worths: Sequence[Worth]) -> dict[str, float]:
    """Return the figures that docs/figures.md quotes."""
    wholes = [each for each in checked if each.is_whole]
    found = {
        f"mean error of {what}, {name}": round(mean_error(stages, model), 3)
        for what, stages in (("whole networks", wholes), ("stages", checked))
        if stages
        for model, name in enumerate(("shipped", "calibrated"))
    }
    return {
        **found,
        "of the best, worst": round(min(each.of_best for each in worths), 3),
        "of the best, median": round(statistics.median(each.of_best for each in worths), 3),
    }


if __name__ == "__main__":
    main()
