"""Networks of int8, compiled by Relax, have the bits of x86 on an aarch64 processor that QEMU emulates.

    python benchmarks/emulated_int8.py                       # sets the machine up once (2 GB), then some minutes
    python benchmarks/emulated_int8.py --models FILE ..      # other `.tflite` or ONNX files
    python benchmarks/emulated_int8.py --short               # small layers alone, if the machine is set up

It runs in the environment of Relax. Each network is compiled for this machine, for a Cortex-A72, which multiplies
words, and for a Cortex-A76, which has dot products of bytes. A frame of noise goes through it operator by operator,
here and there, and all tensors are compared. Required: tensors of integers are equal bit for bit, those of float32
within 1e-5 of their largest value. The exit status is 1 if one is not, and 2 where the machine cannot be set up.
Nothing here says anything about speed. `emulated_machine.py` sets the machine up.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from emulated_machine import Machine, machine
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.stages import run_stages
from tvm_pipeline import frontends
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relax.build import load_library
from tvm_pipeline_tvm.relax.compiled import RelaxModel

PROCESSORS = ("cortex-a72", "cortex-a76")
NETWORKS = (str(Path(__file__).parents[1] / "tests/edgetpu/data/mobilenet_v2_int8.tflite"),)
LIMIT = 1e-5  # of the largest value of a tensor of float32
PLACES, FRAME, TENSORS = ("x86", "aarch64"), "frame.npz", "tensors.npz"
CONSOLE = Console(width=150, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=NETWORKS, help="`.tflite` or ONNX files")
    parser.add_argument("--short", action="store_true", help="small layers alone, if the machine is set up")
    options = parser.parse_args()
    board = machine(install=not options.short, extras=("tvm",))
    if board is None:
        sys.exit(0 if options.short else 2)
    os.environ["PATH"] = f"{board.linkers}{os.pathsep}{os.environ['PATH']}"
    models = [*small(), *(() if options.short else map(frontends.load, options.models))]
    wrong = sum(compared(board, models, processor) for processor in PROCESSORS)
    CONSOLE.print(
        f"emulated by QEMU: {len(models)} networks on {len(PROCESSORS)} processors, {wrong} with wrong results"
    )
    sys.exit(1 if wrong else 0)


def small() -> Iterator[Model]:
    """Yield networks of a few layers with every option of a convolution."""
    from tests.relax.test_integer_layers import nets

    for dtype in ("int8", "uint8"):
        for number, net in enumerate(nets(dtype)):
            yield replace(net.model(), name=f"{dtype} {number}")


def compared(board: Machine, models: Sequence[Model], processor: str) -> int:
    """Run networks here and there, print what differs, and return how many are wrong."""
    targets = (host_target(), f"llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu={processor}")
    with tempfile.TemporaryDirectory() as temporary:
        compiled = {}
        for number, model in enumerate(models):
            folder = Path(temporary, str(number))
            compiled[folder] = RelaxModel.compile(model, targets, lambda _: None, elsewhere={targets[1]: "the board"})
            for place, library in zip(PLACES, compiled[folder].libraries.values(), strict=True):
                (folder / place).mkdir(parents=True)
                library.save(folder / place)
            np.savez(folder / FRAME, **{tensor.name: noise(tensor) for tensor in compiled[folder].graph.inputs})
        call = f"import emulated_int8; emulated_int8.run_there({temporary!r}, {targets[1]!r})"
        board.python("-c", call, processor=processor, cache=Path(temporary, "cache"))
        wrong = 0
        for model, (folder, here) in zip(models, compiled.items(), strict=True):
            with np.load(folder / TENSORS) as found:
                is_right, line = told(tensors(here, targets[0], folder), dict(found))
            kernels = sum("int8" in rule for rule in here.libraries[targets[1]].rules.values())
            CONSOLE.print(f"emulated by QEMU: {model.name} on {processor}: {kernels} kernels of int8; {line}")
            wrong += not is_right
    return wrong


def told(expected: Mapping[str, Array], found: Mapping[str, Array]) -> tuple[bool, str]:
    """Return whether tensors are as required, and a line about them."""
    if found.keys() != expected.keys():
        raise SystemExit(f"other tensors came out: {sorted(found.keys() ^ expected.keys())}")
    integers = [name for name, array in expected.items() if array.dtype.kind in "iu"]
    differ = [name for name in integers if not np.array_equal(found[name], expected[name])]
    error = max((apart(found[name], expected[name]) for name in expected.keys() - set(integers)), default=0.0)
    line = f"{len(integers)} tensors of integers, {len(differ)} differ{': ' if differ else ''}{', '.join(differ[:3])}; "
    return not differ and error <= LIMIT, f"{line}{len(expected) - len(integers)} of float32, off by {error:.0e}"


def noise(tensor: Tensor) -> Array:
    """Return numbers from all over the range of a type."""
    draw, dtype = np.random.default_rng(0), np.dtype(tensor.dtype)
    if dtype.kind not in "iu":
        return draw.standard_normal(tensor.shape).astype(dtype)
    return draw.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, tensor.shape, dtype, endpoint=True)


def apart(one: Array, other: Array) -> float:
    """Return how far numbers are off at most, over the largest."""
    return float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-30))


def tensors(model: RelaxModel, target: str, folder: Path) -> dict[str, Array]:
    """Return every tensor that an operator of a model writes, in the order of the plain layout."""
    device = Device("core", "host", (0,), target)
    with np.load(folder / FRAME) as frame:
        found = run_stages(model, [([operator.name], device) for operator in model.graph.operators], dict(frame))
    inputs = {tensor.name for tensor in model.graph.inputs}
    written = {name: to_logical(array, port.layout) for name, (port, array) in found.items()}
    return {name: array.ravel() for name, array in written.items() if name not in inputs}


# There


def run_there(temporary: str, target: str) -> None:
    """Run models on the emulated machine; the library of x86 beside that of the machine has the same operators."""
    for folder in sorted(Path(temporary).glob("[0-9]*")):
        libraries = [load_library(folder / place, lambda one: one == target) for place in PLACES]
        np.savez(folder / TENSORS, **tensors(RelaxModel("model", libraries, lambda _: None), target, folder))


if __name__ == "__main__":
    main()
