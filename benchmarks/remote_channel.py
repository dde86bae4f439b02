"""Measure tensors to a board and back over our connection, against TVM's own RPC, on the loopback of this machine.

Both servers run beside one another, and a tensor goes there and back over one and over the other, in turns: `echo` of
our board, and `tvm.nd.array` on TVM's remote device with `numpy()` of it. The machine's other work slows both
sides, and not alike, so there are two ratios: of medians, and of the least times. CPU is that of the client and of the
processes of a server together. Required: at least 50 times from 0.1 to 8 MB, and the same bytes.

    python benchmarks/remote_channel.py           # about a minute
    python benchmarks/remote_channel.py --short   # for CI
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import tvm
from rich.console import Console
from rich.table import Table
from tvm import rpc

from tvm_pipeline_hosts.remote.address import Address
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.serving import BoardServer

SIZES = 100_000, 600_000, 2_000_000, 8_000_000
REQUIRED = 50.0
Way = Callable[[np.ndarray], np.ndarray]


def family(pid: int) -> Iterable[int]:
    """Yield a process and all that it has started, also through others."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU of a process's threads; finer than the ticks of its `stat`."""
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measured(way: Way, array: np.ndarray, pids: list[int], repeats: int) -> tuple[list[float], float, bool]:
    """Return the seconds of tensors there and back, the seconds of CPU of each, and whether the bytes agree."""
    before, seconds, equal = sum(map(cpu_s, pids)), [], True
    for _ in range(repeats):
        began = time.perf_counter()
        back = way(array)
        seconds.append(time.perf_counter() - began)
        equal = equal and np.array_equal(back, array)
    return seconds, (sum(map(cpu_s, pids)) - before) / repeats, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--short", action="store_true", help="small tensors, one round: proves that it works")
    arguments = parser.parse_args()
    rounds = 1 if arguments.short else arguments.rounds
    with ExitStack() as stack:
        stock = rpc.Server("127.0.0.1", 9490, 9590, silent=True)
        stack.callback(stock.terminate)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(closing(BoardServer(Address("127.0.0.1", 0), folder)))
        threading.Thread(target=server.serve, daemon=True).start()
        remote = rpc.connect("127.0.0.1", stock.port)
        device, here = remote.cpu(), os.getpid()
        with Board.connect(str(server.address)) as board:
            theirs = list(family(stock.proc._proc.pid))
            ours = [running.process.pid for running in server._sessions.values()]
            ways: list[tuple[Way, list[int]]] = [
                (lambda array: board.call("echo", {}, [array])[1][0], [here, *ours]),
                (lambda array, device=device: tvm.nd.array(array, device).numpy(), [here, *theirs]),
            ]
            failed = report(ways, SIZES[:2] if arguments.short else SIZES, rounds)
    sys.exit(failed)


def report(ways: list[tuple[Way, list[int]]], sizes: Iterable[int], rounds: int) -> int:
    """Print a row for each size; return 1 where bytes differ."""
    table = Table(
        "MB", "ours, ms", "TVM, ms", "times", "least: ours", "TVM", "times", "ours, ms CPU", "TVM, ms CPU", "times"
    )
    worst, equal = float("inf"), True
    for size in sizes:
        array = np.random.default_rng(0).integers(0, 255, size).astype("uint8")
        found: list[list[tuple[list[float], float, bool]]] = [[], []]
        for way, pids in ways:
            measured(way, array, pids, 1)
        for _ in range(rounds):
            for figures, (way, pids), repeats in zip(found, ways, (10, 2), strict=True):
                figures.append(measured(way, array, pids, repeats))
        equal = equal and all(one[2] for figures in found for one in figures)
        own, theirs = ([s for one in figures for s in one[0]] for figures in found)
        own_cpu_s, tvm_cpu_s = (statistics.median(one[1] for one in figures) for figures in found)
        pairs = [(of(own), of(theirs)) for of in (statistics.median, min)]
        worst = min(worst, pairs[1][1] / pairs[1][0])
        times = [figure for own_s, tvm_s in pairs for figure in (own_s, tvm_s, tvm_s / own_s / 1e3)]
        row = (*times, own_cpu_s, tvm_cpu_s, tvm_cpu_s / own_cpu_s / 1e3)
        table.add_row(f"{size / 1e6:g}", *(f"{figure * 1e3:.3g}" for figure in row))
    Console().print(table)
    kept = "" if worst >= REQUIRED else ": MISSED"
    same = "agree" if equal else "DIFFER"
    print(f"the lowest ratio of least times is {worst:.0f}, required {REQUIRED:g}{kept}; the bytes {same}")
    return 0 if equal else 1


if __name__ == "__main__":
    main()
