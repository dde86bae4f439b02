"""Measure how the position of the stack changes the time of kernels, with and without `relay/stack_placement.py`.

    python benchmarks/stack_placement.py

The whole model runs from twelve depths of nested calls, plainly and placed, in turns; then from positions all over a
page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from networks import load
from rich.console import Console
from rich.table import Table

from tvm_pipeline import detect_platform, settle_platform
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline_tvm.relay.executor import Slice
from tvm_pipeline_tvm.relay.stack_placement import PAGE, PLACE, placed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="squeezenet")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--short", action="store_true", help="a small network, few repeats and positions: proves that it works"
    )
    arguments = parser.parse_args()
    repeats, step = (2, 1024) if arguments.short else (arguments.repeats, 128)
    if arguments.short:
        arguments.model = "branching"

    backend, platform = settle_platform(detect_platform())
    compiled = backend.compile(load(arguments.model), platform.devices)
    device, names = platform.devices[0], compiled.graph.operator_names
    stage = compiled.stage(names, device)  # binds the measuring thread to its device
    part = compiled.cut(names, device)
    whole = Slice(compiled.libraries[device.target], part)
    whole.run([noise(port) for port in part.inputs], [port.buffer() for port in part.outputs])
    plain = whole.executor["run"]

    def measure() -> None:
        depths = range(12)
        ways = {"plain": plain, f"placed at {PLACE}": placed(plain)}
        table = Table("call", *map(str, depths), title=f"{arguments.model}, ms a frame by depth of nested calls")
        figures = {way: [[nested(depth, ways[way], 1) for depth in depths] for _ in range(repeats)] for way in ways}
        for way, rows in figures.items():
            table.add_row(way, *(f"{figure * 1e3:.1f}" for figure in np.median(rows, axis=0)))
        Console(width=120).print(table)
        table = Table("position", "aligned (16 mod 32)", "not (0 mod 32)", title="ms a frame by position of the stack")
        for position in range(0, PAGE, step):
            aligned, not_aligned = (nested(0, placed(plain, position + more), repeats) for more in (16, 0))
            table.add_row(str(position), f"{aligned * 1e3:.1f}", f"{not_aligned * 1e3:.1f}")
        Console().print(table)

    in_bound_thread(stage, measure)


def nested(depth: int, run: Callable[[], Any], repeats: int) -> float:
    """Return median seconds of a call from `depth` calls that each take a piece of the stack."""
    if depth:
        return max(map(lambda _: nested(depth - 1, run, repeats), [None]))  # noqa: C417 - `map` nests on the C stack
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return float(np.median(samples))


if __name__ == "__main__":
    main()
