"""Which pairs of targets line up: one operator graph over both, or a refusal with its reason.

    python benchmarks/alignment.py             # ten networks for eleven targets, about a quarter of an hour on one core
    python benchmarks/alignment.py --short     # a small network for three targets, for CI

Each network goes through `relay.build` once for each target, and every pair of them through `tvm.alignment.align`. Only
what TVM fuses matters here, so that no processor and no device of a target need be at hand, and no code is made: a
stand-in that returns an empty module takes the place of the code generators `target.build.*` (CUDA's is not even in the
TVM of PyPI). Every kernel is scheduled and lowered, so a network that a target cannot compile for want of a schedule is
found. Kernels are kept in --folder, and a run that was interrupted goes on.

A cell of a table is the number of operators that both targets share: the places where the network can be cut between
them. On the diagonal it is the number of kernels of one target.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import msgspec
from networks import MODELS, load
from rich.console import Console

from tvm_pipeline import frontends
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.files import cache_folder, write_bytes
from tvm_pipeline.report import TextTable
from tvm_pipeline_tvm.alignment import align
from tvm_pipeline_tvm.devices.targets import has_own_memory
from tvm_pipeline_tvm.kernels import Entry, Kernel
from tvm_pipeline_tvm.relay.build import FORMAT
from tvm_pipeline_tvm.relay.fold import fast_build
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.kernel_walkers import kernels_of_library
from tvm_pipeline_tvm.relay.library import Library
from tvm_pipeline_tvm.tvm_errors import reason

import tvm  # isort: skip

ARM = "llvm -mtriple=aarch64-linux-gnu"
TARGETS = {
    "x86-v2": "llvm -mcpu=x86-64-v2",
    "x86-v3": "llvm -mcpu=x86-64-v3",
    "x86-v4": "llvm -mcpu=x86-64-v4",
    "znver4": "llvm -mcpu=znver4",
    "a72": f"{ARM} -mcpu=cortex-a72",
    "a78+dotprod": f"{ARM} -mcpu=cortex-a78 -mattr=+dotprod",
    "cuda": "cuda -arch=sm_72",
    "opencl": "opencl",
    "mali": "opencl -device=mali",
    "bifrost": "opencl -device=bifrost",
    "intel": "opencl -device=intel_graphics -thread_warp_size=16",
}
HOST = "llvm -mcpu=x86-64-v2"  # of the code that launches a device's kernels
SHORT = {"resnet-18": (1, 3, 64, 64)}  # whose shortcuts targets fuse differently
SHORT_TARGETS = ("x86-v3", "a72", "mali")


class Compiled(msgspec.Struct):
    """The kernels of a network for one target, or why there are none."""

    inputs: tuple[Tensor, ...] = ()
    kernels: list[Kernel] = []
    heads: list[Entry] = []
    failed: str = ""


@contextmanager
def no_code() -> Iterator[None]:
    """Have TVM lower kernels and make no code of them until the block ends."""
    kinds = ("llvm", "cuda", "opencl")
    makers = {kind: tvm.get_global_func(f"target.build.{kind}", allow_missing=True) for kind in kinds}
    empty = tvm.get_global_func("runtime.CSourceModuleCreate")

    def make(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
        if target.kind.name == "llvm" and not target.mcpu:  # Relay's own constant folding, which runs the code
            return makers["llvm"](mod, target)
        return empty("", "c", [], [])

    for kind in kinds:
        tvm.register_func(f"target.build.{kind}", make, override=True)
    try:
        yield
    finally:
        for kind, maker in makers.items():
            if maker is None:
                tvm._ffi.registry.remove_global_func(f"target.build.{kind}")
            else:
                tvm.register_func(f"target.build.{kind}", maker, override=True)


def compile_(model: Model, target: str) -> Compiled:
    mod, params = import_model(model)
    try:
        with no_code():
            factory = fast_build(mod, tvm.target.Target(target, HOST) if has_own_memory(target) else target, params)
    except Exception as error:  # TVM's passes raise whatever their author had at hand
        return Compiled(failed=reason(error))
    inputs = tuple(
        Tensor(p.name_hint, tuple(int(extent) for extent in p.checked_type.shape), p.checked_type.dtype)
        for p in mod["main"].params
        if p.name_hint not in params
    )
    functions = {
        str(name): next(iter(info.relay_primfuncs.values()))
        for name, info in factory.function_metadata.items()
        if len(info.relay_primfuncs)
    }
    graph_json = factory.get_graph_json()
    kernels = kernels_of_library(graph_json, functions, [tensor.name for tensor in inputs])
    heads = Library(target, inputs, json.loads(graph_json), kernels, None, {}).heads
    return Compiled(inputs, kernels, heads)


def kept(model: Model, target: str, folder: Path, console: Console) -> Compiled:
    """Return the kernels, from the folder if they are there."""
    key = hashlib.sha256("|".join((model.digest, target, tvm.__version__, str(FORMAT))).encode()).hexdigest()[:32]
    path = folder / f"{key}.json"
    if not path.exists():
        begin_s = time.perf_counter()
        found = compile_(model, target)
        write_bytes(path, msgspec.json.encode(found))
        console.print(f"{model.name} for {target}: {time.perf_counter() - begin_s:.1f} s", style="dim")
    return msgspec.json.decode(path.read_bytes(), type=Compiled)


def shared(name: str, one: Compiled, other: Compiled) -> int | str:
    """Return how many operators both share, or why they do not line up."""
    if one.failed or other.failed:
        return f"does not build: {one.failed or other.failed}"
    libraries = [one] if one is other else [one, other]
    try:
        kernels, heads = [library.kernels for library in libraries], [library.heads for library in libraries]
        return len(align(name, one.inputs, kernels, heads)[0])
    except ModelError as error:
        return str(error).removeprefix(f"{name}: ").removesuffix("; give its devices one target")


def show(console: Console, name: str, found: dict[tuple[str, str], int | str], labels: list[str]) -> list[str]:
    """Print the table of one network; return the pairs that are refused, with the reason."""
    refused: dict[str, list[str]] = {}
    for (one, other), value in found.items():
        if isinstance(value, str):
            refused.setdefault(value, []).append(f"{one}/{other}" if one != other else one)
    letters = {why: chr(ord("a") + index) for index, why in enumerate(refused)}
    cells = []
    for row, one in enumerate(labels):
        values = [found[one, other] for other in labels[row:]]
        shown = [letters[value] if isinstance(value, str) else str(value) for value in values]
        cells.append((one, *[""] * row, *shown))
    console.print(TextTable(f"{name}: shared operators", ("", *labels), tuple(cells)))
    for why, letter in letters.items():
        console.print(f"  {letter}: {why}")
    return [f"{', '.join(pairs)}: {why}" for why, pairs in refused.items()]


def span(counts: list[int]) -> str:
    return f"{min(counts)}-{max(counts)}" if counts else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--folder", type=Path, default=cache_folder() / "alignment", help="where kernels are kept")
    parser.add_argument("--short", action="store_true", help="a small network for three targets")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.models, arguments.targets = list(SHORT), list(SHORT_TARGETS)
    arguments.folder.mkdir(parents=True, exist_ok=True)

    console = Console(width=140)
    summary, rows = [], []
    for name in arguments.models:
        model = frontends.load(name, {"data": SHORT[name]}) if arguments.short else load(name)
        compiled = {label: kept(model, TARGETS[label], arguments.folder, console) for label in arguments.targets}
        found = {
            (one, other): shared(name, compiled[one], compiled[other])
            for one, other in combinations_with_replacement(arguments.targets, 2)
        }
        refused = show(console, name, found, arguments.targets)
        pairs = {pair: value for pair, value in found.items() if pair[0] != pair[1]}
        counts = [value for value in pairs.values() if isinstance(value, int)]
        alone = [found[label, label] for label in arguments.targets if isinstance(found[label, label], int)]
        summary.append((name, span(alone), span(counts), f"{len(counts)} of {len(pairs)}"))
        rows.append({"model": name, "shared": {"/".join(pair): value for pair, value in found.items()}, "why": refused})
    columns = ("network", "kernels of a target", "shared operators of a pair", "pairs that line up")
    console.print(TextTable("Pairs of targets", columns, tuple(summary)))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
