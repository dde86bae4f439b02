"""Plant faults of one line each into copies of the product, and see which of them the tests find.

    python tests/planted_faults.py [--all] [NUMBER ...]     (the quick tests; `--all` runs the thorough ones, too)

Each copy runs the tests until the first failure, beginning with those of the room of the fault.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800.0  # for a room, and for all: a fault that makes a test wait for ever is found, too


class Fault(NamedTuple):
    """One line that is replaced: the first occurrence of `right` in a file becomes `wrong`."""

    what: str
    file: str
    right: str
    wrong: str


FAULTS = (
    # The judge
    Fault(
        "latency is the slowest stage",
        "tvm_pipeline/cost/evaluate.py",
        "latency_s=sum(slowest),",
        "latency_s=max(slowest),",
    ),
    Fault(
        "each replica sends every frame",
        "tvm_pipeline/cost/stage_costs.py",
        ".seconds(part.received_bytes) * cost.share for",
        ".seconds(part.received_bytes) for",
    ),
    Fault(
        "a latency limit is lax",
        "tvm_pipeline/cost/evaluate.py",
        "latency_s > most_s * (1 + 1e-9)",
        "latency_s > most_s * 1.5",
    ),
    Fault(
        "each replica costs full energy",
        "tvm_pipeline/cost/evaluate.py",
        "total += joules * cost.share",
        "total += joules",
    ),
    Fault(
        "a bus counts the last transfer",
        "tvm_pipeline/cost/evaluate.py",
        "needs[link.bus] += link",
        "needs[link.bus] = link",
    ),
    # The planner
    Fault(
        "memory limits are ignored", "tvm_pipeline/planning/search/loops.py", "param_bytes > goal.capacity[d] or ", ""
    ),
    Fault(
        "slow-down is ignored for shares",
        "tvm_pipeline/planning/search/loops.py",
        "idle_rate += goal.slowdown[d] / max(taken, 1e-12)",
        "idle_rate += 1.0 / max(taken, 1e-12)",
    ),
    Fault(
        "cuts are compared wrongly",
        "tvm_pipeline/planning/search/loops.py",
        "is_inside(cuts.zone, cuts.sets, i, j)",
        "is_inside(cuts.zone, cuts.sets, j, i)",
    ),
    Fault(
        "devices that share cores work together",
        "tvm_pipeline/planning/sat/placement.py",
        "model.add_bool_or(~self.used[d], ~self.used[e])",
        "pass",
    ),
    # The slicer
    Fault(
        "a copied output dies early",
        "backends/tvm_pipeline_tvm/slice_plan.py",
        "last.update(dict.fromkeys(shared.written(entry), len(running)))",
        "pass",
    ),
    Fault(
        "an output that is read inside is lost",
        "backends/tvm_pipeline_tvm/slice_plan.py",
        "if tensor.name in heads or not inside.issuperset",
        "if not inside.issuperset",
    ),
    Fault(
        "an input counts as computed here",
        "backends/tvm_pipeline_tvm/slice_plan.py",
        "return kernel >= 0",
        "return True",
    ),
    # The runtime
    Fault(
        "the first replica to end ends the stage",
        "tvm_pipeline/runtime/worker.py",
        "last = self._left == 0",
        "last = True",
    ),
    Fault(
        "the first failure wins, not the earliest frame",
        "tvm_pipeline/runtime/worker.py",
        "if self.failure is None or failure.frame < self.failure.frame:",
        "if self.failure is None:",
    ),
    Fault(
        "host work takes frames out of order",
        "tvm_pipeline/runtime/worker.py",
        "self._ordered = bool(before or after or state)",
        "self._ordered = False",
    ),
    Fault(
        "layouts are not converted",
        "tvm_pipeline/runtime/slots.py",
        "if stands.layout == port.layout and (not port.layout or stands.shape == port.shape):",
        "if stands.dtype == port.dtype:",
    ),
    # The front ends
    Fault(
        "initializers count as inputs",
        "tvm_pipeline/frontends/onnx.py",
        "declared = [value for value in proto.graph.input if value.name not in constants]",
        "declared = list(proto.graph.input)",
    ),
    Fault(
        "a given shape is not written into the file",
        "tvm_pipeline/frontends/onnx.py",
        "extent.dim_value = known",
        "pass",
    ),
    Fault(
        "open shapes of TFLite pass",
        "tvm_pipeline/frontends/tflite.py",
        " or any(extent < 0 for extent in signature[1:])",
        "",
    ),
    Fault(
        "a TFLite file that was cut short passes",
        "tvm_pipeline/frontends/tflite.py",
        "if buffer.DataLength() and buffer.DataAsNumpy().size != buffer.DataLength():",
        "if False:",
    ),
)


def plant(fault: Fault, folder: Path) -> None:
    """Copy what git tracks into a folder, with the fault in it."""
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={folder}/"], cwd=ROOT, check=True)
    file = folder / fault.file
    text = file.read_text()
    if fault.right not in text:
        sys.exit(f"{fault.file} has no {fault.right!r} any more; mend tests/planted_faults.py")
    file.write_text(text.replace(fault.right, fault.wrong, 1))


def first_failure(fault: Fault, folder: Path, selected: list[str]) -> str:
    """Return the test that fails first in a copy with a fault; an empty string if none does."""
    # The copy comes before the installed product.
    paths = map(str, (folder, folder / "backends", folder / "plugins"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NUMBA_DISABLE_JIT": "1"}  # as `make test`
    for tests in ([f"tests/{Path(fault.file).parts[1].removeprefix('tvm_pipeline_')}"], []):  # the room, then all
        command = [sys.executable, "-m", "pytest", "-x", "--verbose", "--numprocesses", "3", *selected, *tests]
        run = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit = threading.Timer(LIMIT_S, os.killpg, (run.pid, signal.SIGKILL))
        limit.start()
        output, failed = [], None
        for line in run.stdout or ():
            output.append(line)
            if failed := re.search(r"(?:FAILED|ERROR) (?:\[ *\d+%\] )?(tests/\S+)", line):
                os.killpg(run.pid, signal.SIGKILL)  # other tests may wait for ever
                break
        limit.cancel()
        status = run.wait()
        if failed:
            return failed[1]
        if status == -signal.SIGKILL:
            return "a test hangs"
        if status:
            sys.exit(f"the tests did not run:\n{''.join(output)}")
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of faults, from 1")
    parser.add_argument("--all", action="store_true", help="run the thorough tests, too")
    options = parser.parse_args()
    selected = [] if options.all else ["-m", "not thorough", "--hypothesis-profile", "quick"]
    numbers = options.numbers or range(1, len(FAULTS) + 1)
    found = 0
    for number in numbers:
        fault = FAULTS[number - 1]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="planted-fault-") as folder:
            plant(fault, Path(folder))
            failure = first_failure(fault, Path(folder), selected)
        found += bool(failure)
        told = failure or "not found"
        sys.stdout.write(f"{number:2} {fault.what}: {told} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    sys.stdout.write(f"{found} of {len(numbers)} faults found by {'all' if options.all else 'the quick'} tests\n")


if __name__ == "__main__":
    main()
