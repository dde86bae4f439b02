"""Compare what tuned kernels compute with what the static rule's do, and slices of them with the unsplit model.

    python benchmarks/kernel_bits.py            # ten networks on AVX2 and AVX-512, ten to twenty minutes
    python benchmarks/kernel_bits.py --short    # a small one on AVX2, for CI

Each network is compiled twice for a target: as it comes, and with another choice than the static rule's for every
convolution that has one, handed over as tuning's records are. The third best by the rule's estimate is taken, so that
every kernel is another one. All tensors of the two are compared bit for bit, and then those of random cuts of the tuned
one with the unsplit one. The exit status is 1 if one differs. Required: none.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from networks import MODELS, load_lively
from rich.console import Console
from slices import exactness

from tests.support.networks import every_tensor
from tests.support.stages import random_frame
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.report import TextTable
from tvm_pipeline_kernels.choices import Choice, Choices, Workload, possible_choices
from tvm_pipeline_kernels.tuning.targets import cores_of
from tvm_pipeline_tvm.host.detection import missing_features
from tvm_pipeline_tvm.relay.build import compile_module
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import load_library

TARGETS = ("llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64-v4")
CHOICE = 2  # by the rule's estimate; that of the rule is 0
CONSOLE = Console(width=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names that networks.py knows, or files")
    parser.add_argument("--cuts", type=int, default=20, help="random cuts of each network, in two to four stages")
    parser.add_argument("--short", action="store_true", help="a small network on AVX2, for CI")
    options = parser.parse_args()
    if options.short:
        options.models, options.cuts = ["branching"], 2
    rows, differ = [], 0
    for target in TARGETS[:1] if options.short else TARGETS:
        missing = missing_features(target)
        if missing:
            CONSOLE.print(f"{target} is left out: this processor has no {', '.join(missing)}", highlight=False)
            continue
        for name in options.models:
            row, found = compared(load_lively(name), target, options.cuts)
            rows.append(row)
            differ += found
            CONSOLE.print("  ", *row, style="dim", highlight=False)
    columns = ("network", "target", "convolutions", "other tiles", "tensors", "differ, tuned")
    CONSOLE.print(TextTable("Tuned kernels", (*columns, "cuts", "tensors", "differ, sliced", "distinct"), tuple(rows)))
    CONSOLE.print(f"{differ} differences")
    raise SystemExit(1 if differ else 0)


def compared(model: Model, target: str, cuts: int) -> tuple[tuple[str, ...], int]:
    """Return a row of the table, and how many tensors differ."""
    with tempfile.TemporaryDirectory() as folder:
        default = compiled(Path(folder, "default"), model, target, {})
        choices = other_choices(default.libraries[target].tuning.workloads.values(), target)
        tuned = compiled(Path(folder, "tuned"), model, target, choices)
    frame = random_frame(default.graph.inputs)
    expected, found = (every_tensor(each, target, frame) for each in (default, tuned))
    differ = sum(not np.array_equal(found.pop(name), tensor) for name, tensor in expected.items()) + len(found)
    sliced = exactness(tuned, Device("cpu0", "host", (0,), target), cuts)
    tuning = tuned.libraries[target].tuning
    cells = (model.name, target, tuning.convolutions, tuning.tuned, len(expected), differ)
    row = (*cells, cuts, sliced["tensors_compared"], sliced["tensors_that_differ"], f"{sliced['distinct_outputs']:.0%}")
    return tuple(map(str, row)), differ + int(sliced["tensors_that_differ"])


def compiled(folder: Path, model: Model, target: str, choices: Choices) -> RelayModel:
    """Return a model compiled into a new folder."""
    compile_into(folder, model, target, choices)
    return RelayModel(model.name, [load_library(folder)], lambda _: None)


def compile_into(folder: Path, model: Model, target: str, choices: Choices, tolerance: float = 0.0) -> None:
    """Write the library of a model into a new folder; with a tolerance it is not measured, as for another machine."""
    folder.mkdir()
    imported = import_model(model)
    compile_module(model.name, *imported, target, folder, choices=choices, tolerance=tolerance, elsewhere=True)


def other_choices(workloads: Iterable[Workload], target: str) -> dict[Workload, Choice]:
    """Return another choice than the static rule's for each convolution that has one."""
    cores = cores_of(target)
    possible = {workload: possible_choices(workload, cores) for workload in workloads}
    return {w: choices[min(CHOICE, len(choices) - 1)] for w, choices in possible.items() if len(choices) > 1}


if __name__ == "__main__":
    main()
