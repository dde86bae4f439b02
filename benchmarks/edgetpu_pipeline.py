"""Int8 pipelines on TFLite's CPU kernels, two cores standing in for two Edge TPUs.

The figure: a pipeline of two stages reaches at least 0.98 of its bound, 1 / (the slowest stage's own seconds in the
same run). Beside it stand one device and two replicas. These are figures of the CPU, and say nothing about an Edge TPU.

    python benchmarks/edgetpu_pipeline.py            # four networks; needs TensorFlow to make them
    python benchmarks/edgetpu_pipeline.py --short
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from int8_models import int8_model
from prediction import row, show
from rich.console import Console

from tvm_pipeline import Device, Platform, Problem, load, planning, profile_model, settle_platform
from tvm_pipeline.runtime.comparison import compare
from tvm_pipeline.workflow.steps import REPEATS

MODELS = ("mobilenet_v2", "efficientnet_lite0", "resnet50", "inception_v3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each candidate in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="one small model, briefly: proves that it works")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.models, arguments.seconds, arguments.rounds = MODELS[:1], 0.1, 1

    console = Console(width=140)
    cores = sorted(os.sched_getaffinity(0))
    kernels = [Device(f"cpu{core}", "edgetpu", (core,), "cpu") for core in cores[:2]]
    backend, platform = settle_platform(Platform("two cores", tuple(kernels)))
    reached = {}
    for name in arguments.models:
        compiled = backend.compile(load(int8_model(name)), platform.devices)
        profile = profile_model(backend, compiled, platform, 4 if arguments.short else REPEATS)
        for warning in profile.warnings:
            console.print(f"{name}: {warning}")
        problem = Problem(compiled.graph, platform, profile)
        plans = [
            planning.plan(replace(problem, stages=2), "ideals").plan,
            planning.plan(problem, "replicas").plan,
            planning.plan(problem, "single").plan,
        ]
        measured = compare(compiled, platform, plans, seconds=arguments.seconds, rounds=arguments.rounds)
        show(console, name, measured)
        reached[name] = round(row(name, measured[0])["of_bound"], 3)
    console.print(f"pipeline of two stages over its bound: {reached}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
