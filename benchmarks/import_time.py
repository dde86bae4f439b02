"""Time the import of ONNX files: TVM's importer as it is, and with constants folded in numpy, in the same run.

    python benchmarks/import_time.py                                 # nine networks of the package onnx
    python benchmarks/import_time.py --models 'det.onnx@x:[1,3,320,320]' light_resnet50
    python benchmarks/import_time.py --short                         # a file of a few nodes, for CI

Each file is imported both ways, one after the other, `--repeat` times. The table gives the medians of CPU seconds, how
many times less the second takes, and whether the two modules are equal, constants included. A file that TVM's importer
refuses alone has no ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from networks import load_lively

from tests.support.onnx_models import write_picture_net
from tvm_pipeline.core.model import Model
from tvm_pipeline.files import cache_folder
from tvm_pipeline.report import TextTable
from tvm_pipeline.tvm.relay.import_folding import faster_importer

import tvm  # isort: skip
from tvm import relay  # isort: skip

LIGHT = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19")
WAYS = {"before": nullcontext, "numpy": faster_importer}


def imported(model: Model) -> tvm.IRModule:
    shapes = {tensor.name: list(tensor.shape) for tensor in model.inputs}
    dtypes = {tensor.name: tensor.dtype for tensor in model.inputs}
    return relay.frontend.from_onnx(onnx.load_from_string(model.content), shapes, dtypes, freeze_params=True)[0]


def measure(model: Model, repeat: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    modules: dict[str, tvm.IRModule] = {}
    for _ in range(repeat):
        for way, context in WAYS.items():
            begin = time.process_time()
            try:
                with context():
                    modules[way] = imported(model)
            except tvm.TVMError as error:
                if "#dbg_declare" not in str(error):
                    raise
            seconds[way].append(time.process_time() - begin)
    before, numpy = (statistics.median(seconds[way]) if way in modules else None for way in WAYS)
    both = len(modules) == len(WAYS)
    return {
        "model": model.name,
        "before_cpu_s": before,
        "numpy_cpu_s": numpy,
        "ratio": before / numpy if both else None,
        "equal": tvm.ir.structural_equal(*modules.values()) if both else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[f"light_{name}" for name in LIGHT], help="names or files")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="one small file, once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.short:
        cache_folder().mkdir(parents=True, exist_ok=True)
        args.models, args.repeat = [str(write_picture_net(cache_folder() / "import_time.onnx"))], 1

    rows = [measure(load_lively(name), args.repeat) for name in args.models]
    columns = ("model", "TVM's (CPU s)", "in numpy (CPU s)", "times less", "equal")
    cells = tuple(
        tuple("-" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        for row in rows
    )
    Console().print(TextTable("Import of ONNX", columns, cells))
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    if ratios:
        print(f"geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.2f} times less CPU time")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
