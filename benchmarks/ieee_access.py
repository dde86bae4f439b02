"""The experiments of Velasco-Montero et al. (IEEE Access 2023) on two devices of this machine, as one report.

Tables 2 to 5 and Figures 4, 5, 6, 8, 9, 11 and 12: four networks by default and by tuned kernels; each device alone,
Algorithm 1 as printed, our two and three stages, replicas, and `best` of all devices; every cut of MobileNet, eight
schedules of SqueezeNet, and MobileNet under the paper's loads. Every figure of this machine is measured here and now.
The published figures stand beside them, marked as of another machine.

The two devices are a GPU and the CPU where a GPU is, else two halves of the CPU. Then most of the paper's ratios cannot
be repeated: two equal devices have no cut that suits one better than the other.

    python benchmarks/ieee_access.py                                  # default kernels, about twelve minutes
    python benchmarks/ieee_access.py --kernels default,tuned --tune 120
    python benchmarks/ieee_access.py --short

It writes report.md, its pictures, and figures.json with all that was measured; `--again` draws it anew from these.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import ieee_report
from ieee_loads import loaded_sweep, under_load
from ieee_measure import (
    Machine,
    Subject,
    compared,
    configurations,
    eight_schedules,
    layers,
    machine,
    network_row,
    subject,
    sweep,
    transfers,
)
from loads import LOADS
from rich.console import Console

from tvm_pipeline.cli.output import every_few_seconds, logged, steps_to
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.profiling.environment import environment
from tvm_pipeline_papers.measured_cuts import TURN_S

NETWORKS = ("mobilenet", "squeezenet1.1", "inception_v3", "vgg-19")
SWEPT, SCHEDULED = "mobilenet", "squeezenet1.1"  # Figures 4, 5 and 12, and Table 5; Figure 11
PAPER_LOADS = ("nothing", "video", "gpu", "stress")
SHORT = "branching"

CONSOLE = Console(stderr=True, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="", help="two devices, as cuda0,cpu; without it, see above")
    parser.add_argument("--kernels", default="default", help="default, tuned, or both with a comma between")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds to tune each network first, on each target")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(PAPER_LOADS))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each plan in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adapted", type=float, default=6.0, help="seconds under a load until adaptation counts")
    parser.add_argument("-o", "--output", type=Path, default=Path("ieee_access"), help="folder of the report")
    parser.add_argument("--again", action="store_true", help="measure nothing: draw the report from figures.json")
    parser.add_argument("--short", action="store_true", help="a tiny network, briefly: proves that it works")
    options = parser.parse_args()
    if not set(options.kernels.split(",")) <= {"default", "tuned"}:
        parser.error(f"--kernels {options.kernels}: give default, tuned, or default,tuned")
    options.swept, options.scheduled, options.turn_s = SWEPT, SCHEDULED, TURN_S
    if options.short:
        options.networks, options.swept, options.scheduled, options.loads = [SHORT], SHORT, SHORT, ["stress"]
        options.seconds, options.rounds, options.turn_s, options.adapted = 0.05, 1, 0.02, 0.2
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "figures.json"
    if not options.again:
        with logged(), steps_to(every_few_seconds(_tell)):
            file.write_text(json.dumps(measured(options), indent=1))
    found = json.loads(file.read_text())
    report = ieee_report.write(found, options.output)
    print(report.read_text())
    CONSOLE.print(f"written: {report}, after {found['took_s']:.0f} s")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, as they go into figures.json."""
    began_s = time.perf_counter()
    here = machine([name for name in options.devices.split(",") if name])
    results: dict[str, Any] = {
        "devices": [{"name": d.name, "backend": d.backend, "target": d.target} for d in here.platform.devices],
        "pair": list(here.pair),
        "command": [Path(sys.executable).name, *sys.argv],
        "environment": environment(here.backend.versions()),
        "missing": _missing(here),
        "warnings": [],
        "networks": [],
        "configurations": [],
        "loads": [],
    }
    for name in options.networks:
        for kernels in options.kernels.split(","):
            _tell(f"{name}, {kernels} kernels: compiling and profiling")
            try:
                found = subject(here, name, kernels, options.tune, 4 if options.short else 24)
                if isinstance(found, str):
                    results["missing"].append(found)
                else:
                    _measure(found, options, results)
            except PipelineError as error:  # what was measured before is kept
                _tell(f"{name}, {kernels} kernels: {error}")
                results["missing"].append(f"{name}, {kernels} kernels: {error}")
    results["missing"] = list(dict.fromkeys(results["missing"]))
    results["took_s"] = time.perf_counter() - began_s
    return results


def _measure(found: Subject, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measure all that is wanted of one network and kind of kernels."""
    is_first = found.kernels == options.kernels.split(",")[0]
    if is_first:
        results["networks"].append(network_row(found))
    _tell(f"{found.name}: configurations")
    plans, missing = configurations(found)
    results["missing"] += missing
    results["warnings"] += [f"{found.name}, {found.kernels} kernels: {each}" for each in found.problem.profile.warnings]
    results["configurations"] += compared(found, plans, options.seconds, options.rounds)
    if found.name == options.scheduled:  # of the last kind of kernels that there is
        _tell(f"{found.name}: eight schedules")
        results["schedules"] = compared(found, eight_schedules(found), options.seconds, options.rounds)
    if found.name != options.swept or not is_first:
        return
    _tell(f"{found.name}: every cut")
    results |= {"layers": layers(found), "transfers": transfers(found)}
    results["sweep"] = sweep(found, options.turn_s, min(options.rounds, 3))
    for name in options.loads:
        _tell(f"{found.name} under load {name}")
        results["loads"].append(under_load(found, LOADS[name], plans, 2 * options.seconds, options.adapted))
    measurable = [name for name in options.loads if name != "nothing" and not LOADS[name].available()]
    if measurable:
        load = "gpu" if "gpu" in measurable else measurable[0]
        _tell(f"{found.name}: every cut under load {load}")
        first, second = (stage.devices[0] for stage in plans["two stages"].stages)
        rows = loaded_sweep(found, LOADS[load], (first, second), options.turn_s, min(options.rounds, 2))
        results["loaded_sweep"] = {"network": found.name, "load": load, "devices": [first, second], "rows": rows}


def _missing(here: Machine) -> list[str]:
    """Return what the paper has and this machine or version has not."""
    missing = []
    first, second = (here.platform.device(name) for name in here.pair)
    if first.backend == second.backend:
        missing.append(
            f"no two kinds of processors: {first.name} and {second.name} are of backend {first.backend}, where the "
            "paper has a GPU and a CPU"
        )
    return missing


def _tell(line: str) -> None:
    CONSOLE.print(line, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
