"""Measure what stages in processes of their own hold in memory, and how long one that hangs is waited for.

A model is saved and loaded as a bundle is, and runs as one and as four isolated stages of about equal weights. Memory
is counted by PSS, in which a page that n processes share counts 1/n in each: the sum over the parent and its children
is what the machine gives them. Required: the file of weights in memory once, however many stages there are. The peak
while a new process loads the model shows whether it is ever held twice. A process that is stopped while it loads, and
one that is stopped before its stage is closed, stand for those that hang.

    python benchmarks/isolated_memory.py                        # resnet-50, about a minute once it is compiled
    python benchmarks/isolated_memory.py --short                # three products, for CI
    python benchmarks/isolated_memory.py --model net.onnx --engine   # by onnxruntime, or TFLite's kernels
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from onnx import helper
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import onnx_bytes
from tvm_pipeline import Platform, detect_platform, load, settle_platform
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.backends.registry import compose, engine_for
from tvm_pipeline.backends.stage_process import GRACE_S
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import StageError
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline_tvm.installed_ir import installed_ir

STAGES = 4
LIMIT_S = 3.0  # for a process that is stopped
WEIGHTS = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*/weights\.bin$")
MIB = 1 << 20


def pss_bytes(process: int) -> tuple[int, int, int]:
    """Return the PSS of a process, and of the files of weights that it maps the PSS and the resident bytes."""
    total = weights = resident = 0
    inside = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = bool(WEIGHTS.match(line))
        elif line.startswith("Pss:"):
            size = int(line.split()[1]) << 10
            total += size
            weights += size if inside else 0
        elif line.startswith("Rss:") and inside:
            resident += int(line.split()[1]) << 10
    return total, weights, resident


def children() -> list[int]:
    files = Path("/proc/self/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def parts(graph: OperatorGraph, count: int) -> list[list[str]]:
    """Return the operators in `count` parts of about equal weights."""
    done = np.cumsum([operator.param_bytes for operator in graph.operators])
    ends = [int(np.searchsorted(done, done[-1] * part / count)) + 1 for part in range(1, count)]
    names = graph.operator_names
    return [names[begin:end] for begin, end in zip([0, *ends], [*ends, len(names)], strict=True)]


def row(compiled: CompiledModel, platform: Platform, count: int) -> tuple[list[str], int, int]:
    """Run the model in `count` isolated stages; return a row of the table, and PSS and resident bytes of the weights.

    PSS is lower where processes that are not of this benchmark map the same file.
    """
    device = platform.devices[0]
    with isolated(compiled, platform, ()) as apart, ExitStack() as opened:
        runners = [opened.enter_context(closing(apart.stage(names, device))) for names in parts(compiled.graph, count)]
        for runner in runners:  # so that all weights are read
            inputs, outputs = [noise(port) for port in runner.inputs], [port.buffer() for port in runner.outputs]
            in_bound_thread(runner, lambda run=runner.run, i=inputs, o=outputs: run(i, o))
        own, *others = [pss_bytes(process) for process in (os.getpid(), *children())]
    whole, weights, resident = map(sum, zip(own, *others, strict=True))
    sizes = (own[0], sum(total for total, *_ in others), whole, weights)
    return [str(count), *(f"{size / MIB:.0f}" for size in sizes)], weights, resident


def loading_bytes(backends: str, folder: Path) -> tuple[int, int]:
    """Return by how much a new process grows while it loads the model: at its peak, and in the end."""
    command = [sys.executable, __file__, "--load", str(folder), "--backends", backends]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return msgspec.json.decode(said.splitlines()[-1], type=tuple[int, int])


def measure_loading(backends: str, folder: Path) -> None:
    backend = compose(backends.split("+"))
    status = Path("/proc/self/status")

    def kib(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+)", status.read_text())[1]) << 10  # type: ignore[index]

    if backends == "host":
        import_module(f"tvm_pipeline_tvm.{installed_ir()}.compiled")  # modules are no part of a model
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    with closing(backend.load(folder, [])):
        print(msgspec.json.encode((kib("VmHWM") - before, kib("VmRSS") - before)).decode())


def stopped_seconds(compiled: CompiledModel, platform: Platform, device: Device) -> tuple[float, float]:
    """Return the seconds until a process is given up that stops while it loads, and one that stops while idle."""
    names = compiled.graph.operator_names
    with isolated(compiled, platform, (), making_s=LIMIT_S) as apart:
        began = time.monotonic()
        runner = apart.stage(names, device)
        os.kill(children()[0], signal.SIGSTOP)
        try:
            _ = runner.inputs
            sys.exit("a process that was stopped has made its stage")
        except StageError as error:
            print(error)
        loading_s = time.monotonic() - began
        runner.close()
    with isolated(compiled, platform, ()) as apart, closing(apart.stage(names, device)) as runner:
        _ = runner.inputs
        os.kill(children()[0], signal.SIGSTOP)
        began = time.monotonic()
        runner.close()
        return loading_s, time.monotonic() - began


def small_model() -> Model:
    """Return a model of three products, each of which has a MiB of weights."""
    names = "x", "a", "b", "y"
    nodes = [helper.make_node("MatMul", [one, f"{one}w"], [other]) for one, other in pairwise(names)]
    weights = {f"{name}w": np.eye(512, dtype=np.float32) for name in names[:-1]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "products.onnx"
        path.write_bytes(onnx_bytes(nodes, weights, shape=(1, 512)))
        return load(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet-50")
    parser.add_argument("--engine", action="store_true", help="run the model by the engine of its format")
    parser.add_argument("--short", action="store_true", help="a small model, two stages: proves that it works")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backends", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        measure_loading(arguments.backends, arguments.load)
        return
    model = small_model() if arguments.short else load(arguments.model)
    platform = detect_platform(None if arguments.engine else model)
    if arguments.engine:
        cores = [device for device in platform.devices if device.backend == "host"]
        platform = Platform("the engine's cores", engine_for(model, cores)[1])
    backend, platform = settle_platform(platform)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        with closing(backend.compile(model, platform.devices)) as made:
            made.save(Path(folder), (), platform)
            stored = sum(operator.param_bytes for operator in made.graph.operators)
        compiled = opened.enter_context(closing(backend.load(Path(folder), platform.devices)))
        del made
        table = Table(
            *("isolated stages", "parent", "processes", "sum", "of these the file of weights"),
            title=f"{model.name}, weights of {stored / MIB:.0f} MiB: PSS in MiB",
        )
        weights, residents = [], []
        for count in (2,) if arguments.short else (1, STAGES):
            cells, mapped, resident = row(compiled, platform, count)
            table.add_row(*cells)
            weights.append(mapped)
            residents.append(resident)
        peak, after = loading_bytes(backend.name, Path(folder))
        loading_s, closing_s = stopped_seconds(compiled, platform, platform.devices[0])
    table.caption = (
        f"a process that loads it grows by {peak / MIB:.0f} MiB at its peak and {after / MIB:.0f} MiB in the end; one "
        f"that stops while it loads is given up {loading_s:.1f} s after its start (limit {LIMIT_S:g} s), one that is "
        f"idle {closing_s:.1f} s after its stage is closed (limit {GRACE_S:g} s)"
    )
    Console(width=130).print(table)
    if max(weights) > 1.05 * stored + MIB:
        sys.exit("the file of weights is in memory more than once")
    if not arguments.engine and min(residents) < stored / 2:
        sys.exit("the weights are not those of the file: each process has a copy")


if __name__ == "__main__":
    main()
