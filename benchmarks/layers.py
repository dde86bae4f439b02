"""Where our kernels lose time to OpenVINO: what each engine says of its operators, on one core.

    python benchmarks/layers.py --models net.onnx net.onnx@x:[1,3,320,320]
    python benchmarks/layers.py --short                        # a small network, for CI

Ours are the seconds of the profile, OpenVINO's those of its counters. The engines fuse operators otherwise, so the
seconds are added up over operators with one kind of work and one shape of the first result. A table has what takes
longer by our kernels, and the line below it what these groups would gain at OpenVINO's speed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from pathlib import Path

from networks import load_lively
from rich.console import Console

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import Device, Platform, profile_model, settle_platform
from tvm_pipeline.backends.registry import find_backend, platform_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.report import TextTable

KINDS = {"convolution": ("conv",), "matrix product": ("matmul", "dense", "gemm", "lstm", "gru")}
OTHERS = "all others"
CONSOLE = Console(width=120)
Groups = dict[tuple[str, str], float]  # seconds by the kind of work and the shape of the first result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["squeezenet", "mobilenet"], help="names or files[@shapes]")
    parser.add_argument("--repeats", type=int, default=24, help="passes over a model")
    parser.add_argument("--short", action="store_true", help="one small network, briefly")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    with tempfile.TemporaryDirectory() as folder:
        if options.short:
            options.models, options.repeats = [str(write_picture_net(Path(folder) / "picture.onnx"))], 4
        for name in options.models:
            compare(load_lively(name), options.repeats)


def compare(model: Model, repeats: int) -> None:
    """Print what takes longer by our kernels, and what that is of the whole."""
    ours, theirs = (seconds(model, backend, repeats) for backend in ("host", "openvino"))
    lost = {group: ours[group] - theirs.get(group, 0.0) for group in ours if ours[group] > theirs.get(group, 0.0)}
    rows = [
        (kind, shape, f"{1e6 * ours[kind, shape]:.0f}", f"{1e6 * theirs.get((kind, shape), 0.0):.0f}")
        for kind, shape in sorted(lost, key=lost.__getitem__, reverse=True)[:12]
    ]
    CONSOLE.print(TextTable(model.name, ("work", "result", "ours, µs", "OpenVINO, µs"), tuple(rows)))
    whole = sum(ours.values())
    CONSOLE.print(
        f"{model.name}: ours {1e3 * whole:.3f} ms, OpenVINO {1e3 * sum(theirs.values()):.3f} ms; what takes longer by "
        f"ours would gain {100 * sum(lost.values()) / whole:.1f} % at OpenVINO's speed",
        highlight=False,
    )


def seconds(model: Model, backend: str, repeats: int) -> Groups:
    """Return what the operators of each kind and shape take on the core of this process."""
    cores = tuple(os.sched_getaffinity(0))
    if backend == "host":
        device = next(device for device in find_backend("host").detect() if tuple(device.cores) == cores)
    else:
        device = Device("openvino", backend, cores, "CPU")
    found, platform = settle_platform(Platform("one core", (device,)))
    compiled = found.compile(model, platform.devices)
    profile = profile_model(platform_backend(platform), compiled, platform, repeats)
    taken: Groups = defaultdict(float)
    for operator in compiled.graph.operators:
        names = (kind for kind, words in KINDS.items() if any(word in operator.kind for word in words))
        kind = next(names, OTHERS)
        shape = "" if kind == OTHERS else "x".join(map(str, operator.outputs[0].shape))
        taken[kind, shape] += profile.devices[device.name].seconds[operator.name]
    compiled.close()
    return taken


if __name__ == "__main__":
    main()
