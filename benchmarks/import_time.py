"""Time imports: of this package and its command line by Python, and of ONNX files by TVM.

    python benchmarks/import_time.py                                 # with nine networks of the package onnx
    python benchmarks/import_time.py --models                        # no network: this package alone
    python benchmarks/import_time.py --models 'det.onnx@x:[1,3,320,320]' light_resnet50
    python benchmarks/import_time.py --short                         # a file of a few nodes, for CI

The first table has the modules that programs load, and their CPU seconds, user and system, as medians of some
processes. Beside the help of the command line stands that of a typer application with one empty command.

Each ONNX file is imported by TVM's importer as it is, and with constants folded in numpy, one after the other,
`--repeat` times. The second table gives the medians of CPU seconds, how many times less the second takes, and whether
the two modules are equal, constants included. A file that TVM's importer refuses alone has no ratio.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
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
from tvm_pipeline_tvm.relay.import_folding import faster_importer

import tvm  # isort: skip
from tvm import relay  # isort: skip

LIGHT = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19")
STARTS = 5
HELP = "import sys; sys.argv[1:] = ['--help']; "
PROGRAMS = {
    "python": "",
    "import tvm_pipeline": "import tvm_pipeline",
    "from tvm_pipeline import *": "from tvm_pipeline import *",
    "tvm-pipeline --help": HELP + "import tvm_pipeline_command as c; c.main()",
    "typer alone, --help": HELP + "import typer; app = typer.Typer(); app.command()(lambda: None); app()",
}
LOADED = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
WAYS = {"before": nullcontext, "numpy": faster_importer}


def started(program: str, starts: int) -> dict[str, Any]:
    """Return the modules that a program loads, and its CPU seconds."""
    seconds, loaded = [], []
    for _ in range(starts):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", LOADED + program], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        loaded = done.stderr.split()
    ours = sum(name.partition(".")[0].startswith("tvm_pipeline") for name in loaded)
    return {"our_modules": ours, "modules": len(loaded), "cpu_s": statistics.median(seconds)}


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
    parser.add_argument("--models", nargs="*", default=[f"light_{name}" for name in LIGHT], help="names or files")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="one small file, once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.short:
        cache_folder().mkdir(parents=True, exist_ok=True)
        args.models, args.repeat = [str(write_picture_net(cache_folder() / "import_time.onnx"))], 1

    starts = [{"program": name, **started(program, 1 if args.short else STARTS)} for name, program in PROGRAMS.items()]
    cells = tuple((s["program"], str(s["our_modules"]), str(s["modules"]), f"{s['cpu_s']:.2f}") for s in starts)
    Console().print(TextTable("Start of programs", ("program", "our modules", "modules", "CPU s"), cells))

    rows = [measure(load_lively(name), args.repeat) for name in args.models]
    columns = ("model", "TVM's (CPU s)", "in numpy (CPU s)", "times less", "equal")
    cells = tuple(
        tuple("-" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        for row in rows
    )
    if rows:
        Console().print(TextTable("Import of ONNX", columns, cells))
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    if ratios:
        print(f"geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.2f} times less CPU time")
    if args.json:
        args.json.write_text(json.dumps({"starts": starts, "models": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
