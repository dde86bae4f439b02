"""What faster algorithms gain in whole networks, and what they change in their outputs.

    taskset -c 1 python benchmarks/tolerance.py                                        # the built-in networks
    taskset -c 1 python benchmarks/tolerance.py --models net.onnx net.onnx@x:[1,3,320,320]
    taskset -c 1 python benchmarks/tolerance.py --target "llvm -mcpu=x86-64-v3"        # by AVX2
    taskset -c 1 python benchmarks/tolerance.py --short                                # a small network, for CI

Relax compiles two versions of each network: with `--tolerance 0` all sums are direct, and with the default tolerance
Winograd's algorithm may compute a layer. This script runs the two versions in turns.

kernels    how many distinct ones Winograd's algorithm computes
error      the largest difference of an output from the network in float64, over its largest value: the worst of noise
           and of --exact pictures of a video
top-1      how many of --pictures pictures have their largest output at another place than by direct sums

The exit status is 1 where a network is further off than direct sums are by more than the tolerance.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
from networks import load_lively
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import write_picture_net
from tvm_pipeline.backends.contract import Array, StageRunner
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import TOLERANCE
from tvm_pipeline.report import TextTable
from tvm_pipeline_tvm.float64 import worst_error
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.reference import in_float64

NETWORKS = ("squeezenet", "resnet-18", "resnet-50", "inception_v3", "densenet-121", "centerface")
CONSOLE = Console(width=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=NETWORKS, help="names that networks.py knows, or files[@shapes]")
    parser.add_argument("--target", help="of the code; this processor's without it")
    parser.add_argument("--rounds", type=int, default=15, help="of each network")
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--exact", type=int, default=4, help="pictures that are computed in float64, too")
    parser.add_argument("--short", action="store_true", help="one small network, briefly")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.short:
            options.models = [str(write_picture_net(Path(folder) / "picture.onnx"))]
            options.rounds, options.pictures, options.exact = 1, 0, 0
        rows, right = zip(*(network(name, options) for name in options.models), strict=True)
    columns = ("network", "direct, ms", "faster, ms", "ratio (least-largest)", "kernels", "error", "of direct", "top-1")
    title = f"Tolerance {TOLERANCE:g}, one core, load average {os.getloadavg()[0]:.1f}"
    CONSOLE.print(TextTable(title, columns, rows))
    raise SystemExit(not all(right))


def network(name: str, options: argparse.Namespace) -> tuple[tuple[str, ...], bool]:
    """Return the row of a network, and whether its outputs are as near as they must be."""
    model, backend = load_lively(name), find_backend("host")
    device = replace(backend.detect()[0], cores=(max(os.sched_getaffinity(0)),))
    device = replace(device, target=options.target or device.target)
    compiled = [backend.compile(replace(model, tolerance=one), [device]) for one in (0.0, TOLERANCE)]
    runners = [each.stage(each.graph.operator_names, device) for each in compiled]
    with closing(runners[0]), closing(runners[1]):
        for runner in runners:
            runner.bind()
        frames = pictures(compiled[0].graph.inputs, options.pictures)
        judged = [
            {tensor.name: noise(Port.of(tensor)) for tensor in compiled[0].graph.inputs},
            *frames[: options.exact],
        ]
        module = import_model(model)
        exact = [in_float64(module, frame) for frame in judged]
        direct, faster = (
            max(worst_error(outputs(runner, frame), right) for frame, right in zip(judged, exact, strict=True))
            for runner in runners
        )
        changed = sum(len({top(outputs(runner, frame)) for runner in runners}) > 1 for frame in frames)
        times = np.array([[seconds(runner, judged[0]) for runner in runners] for _ in range(options.rounds)])
    ratios = times[:, 0] / times[:, 1]
    figures = [f"{1e3 * figure:.2f}" for figure in np.median(times, axis=0)]
    gained = f"{np.median(ratios):.3f} ({ratios.min():.3f}-{ratios.max():.3f})"
    kernels = ", ".join(str(each.winograd) for each in compiled[1].tuned())
    near = f"{faster:.1e}", f"{direct:.1e}", f"{changed} of {len(frames)}"
    row = (Path(name.partition("@")[0]).name, *figures, gained, kernels, *near)
    CONSOLE.print("  ", *row, style="dim", highlight=False)
    return row, faster <= direct + TOLERANCE


def outputs(runner: StageRunner, frame: dict[str, Array]) -> list[Array]:
    """Return what a stage makes of a frame, in the order of its ports."""
    given, made = ([port.buffer() for port in ports] for ports in (runner.inputs, runner.outputs))
    for port, array in zip(runner.inputs, given, strict=True):
        array[...] = frame[port.name]
    runner.run(given, made)
    return made


def seconds(runner: StageRunner, frame: dict[str, Array]) -> float:
    """Return the seconds of a frame, behind one that fills the caches anew."""
    outputs(runner, frame)
    begin_s = time.perf_counter()
    outputs(runner, frame)
    return time.perf_counter() - begin_s


def top(made: Sequence[Array]) -> int:
    """Return the place of the largest number of the first output."""
    return int(np.argmax(made[0]))


def pictures(inputs: Sequence[Tensor], count: int) -> list[dict[str, Array]]:
    """Return frames of the demo's video for a model with one image as its input; none for others."""
    shape = inputs[0].shape
    if not count or len(inputs) > 1 or len(shape) != 4 or 3 not in (shape[1], shape[3]) or inputs[0].dtype != "float32":
        return []
    is_first = shape[1] == 3
    height, width = shape[2:] if is_first else shape[1:3]

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "face_detector"))
    from assets import VIDEO, fetch

    found = []
    with av.open(str(fetch(VIDEO))) as file:
        for frame in itertools.islice(file.decode(video=0), count):
            array = frame.reformat(width, height, "rgb24").to_ndarray().astype("float32") / 127.5 - 1
            found.append({inputs[0].name: np.ascontiguousarray(array.transpose(2, 0, 1) if is_first else array)[None]})
    return found


if __name__ == "__main__":
    main()
