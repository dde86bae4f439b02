"""Run what Relay compiles for aarch64 on an emulated processor, and compare results. It says nothing about speed.

    python benchmarks/emulated.py            # sets the machine up once (2 GB), then some minutes
    python benchmarks/emulated.py --short    # one small network, for CI, which sets nothing up

1. Networks are compiled here and run there, by this project's own sources, for three cases:
   - a target with the triple of aarch64, for which TVM takes its schedules for Arm;
   - what a board finds by itself, a processor without a triple, for which TVM takes those of x86, and so ours;
   - the same under another choice than the static rule's for every convolution, handed over as tuning's records are;
   - the same with a tolerance, so that Winograd's algorithm computes what its rule prefers.
   Networks of int8 have a target with dot products in place of the last.
2. Small networks are compiled, profiled and planned there by the command line, and their bundles are opened.

Required of all: outputs within 1e-4 of the largest value of those that this machine computes, those under other choices
equal to those under the rule's bit for bit, and tensors of random cuts equal to the unsplit model's bit for bit.
Winograd's algorithm adds no more than the tolerance to the error of direct sums against float64. The exit status is 1
if one is not so. `emulated_machine.py` sets the machine up; Relax has `emulated_relax.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
from emulated_machine import Machine, machine
from kernel_bits import compile_into, compiled, other_choices
from networks import load_lively
from peer_engines import apart
from rich.console import Console
from slices import exactness

from tests.support.networks import whole_outputs
from tests.support.stages import random_frame
from tvm_pipeline.backends.bundle import open_bundle
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.model import TOLERANCE, Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.report import TextTable
from tvm_pipeline_kernels.choices import workload_in
from tvm_pipeline_tvm.float64 import worst_error
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relay.build import element_types
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import TUNING, Tuning, load_library
from tvm_pipeline_tvm.relay.reference import in_float64

LIMIT = 1e-4  # of the largest value of an output
BY_ARM = "llvm -mtriple=aarch64-linux-gnu -mattr=+neon"
BY_BOARD = "llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu=cortex-a72"  # `llvm -mcpu=cortex-a72` on such a board
DOT_PRODUCTS = "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76 -mattr=+dotprod"
RULE, OTHER, WINOGRAD = "the rule's", "others", "Winograd's"
FLOAT = ((BY_ARM, RULE), (BY_BOARD, RULE), (BY_BOARD, OTHER), (BY_BOARD, WINOGRAD))
INT8 = ((BY_ARM, RULE), (BY_BOARD, RULE), (DOT_PRODUCTS, RULE))
# Small pictures where the network takes them, since each instruction is emulated.
NETWORKS = (
    *("branching", "splitting", "two_in_two_out", "shapes", "mobile", "int8"),
    *("squeezenet@64", "mobilenet@64", "resnet-18@64", "resnet-50@64", "densenet-121@224", "inception_v3@299"),
    *("light_inception_v1", "light_inception_v2", "light_shufflenet", "centerface"),
    str(Path(__file__).parents[1] / "tests/edgetpu/data/mobilenet_v2_int8.tflite"),
)
COMPILED_THERE = ("mobile", "int8")
CONSOLE = Console(width=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="names that networks.py knows, or files; none is compiled there")
    parser.add_argument("--cuts", type=int, default=3, help="random cuts of each library, in two to four stages")
    parser.add_argument("--short", action="store_true", help="one small network, if the machine is set up, for CI")
    options = parser.parse_args()
    board = machine(install=not options.short)
    if board is None:
        return
    if options.short:
        options.models = ["branching"]
    rows: list[Row] = []
    for compared, names in (
        (compiled_here, options.models or NETWORKS),
        (compiled_there, () if options.models else COMPILED_THERE),
    ):
        for name in names:
            for row in compared(board, load_lively(name), options.cuts):
                rows.append(row)
                CONSOLE.print("  ", *row.cells(), style="dim", highlight=False)
    columns = ("network", "target", "tiles", "outputs, from x86", "from float64", "by Winograd", "from the rule's")
    columns += ("cuts", "tensors", "that differ")
    CONSOLE.print(TextTable("On the emulated processor", columns, tuple(row.cells() for row in rows)))
    wrong = sum(not row.is_right() for row in rows)
    CONSOLE.print(f"{len(rows)} libraries, {sum(row.cuts for row in rows)} cuts, {wrong} libraries with wrong results")
    sys.exit(1 if wrong else 0)


@dataclass(frozen=True)
class Row:
    """What a library gave there.

    Attributes:
        apart: the largest difference of its outputs from those of x86, over the largest value.
        from_rule: outputs that differ in a bit from those under the rule's tiles.
        winograd: kernels by Winograd's algorithm.
        error: of outputs of float32 against float64, over the largest value.
        added: the error, less that under the rule's tiles.
        tensors, differ: of cuts, that were compared with the unsplit model's, and those that differ in a bit.
    """

    network: str
    target: str
    tiles: str
    apart: float
    from_rule: int
    cuts: int
    tensors: int
    differ: int
    winograd: int = 0
    error: float = 0.0
    added: float = 0.0

    def is_right(self) -> bool:
        has_values = self.added <= TOLERANCE if self.tiles == WINOGRAD else not self.from_rule and not self.winograd
        return self.apart <= LIMIT and has_values and not self.differ

    def cells(self) -> tuple[str, ...]:
        bits = "" if self.tiles == RULE else f"{self.from_rule} differ"
        errors = f"{self.apart:.1e}", f"{self.error:.1e}"
        shown = (*errors, self.winograd, bits, self.cuts, self.tensors, self.differ)
        return (self.network, self.target, self.tiles, *map(str, shown))


def compiled_here(board: Machine, model: Model, cuts: int) -> Iterator[Row]:
    """Compile a network here for each case, and yield what it gives there."""
    is_int8 = in_int8(model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        places = {case: folder / str(number) for number, case in enumerate(INT8 if is_int8 else FLOAT)}
        with patch.dict(os.environ, PATH=f"{board.linkers}{os.pathsep}{os.environ['PATH']}"):
            for (target, tiles), place in places.items():
                choices = {}
                if tiles == OTHER:
                    workloads = map(workload_in, tuning_in(places[target, RULE]).workloads.values())
                    choices = other_choices(workloads, target)
                compile_into(place, model, target, choices, TOLERANCE if tiles == WINOGRAD else 0.0)
        expected = outputs_here(model, folder / "x86", is_int8=is_int8)
        frame = random_frame(load_library(folder / "x86").inputs)
        exact = [] if is_int8 else in_float64(*import_model(model), frame)
        _there(board, f"run_libraries({str(folder)!r}, {cuts})", folder, "cortex-a76" if is_int8 else "cortex-a72")
        by_rule: dict[str, list[Array]] = {}
        for (target, tiles), place in places.items():
            row, outputs = read_row(place, model, tiles, expected)
            rule = by_rule.setdefault(target, outputs)
            differ = sum(not np.array_equal(one, other) for one, other in zip(outputs, rule, strict=True))
            error, direct = (0.0 if is_int8 else worst_error(one, exact) for one in (outputs, rule))
            yield replace(row, from_rule=differ, winograd=tuning_in(place).winograd, error=error, added=error - direct)


def compiled_there(board: Machine, model: Model, cuts: int) -> Iterator[Row]:
    """Have the command line there compile a network, and yield what its bundle gives."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model.json").write_bytes(model.content)
        (folder / "model.params").write_bytes(model.params)
        bundle = str(folder / "model.tar")
        command = ["-m", "tvm_pipeline.cli", "compile", str(folder / "model.json"), "-o", bundle, "--verify", "0"]
        board.python(*command, processor="cortex-a72", cache=folder / "cache")
        _there(board, f"run_bundle({bundle!r}, {cuts})", folder, "cortex-a72")
        expected = outputs_here(model, folder / "x86", is_int8=in_int8(model))
        yield read_row(folder, model, RULE, expected)[0]


def tuning_in(place: Path) -> Tuning:
    return msgspec.json.decode((place / TUNING).read_bytes(), type=Tuning)


def in_int8(model: Model) -> bool:
    return bool({"int8", "uint8"} & element_types(import_model(model)[0]))


def outputs_here(model: Model, folder: Path, *, is_int8: bool) -> list[Array]:
    """Return what this machine computes; in int8 by code for any x86: with SSE 4.1 TVM scales in float32."""
    target = "llvm" if is_int8 else host_target()
    here = compiled(folder, model, target, {})
    return whole_outputs(here, target, random_frame(here.graph.inputs))


def read_row(folder: Path, model: Model, tiles: str, expected: list[Array]) -> tuple[Row, list[Array]]:
    """Return what `_write` wrote: the figures and the outputs."""
    found = json.loads((folder / "found.json").read_text())
    with np.load(folder / "outputs.npz") as saved:
        outputs = [saved[key] for key in saved.files]
    return Row(network=model.name, tiles=tiles, apart=apart(outputs, expected), from_rule=0, **found), outputs


# There


def _there(board: Machine, call: str, folder: Path, processor: str) -> None:
    """Call a function below on the emulated machine."""
    board.python("-c", f"import emulated; emulated.{call}", processor=processor, cache=folder / "cache")


def run_libraries(folder: str, cuts: int) -> None:
    """Run each library of a folder that is for this machine."""
    for place in sorted(Path(folder).glob("[0-9]*")):
        _write(place, RelayModel("model", [load_library(place)], lambda _: None), cuts)


def run_bundle(path: str, cuts: int) -> None:
    """Run the compiled model of a bundle."""
    with open_bundle(Path(path)) as bundle:
        assert isinstance(bundle.compiled, RelayModel)
        _write(Path(path).parent, bundle.compiled, cuts)


def _write(folder: Path, model: RelayModel, cuts: int) -> None:
    (target,) = model.libraries
    row = exactness(model, Device("core", "host", (0,), target), cuts)
    found = {"target": target, "cuts": cuts, "tensors": row["tensors_compared"], "differ": row["tensors_that_differ"]}
    (folder / "found.json").write_text(json.dumps(found))
    np.savez(folder / "outputs.npz", *whole_outputs(model, target, random_frame(model.graph.inputs)))


if __name__ == "__main__":
    main()
