"""Operators' seconds predicted from shapes against measured ones, leaving out each network, and plans made from them.

    python benchmarks/layer_times.py
    python benchmarks/layer_times.py --write profiles/layer_times   # and writes the files that this repository holds

Networks are compiled and profiled for devices of this machine: one core, one core with kernels for an older processor
(`-mcpu=haswell`), and two cores. Each network is then predicted from the others on each device.

Plans are made from predicted seconds, for machines of two devices of one core, and judged with the measured seconds. Of
such a plan, `of the best` is its throughput over that of the plan which is made from measured seconds. With --keep
FOLDER, profiles are kept there and used again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
from networks import load_lively
from rich.console import Console
from rich.table import Table

from tvm_pipeline import Device, Link, Platform, Problem, Profile, planning, profile_model, settle_platform
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.profile import read_profile
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.files import write_bytes
from tvm_pipeline.profiling.layer_times import (
    DeviceNote,
    KindError,
    LayerTime,
    LayerTimes,
    kind_errors,
    layer_times,
    write_layer_times,
)

NETWORKS = (
    *("squeezenet@224", "squeezenet@128", "mobilenet@224", "mobilenet@128", "resnet-18@224", "resnet-18@96"),
    *("resnet-50@128", "densenet-121@224", "inception_v3@299", "vgg-11@112"),
    *("light_inception_v1", "light_inception_v2", "light_shufflenet", "light_bvlc_alexnet", "light_zfnet512"),
)
SHORT = ("branching", "splitting")
NATIVE, OLDER, BOTH = "native", "older", "two-cores"
MACHINES = {"two alike": (NATIVE, NATIVE), "fast and slow": (NATIVE, OLDER)}
SCHEDULERS = ("best", "ideals", "two-stage")
SURE = 0.1  # the profiles that judge plans are not more uncertain
LATENCY_S, BANDWIDTH_BYTES_PER_S = 1e-5, 5e9  # between devices of those machines


@dataclass(frozen=True)
class Recording:
    """A network as it was profiled."""

    graph: OperatorGraph
    profile: Profile


@dataclass(frozen=True)
class Planned:
    """What a plan that was made from predicted seconds is worth by the measured ones.

    Attributes:
        of_best: its throughput over that of the plan that is made from measured seconds.
        error: of its predicted throughput, relative to the judged one.
    """

    network: str
    machine: str
    scheduler: str
    of_best: float
    error: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=16, help="passes over a network on each device")
    parser.add_argument("--keep", type=Path, help="a folder for graphs and profiles; those that it has are used")
    parser.add_argument("--write", type=Path, help="a folder for the layer times of each device")
    parser.add_argument("--short", action="store_true", help="two small networks: proves that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.networks, arguments.repeats = list(SHORT), 4
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as folder:
        keep = arguments.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        platform = devices_here(arguments.short)
        recordings = [recorded(name, platform, arguments.repeats, keep, console) for name in arguments.networks]
    times = {}
    for device in platform.devices:
        of_device = collected(recordings, device, uncertain=arguments.short)
        if of_device is None:
            console.print(f"{device.name}: fewer than two networks were measured well enough; it is left out")
        else:
            times[device.name] = of_device
    summary: dict[str, object] = {}
    for name, of_device in times.items():
        summary[name] = show_errors(console, f"{name}: {of_device.device}", of_device)
    judging = times.keys() & {kind for kinds in MACHINES.values() for kind in kinds}
    sure = [recording for recording in recordings if arguments.short or is_sure(recording, judging)]
    if len(sure) < len(recordings):
        console.print(f"{len(recordings) - len(sure)} networks were measured too inexactly to judge plans")
    if made := plans(sure, times):
        summary["plans"] = show_plans(console, made)
        console.print(summary["plans"])
    if arguments.write:
        arguments.write.mkdir(parents=True, exist_ok=True)
        for of_device in times.values():
            write_layer_times(arguments.write / file_name(of_device.device), of_device)
            console.print(f"{arguments.write / file_name(of_device.device)} written")
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1))


def devices_here(short: bool) -> Platform:
    """Return the devices that are profiled; the short form has one, and on one core there is no device of two."""
    devices = [Device(NATIVE, cores=(0,))]
    if not short:
        devices.append(Device(OLDER, cores=(0,), target="llvm -mcpu=haswell"))
        if len(os.sched_getaffinity(0)) > 1:
            devices.append(Device(BOTH, cores=(0, 1)))
    return settle_platform(Platform("here", tuple(devices)))[1]


def recorded(name: str, platform: Platform, repeats: int, keep: Path, console: Console) -> Recording:
    """Return a network's profile from the folder, or compile and measure it now and keep it there."""
    graph_file, profile_file = keep / f"{name}.json", keep / f"{name}.profile.json"
    if not profile_file.exists():
        backend, settled = settle_platform(platform)
        compiled = backend.compile(load_lively(name), settled.devices)
        measured = profile_model(backend, compiled, settled, repeats)
        for warning in measured.warnings:
            console.print(f"{name}: {warning}")
        write_bytes(graph_file, msgspec.json.encode(compiled.graph))
        write_bytes(profile_file, msgspec.json.encode(measured))
        console.print(f"{name}: {', '.join(f'{d} {f.whole_s * 1e3:.1f} ms' for d, f in measured.devices.items())}")
    return Recording(read_graph(graph_file), read_profile(profile_file))


def collected(recordings: Sequence[Recording], device: Device, *, uncertain: bool) -> LayerTimes | None:
    """Return the layer times of a device; networks of one name are one network, whatever their size.

    None where fewer than two networks have operators that were measured well.

    Args:
        uncertain: take also operators that were measured too inexactly to say anything.
    """
    networks: dict[str, list[LayerTime]] = defaultdict(list)
    for recording in recordings:
        figures = recording.profile.devices[device.name]
        figures = replace(figures, uncertainty={}) if uncertain else figures
        networks[recording.graph.name] += layer_times(recording.graph, figures)
    if sum(map(bool, networks.values())) < 2:
        return None
    environment = recordings[0].profile.environment
    note = DeviceNote(environment["processor"], len(device.cores), device.target, environment["tvm"])
    return LayerTimes(note, dict(networks))


def show_errors(console: Console, title: str, times: LayerTimes) -> dict[str, object]:
    """Print the errors of each kind and of whole networks; return the figures that docs/figures.md quotes."""
    table = Table("kind", "operators", "median error", "worst", "95 % interval", title=title)
    every = [
        abs(seconds / layer.seconds - 1)
        for layers in times.left_out.values()
        for layer, seconds in layers
        if seconds is not None
    ]
    for kind, error in kind_errors(times.left_out).items():
        table.add_row(kind, *_figures(error))
    console.print(table)
    wholes = {}
    for name, layers in times.left_out.items():
        known = [(layer.seconds, seconds) for layer, seconds in layers if seconds is not None]
        if known:
            wholes[name] = sum(predicted for _, predicted in known) / sum(taken for taken, _ in known) - 1
    unseen = sum(seconds is None for layers in times.left_out.values() for _, seconds in layers)
    summary = {
        "operators": len(every),
        "operators of kinds that no other network has": unseen,
        "median error": round(statistics.median(every), 4),
        "worst error": round(max(every), 2),
        "within 20 %": round(statistics.fmean(error <= 0.2 for error in every), 3),
        "median error of a whole network": round(statistics.median(map(abs, wholes.values())), 4),
        "whole networks": {name: round(error, 3) for name, error in wholes.items()},
    }
    console.print(summary)
    return {**summary, "kinds": {kind: asdict(error) for kind, error in times.errors.items()}}


def _figures(error: KindError) -> tuple[str, ...]:
    return str(error.operators), f"{error.median:.1%}", f"{error.worst:.0%}", f"±{error.half_width:.0%}"


def plans(recordings: Sequence[Recording], times: Mapping[str, LayerTimes]) -> list[Planned]:
    """Return what the plans of each network are worth whose seconds were predicted from the other networks."""
    found = []
    for recording in recordings:
        graph = recording.graph
        for machine, kinds in MACHINES.items():
            if not set(kinds) <= times.keys() or graph.name not in times[kinds[0]].networks:
                continue
            devices = tuple(Device(f"d{i}", cores=(i,)) for i in range(len(kinds)))
            links = tuple(
                Link(a.name, b.name, LATENCY_S, BANDWIDTH_BYTES_PER_S) for a in devices for b in devices if a != b
            )
            platform = Platform(machine, devices, links)
            figures = recording.profile.devices
            measured = {device.name: figures[kind] for device, kind in zip(devices, kinds, strict=True)}
            predicted = {
                device.name: times[kind].without(graph.name).predict(graph)
                for device, kind in zip(devices, kinds, strict=True)
            }
            truth, guess = (
                Problem(graph, platform, Profile(graph.name, graph.fingerprint, seconds))
                for seconds in (measured, predicted)
            )
            for scheduler in SCHEDULERS:
                stages = 2 if scheduler == "ideals" else None
                best = planning.plan(replace(truth, stages=stages), scheduler).plan
                made = planning.plan(replace(guess, stages=stages), scheduler).plan
                worth = judged(truth, made)
                found.append(
                    Planned(
                        f"{graph.name} {graph.inputs[0].shape[-1]}",
                        machine,
                        scheduler,
                        worth.predicted.throughput_fps / best.predicted.throughput_fps,
                        made.predicted.throughput_fps / worth.predicted.throughput_fps - 1,
                    )
                )
    return found


def show_plans(console: Console, found: Sequence[Planned]) -> dict[str, object]:
    """Print each plan; return the figures that docs/figures.md quotes."""
    table = Table("network", "machine", "scheduler", "of the best", "error of its prediction", title="Plans")
    for plan in found:
        table.add_row(plan.network, plan.machine, plan.scheduler, f"{plan.of_best:.3f}", f"{plan.error:+.1%}")
    console.print(table)
    return {
        "plans": len(found),
        "of the best, worst": round(min(plan.of_best for plan in found), 3),
        "of the best, median": round(statistics.median(plan.of_best for plan in found), 4),
        "error of the predicted throughput, median": round(statistics.median(abs(plan.error) for plan in found), 3),
        "error of the predicted throughput, worst": round(max(abs(plan.error) for plan in found), 3),
    }


def is_sure(recording: Recording, devices: Iterable[str]) -> bool:
    """Return whether the sums of a network's seconds on these devices are known well enough to judge plans."""
    figures = [recording.profile.devices[name] for name in devices]
    doubts_s = (sum(f.uncertainty[name] * (f.seconds[name] or 0.0) for name in f.uncertainty) for f in figures)
    return all(doubt_s <= SURE * f.whole_s for doubt_s, f in zip(doubts_s, figures, strict=True))


def file_name(device: DeviceNote) -> str:
    """Return the name of a device's file: `amd-epyc-znver5-1-core.json`."""
    processor = re.sub(r"\W+", "-", device.processor.lower()).strip("-")
    cpu = re.search(r"-mcpu=(\S+)", device.target)
    return f"{processor}-{cpu[1] if cpu else 'llvm'}-{device.cores}-core{'s' if device.cores > 1 else ''}.json"


if __name__ == "__main__":
    main()
