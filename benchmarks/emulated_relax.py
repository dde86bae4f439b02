"""Networks, compiled by Relax, run on aarch64 that QEMU emulates: exact in int8, within a tolerance in float32.

    python benchmarks/emulated_relax.py                       # sets the machine up once (2 GB), then half an hour
    python benchmarks/emulated_relax.py --models FILE ..      # as networks.py knows them
    python benchmarks/emulated_relax.py --short               # small networks alone, if the machine is set up

It runs in the environment of Relax, which export_networks.py gives the built-in networks. Each network is compiled here
for a Cortex-A72, which multiplies bytes as words, and for a Cortex-A76, which has dot products of bytes. There, a frame
of noise goes through it operator by operator, in one stage, and in random cuts of two to four stages. Required:

1. Tensors of one stage and of cuts are those of the single operators, bit for bit.
2. In int8, tensors of integers are those of this machine bit for bit, and others within 1e-5 of their largest value.
3. In float32, the static rule takes Winograd's algorithm with the default tolerance, and adds no more than that to the
   error of direct sums against float64. With `--tolerance 0` no layer has it.

At last, it counts the instructions of some layers, by direct sums and by the form that the static rule takes, which
needs the extra `cross`. The exit status is 1 if a network is not as required, and 2 where the machine cannot be set up.
Nothing here is a time. `emulated_machine.py` sets the machine up; Relay has `emulated.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from emulated_machine import Machine, machine
from networks import load_lively
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.stages import random_stages, run_stages
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import TOLERANCE, Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline_tvm.float64 import worst_error
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.kernel_sets import relax_kernels
from tvm_pipeline_tvm.relax.build import Library, load_library
from tvm_pipeline_tvm.relax.compiled import RelaxModel
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.reference import in_float64

import tvm  # isort: skip

PROCESSORS = ("cortex-a72", "cortex-a76")
NETWORKS = (
    str(Path(__file__).parents[1] / "tests/edgetpu/data/mobilenet_v2_int8.tflite"),
    *("squeezenet", "resnet-18", "resnet-50", "centerface"),
)
LAYERS = ((16, 64, 28), (32, 32, 28), (64, 64, 14), (128, 128, 7), (256, 256, 4))  # channels, height and width
CUTS = 3
LIMIT = 1e-5  # of the largest value of a tensor of float32, in a network of int8
Arrays = dict[str, Array]
PLACES, FRAME, TENSORS, COMPARED = ("aarch64", "x86"), "frame.npz", "tensors.npz", "compared.json"
CONSOLE = Console(width=170, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=NETWORKS, help="names that networks.py knows, or files[@shapes]")
    parser.add_argument("--short", action="store_true", help="small networks alone, if the machine is set up")
    options = parser.parse_args()
    board = machine(install=not options.short, extras=("tvm",))
    if board is None:
        sys.exit(0 if options.short else 2)
    os.environ["PATH"] = f"{board.linkers}{os.pathsep}{os.environ['PATH']}"
    groups = [[*small()], *([load_lively(name)] for name in (() if options.short else options.models))]
    wrong = sum(compared(board, models, processor) for models in groups for processor in PROCESSORS)
    for sizes in LAYERS[:1] if options.short else LAYERS:
        direct, faster = instructions(board, *sizes)
        told = f"{direct} instructions by direct sums, {faster} by Winograd's algorithm: {direct / faster:.2f}"
        CONSOLE.print("emulated by QEMU: {} to {} channels @ {}: ".format(*sizes) + told)
    count = sum(map(len, groups))
    CONSOLE.print(f"emulated by QEMU: {count} networks on {len(PROCESSORS)} processors, {wrong} with wrong results")
    sys.exit(1 if wrong else 0)


def small() -> Iterator[Model]:
    """Yield networks of a few layers: of int8 with every option of a convolution, and one of float32."""
    from tests.plugins.kernels.relax.test_conv2d_winograd import network
    from tests.relax.test_integer_layers import nets

    for dtype in ("int8", "uint8"):
        for number, net in enumerate(nets(dtype)):
            yield replace(net.model(), name=f"{dtype} {number}")
    yield replace(network(), name="float32")


def compared(board: Machine, models: Sequence[Model], processor: str) -> int:
    """Run networks here and there, print what differs, and return how many are wrong."""
    target = f"llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu={processor}"
    with tempfile.TemporaryDirectory() as temporary:
        places = [Path(temporary, str(number)) for number in range(len(models))]
        compiled = [versions(model, target, place) for model, place in zip(models, places, strict=True)]
        call = f"import emulated_relax; emulated_relax.run_there({temporary!r}, {target!r})"
        board.python("-c", call, processor=processor, cache=Path(temporary, "cache"))
        wrong = 0
        for model, place, made in zip(models, places, compiled, strict=True):
            is_right, line = (exact if len(made) == 1 else near)(model, made, place)
            found = [json.loads(file.read_text()) for file in sorted(place.glob(f"*/{COMPARED}"))]
            tensors_cut, differ = (sum(each[name] for each in found) for name in ("tensors", "differ"))
            line += f"; {tensors_cut} tensors of stages, {differ} differ"
            CONSOLE.print(f"emulated by QEMU: {model.name} on {processor}: {line}", soft_wrap=True)
            wrong += not is_right or differ > 0
    return wrong


def versions(model: Model, target: str, place: Path) -> list[RelaxModel]:
    """Write a network into folders: in int8 for this machine, too; in float32 by direct sums and with a tolerance."""

    def compiled(targets: Sequence[str], tolerance: float) -> RelaxModel:
        own = replace(model, tolerance=tolerance)
        return RelaxModel.compile(own, targets, lambda _: None, elsewhere={target: "the board"})

    allowed = compiled([target], TOLERANCE)
    if kernels_of_int8(allowed.libraries[target]):
        made = [compiled([target, host_target()], TOLERANCE)]
    else:
        made = [compiled([target], 0.0), allowed]
    for number, version in enumerate(made):
        for name, library in zip(PLACES, version.libraries.values(), strict=False):
            (place / str(number) / name).mkdir(parents=True)
            library.save(place / str(number) / name)
    np.savez(place / FRAME, **{tensor.name: noise(tensor) for tensor in made[0].graph.inputs})
    return made


def kernels_of_int8(library: Library) -> int:
    return sum("int8" in rule for rule in library.rules.values())


def exact(_: Model, made: Sequence[RelaxModel], place: Path) -> tuple[bool, str]:
    """Return whether the tensors of a network of int8 are as required, and a line about them."""
    [compiled] = made
    [there, here] = compiled.libraries
    with np.load(place / FRAME) as frame, np.load(place / "0" / TENSORS) as tensors:
        names = [[operator.name] for operator in compiled.graph.operators]
        expected, found = written(compiled, here, names, dict(frame)), dict(tensors)
    if found.keys() != expected.keys():
        raise SystemExit(f"other tensors came out: {sorted(found.keys() ^ expected.keys())}")
    integers = [name for name, array in expected.items() if array.dtype.kind in "iu"]
    differ = [name for name in integers if not np.array_equal(found[name], expected[name])]
    error = max((apart(found[name], expected[name]) for name in expected.keys() - set(integers)), default=0.0)
    line = f"{kernels_of_int8(compiled.libraries[there])} kernels of int8; {len(integers)} tensors of integers, "
    line += f"{len(differ)} differ from x86{': ' if differ else ''}{', '.join(differ[:3])}; "
    return not differ and error <= LIMIT, f"{line}{len(expected) - len(integers)} of float32, off by {error:.0e}"


def near(model: Model, made: Sequence[RelaxModel], place: Path) -> tuple[bool, str]:
    """Return whether a network of float32 is as near to float64 as required, and a line about it."""
    with np.load(place / FRAME) as frame:
        expected = [output.ravel() for output in in_float64(import_model(model), dict(frame))]
    errors = []
    for number, compiled in enumerate(made):
        with np.load(place / str(number) / TENSORS) as found:
            outputs = [found[name] for name in compiled.graph.outputs]
        errors.append(worst_error(outputs, expected))
    direct, faster = (by_winograd(library) for compiled in made for library in compiled.libraries.values())
    line = f"{faster} layers by Winograd's algorithm, {direct} with `--tolerance 0`; "
    line += f"off float64 by {errors[1]:.1e}, and {errors[0]:.1e} by direct sums"
    return not direct and errors[1] <= errors[0] + TOLERANCE, line


def by_winograd(library: Library) -> int:
    """Return how many layers Winograd's algorithm computes."""
    return sum(relax_kernels().is_winograd(library.rules[call.function]) for call in library.calls)


def instructions(board: Machine, inputs: int, outputs: int, extent: int) -> list[int]:
    """Count those of a 3 x 3 convolution on a Cortex-A72: by direct sums, and by the static rule's form."""
    from tests.plugins.kernels.relax.layers import blocked, kernel, program
    from tvm_pipeline_kernels import winograd
    from tvm_pipeline_kernels.relax.schedules import conv2d, conv2d_winograd
    from tvm_pipeline_kernels.relax.schedules.cores import cores_of

    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": PROCESSORS[0]})
    cores, padding = cores_of(target), (1, 1, 1, 1)
    [form, *_] = winograd.winograd_rule(inputs, outputs, cores.lanes, extent, extent, cores.registers)
    image, weights = (np.ones(shape, "float32") for shape in ((1, inputs, extent, extent), (outputs, inputs, 3, 3)))
    added = [np.ones(shape, "float32") for shape in ((1, outputs, 1, 1), (1, outputs, extent, extent))]
    blocks = cores.lanes, cores.lanes
    direct = partial(conv2d.compute, strides=(1, 1), padding=padding, dilation=(1, 1))
    faster = partial(conv2d_winograd.compute, padding=padding, form=form)
    counts = []
    for rule, layer, packed in (
        (conv2d, direct, conv2d.packed(weights, *blocks)),
        (conv2d_winograd, faster, winograd.packed(weights, form.winograd, *blocks)),
    ):
        arrays = [blocked(image, cores.lanes), packed, *added]
        library, read, result = kernel(rule, layer, arrays, "none", cores.lanes, target)
        with tempfile.TemporaryDirectory() as folder:
            made, given = program(Path(folder), library, [*read, result])
            log = Path(folder, "log")  # a line for each instruction
            command = [board.emulator, "-cpu", PROCESSORS[0], "-singlestep", "-d", "exec,nochain", "-D", str(log), made]
            subprocess.run(command, input=given, stdout=subprocess.DEVNULL, check=True)
            with log.open("rb") as lines:
                counts.append(sum(line.startswith(b"Trace") for line in lines))
    return counts


def noise(tensor: Tensor) -> Array:
    """Return numbers from all over the range of a type."""
    draw, dtype = np.random.default_rng(0), np.dtype(tensor.dtype)
    if dtype.kind not in "iu":
        return draw.standard_normal(tensor.shape).astype(dtype)
    return draw.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, tensor.shape, dtype, endpoint=True)


def apart(one: Array, other: Array) -> float:
    """Return how far numbers are off at most, over the largest."""
    return float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-30))


def written(model: RelaxModel, target: str, cut: Sequence[Sequence[str]], frame: Mapping[str, Array]) -> Arrays:
    """Return the tensors that the stages of a cut write, in the order of the plain layout."""
    device = Device("core", "host", (0,), target)
    found = run_stages(model, [(stage, device) for stage in cut], frame)
    logical = {name: to_logical(array, port.layout) for name, (port, array) in found.items() if name not in frame}
    return {name: array.ravel() for name, array in logical.items()}  # targets have other blocks


# There


def run_there(temporary: str, target: str) -> None:
    """Run models on the emulated machine; the library of x86 beside that of the machine has the same operators."""
    for folder in sorted(Path(temporary).glob("*/[0-9]")):
        places = [folder / place for place in PLACES if (folder / place).exists()]
        model = RelaxModel("model", [load_library(place, lambda one: one == target) for place in places], print)
        names = model.graph.operator_names
        with np.load(folder.parent / FRAME) as saved:
            frame = dict(saved)
        expected = written(model, target, [[name] for name in names], frame)
        np.savez(folder / TENSORS, **expected)
        draw = Random(0)
        cuts = [random_stages(model.graph, draw, min(draw.randint(2, 4), len(names))) for _ in range(CUTS)]
        found = [each for cut in ([names], *cuts) for each in written(model, target, cut, frame).items()]
        differ = sum(not np.array_equal(array, expected[name]) for name, array in found)
        (folder / COMPARED).write_text(json.dumps({"tensors": len(found), "differ": differ}))


if __name__ == "__main__":
    main()
