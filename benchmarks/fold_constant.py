"""Time `relay.build` with Relay's FoldConstant and with ours, in the same run.

    python benchmarks/fold_constant.py                               # five networks, about seven minutes
    python benchmarks/fold_constant.py --models mobilenet a.tflite   # some of them, or a TFLite file
    python benchmarks/fold_constant.py --short                       # a small network, for CI

Each network is built both ways, one after the other, `--repeat` times; the table gives the medians, and how
far the outputs of the two libraries differ on a random input (0 means bit for bit the same).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tvm_pipeline_tvm.relay.fold import fast_build  # before tvm: importing it keeps TVM off the network

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

Build = Callable[..., Any]


def stock_build(mod: tvm.IRModule, target: str, params: dict[str, Any]) -> Any:
    with tvm.transform.PassContext(opt_level=3):
        return relay.build(mod, target, params=params)


def load(name: str) -> tuple[tvm.IRModule, dict[str, Any]]:
    if name.endswith(".tflite"):
        import tflite

        return relay.frontend.from_tflite(tflite.Model.GetRootAsModel(Path(name).read_bytes(), 0))
    from tvm.relay import testing

    network, options = {
        "resnet18": ("resnet", {"num_layers": 18}),
        "densenet121": ("densenet", {"densenet_size": 121}),
    }.get(name, (name, {}))
    return getattr(testing, network).get_workload(batch_size=1, **options)


def outputs(library: Any) -> list[np.ndarray]:
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    random = np.random.default_rng(0)
    shapes, dtypes = executor.get_input_info()
    for name in set(shapes) - set(library.get_params()):
        value = random.standard_normal(tuple(shapes[name])) * (1 if "float" in dtypes[name] else 50)
        executor.set_input(name, value.astype(dtypes[name]))
    executor.run()
    return [executor.get_output(i).numpy() for i in range(executor.get_num_outputs())]


def compare(name: str, target: str, repeat: int) -> dict[str, Any]:
    seconds: dict[Build, list[float]] = {stock_build: [], fast_build: []}
    results: dict[Build, list[np.ndarray]] = {}
    for _ in range(repeat):
        for build, times in seconds.items():
            mod, params = load(name)
            start = time.perf_counter()
            library = build(mod, target, params=params)
            times.append(time.perf_counter() - start)
            results[build] = outputs(library)
    stock, fast = (statistics.median(times) for times in seconds.values())
    pairs = zip(*results.values(), strict=True)
    difference = max(float(np.abs(a.astype("float64") - b.astype("float64")).max()) for a, b in pairs)
    return {
        "model": Path(name).stem,
        "stock_s": stock,
        "fast_s": fast,
        "ratio": stock / fast,
        "max_abs_difference": difference,
    }


def main() -> None:
    x86 = platform.machine() == "x86_64"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["squeezenet", "mobilenet", "resnet18", "densenet121", "inception_v3"]
    parser.add_argument("--models", nargs="+", default=default, help="names in relay.testing, or .tflite files")
    parser.add_argument("--target", default="llvm -mcpu=x86-64-v3" if x86 else "llvm")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a small network, once: proves that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    models, repeat = (["dqn"], 1) if args.short else (args.models, args.repeat)

    rows = [compare(name, args.target, repeat) for name in models]
    table = Table("model", title=f"relay.build, {args.target}")
    for column in ("stock (s)", "fast (s)", "ratio", "max |difference|"):
        table.add_column(column, justify="right")
    for row in rows:
        name, stock, fast, ratio, difference = row.values()
        table.add_row(name, f"{stock:.1f}", f"{fast:.1f}", f"{ratio:.1f}x", f"{difference:g}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
