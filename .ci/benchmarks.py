"""Run benchmarks in their short form, which shows that they work; the figures mean nothing.

    python .ci/benchmarks.py NAME ...

Three benchmarks run at a time, since many wait for hosts and clocks, in the order of the names. Each runs in a fork of
this process. This process has imported what most benchmarks need, which takes 3 seconds. The exit status is 1 if a
benchmark fails.
"""

import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
LANES = 3
# None of these starts a thread when it is imported, except those of OpenBLAS, which knows forks.
SHARED = (
    *("numba", "numpy", "onnx", "ortools.sat.python.cp_model", "rich.console", "tvm.relax", "tvm.relay.testing"),
    *("tvm_pipeline.runtime", "tvm_pipeline.workflow.steps", "tvm_pipeline_video"),
)


def forked(names: Sequence[str]) -> str:
    """Fork this process for each benchmark. A fork returns the name of its benchmark; this process exits at the end."""
    waiting, running, failed = list(names), dict[int, tuple[str, IO[bytes], float]](), 0
    while waiting or running:
        while waiting and len(running) < LANES:
            name, log = waiting.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the fork has ended
            if not (process := os.fork()):
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                return name
            running[process] = name, log, time.monotonic()
        process, status, used = os.wait4(-1, 0)
        name, log, began = running.pop(process)
        log.seek(0)
        code = os.waitstatus_to_exitcode(status)
        took = f"{time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.1f} of CPU, status {code}"
        sys.stdout.write(f"{log.read().decode(errors='replace')}benchmarks/{name}.py --short: {took}\n")
        sys.stdout.flush()
        failed += code != 0
    sys.exit(min(failed, 1))


def run(file: Path) -> None:
    """Run a file in this process as if Python had been started with it."""
    sys.argv, sys.path[0] = [str(file), "--short"], str(file.parent)
    # By the second name, multiprocessing finds what a child has pickled.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main = ModuleType("__main__")
    main.__file__ = str(file)
    exec(compile(file.read_bytes(), file, "exec"), main.__dict__)


if __name__ == "__main__":
    for module in SHARED:
        with suppress(ModuleNotFoundError):  # an environment has Relax or Relay
            importlib.import_module(module)
    gc.freeze()  # no fork looks for garbage in what all of them share
    run(FOLDER / f"{forked(sys.argv[1:])}.py")
