"""Models go the whole way to an emulated aarch64 board: measured and compiled from here, run there, and compared.

    python benchmarks/emulated_board.py            # sets the machine up once (2 GB), then some minutes for each network
    python benchmarks/emulated_board.py --short    # one small network, if the machine is set up

`serve-rpc` runs on the machine of `emulated_machine.py`, where no program is on the PATH, so no C compiler. For each
network, by the command line as a user would:

1. `profile --remote` and `compile --remote --stages 2` here; the latter compares
   the board's outputs with this machine's.
2. The bundle is opened there: outputs of the unsplit model against this machine's, and tensors of random cuts against
   those of the unsplit model.
3. `run` there, in the stages of the plan, and here, as this machine compiled and planned it: values of each frame's
   outputs against one another.
4. `compile` and `run` here with the board's core as a device of this machine's pipeline, one stage on each of both
   processors: values as before.

Required: all within 1e-4 of the largest value, cuts bit for bit. The exit status is 1 if one is not, and 2 where the
machine cannot be set up. Times are an emulator's, and say nothing of a board.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from emulated import LIMIT, RULE, in_int8, outputs_here, read_row
from emulated_machine import Machine, machine
from networks import load_lively
from rich.console import Console

from tvm_pipeline import frontends
from tvm_pipeline.backends.bundle import read_documents
from tvm_pipeline.core.model import Model

PROCESSOR = "cortex-a72"
NETWORKS = ("mobilenet@64", "resnet-18@64", "centerface")
SHAPES = {"centerface": "input.1:[1,3,96,160]"}
FRAMES = 4
READY_S = 120
# What both machines make of the outputs: values from all over them, as the scores of annotations.
DECODER = """
import numpy as np
from tvm_pipeline_video.annotations import Annotation

def values(outputs, transform):
    found = []
    for name, array in sorted(outputs.items()):
        flat = np.ravel(array).astype("float64")
        some = flat[np.linspace(0, flat.size - 1, min(flat.size, 50)).astype(int)]
        found += [Annotation(name, float(value)) for value in (*some, np.abs(flat).max())]
    return found
"""
BOTH = """
name = "two processors"
[[device]]
name = "here"
cores = [{core}]
[[device]]
name = "board"
backend = "remote"
target = "{address}/cpu0"
"""
CONSOLE = Console(width=150)
CLI = ("-m", "tvm_pipeline.cli")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=NETWORKS, help="names that networks.py knows, or ONNX files")
    parser.add_argument("--cuts", type=int, default=3, help="random cuts of each network, in two to four stages")
    parser.add_argument("--short", action="store_true", help="one small network, if the machine is set up")
    options = parser.parse_args()
    board = machine(install=not options.short)
    if board is None:
        sys.exit(0 if options.short else 2)
    os.environ["PATH"] = f"{board.linkers}{os.pathsep}{os.environ['PATH']}"
    if options.short:
        options.models, options.cuts = ["branching"], 1
    CONSOLE.print("Seconds are those of an emulated processor: they say nothing of a board.")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, serving(board, Path(folder)) as address:
        for name in options.models:
            place = Path(folder) / Path(name).stem
            place.mkdir()
            worst = max(worst, whole_way(board, address, load_lively(name), place, options.cuts))
    CONSOLE.print(f"{len(options.models)} networks, outputs within {worst:.1e} of the largest value of those of x86")
    sys.exit(0 if worst <= LIMIT else 1)


@contextmanager
def serving(board: Machine, folder: Path) -> Iterator[str]:
    """Have the board serve while the block lasts; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = board.settings(PROCESSOR, folder / "board", compiler=False)
    command = board.command(*CLI, "serve-rpc", "--listen", address)
    log = folder / "board.log"
    with log.open("w") as said:
        server = subprocess.Popen(command, env=settings, stdout=said, stderr=said, start_new_session=True)
    try:
        with step("serve-rpc") as found:
            deadline = time.monotonic() + READY_S
            while "listens on" not in log.read_text():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the board does not serve: {log.read_text()}")
                time.sleep(0.1)
            found(log.read_text().partition("; from ")[0].strip())
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def whole_way(board: Machine, address: str, model: Model, folder: Path, cuts: int) -> float:
    """Bring a network to the board and run it there; return how far outputs are off, over the largest value.

    Raises:
        SystemExit: a command failed, or a cut differs in a bit.
    """
    CONSOLE.print(f"[bold]{model.name}[/]")
    file, bundle, profile = save(model, folder), folder / "model.tar", folder / "profile.json"
    shapes = ["--input-shapes", SHAPES[model.name]] if model.name in SHAPES else []
    with step("profile --remote") as found:
        here("profile", file, "--remote", address, "--repeats", "2", "-o", str(profile), *shapes)
        found(f"{profile.stat().st_size} bytes")
    with step("compile --remote, two stages") as found:
        remote = ["--remote", address, "--profile", str(profile), "--stages", "2", "--verify", "0"]
        said = here("compile", file, "-o", str(bundle), *remote, *shapes)
        found(next(line for line in said.splitlines() if "of this machine: off by" in line))
    with step("unsplit model and random cuts there") as found:
        call = f"import emulated; emulated.run_bundle({str(bundle)!r}, {cuts})"
        there(board, folder, "-c", call)
        as_sent = frontends.load(file, frontends.parse_shapes(SHAPES[model.name])) if shapes else model
        expected = outputs_here(as_sent, folder / "x86", is_int8=in_int8(as_sent))
        row, _ = read_row(folder, model, RULE, expected)
        found(f"outputs {row.apart:.1e} from x86; {row.tensors} tensors of {cuts} cuts, of which {row.differ} differ")
    if row.differ:
        raise SystemExit(f"{row.differ} tensors of cuts of {model.name} differ from the unsplit model's")
    with step(f"run there and here, {FRAMES} frames") as found:
        own = folder / "own.tar"
        here("compile", file, "-o", str(own), "--verify", "0", *shapes)
        (folder / "decoder.py").write_text(DECODER)
        height, width = read_documents(bundle).graph.inputs[0].shape[-2:]
        source = ["--source", f"synthetic:{width}x{height}@30:{FRAMES}", "--decoder", f"{folder / 'decoder.py'}:values"]
        results = [folder / "there.jsonl", folder / "here.jsonl"]
        common = [*source, "--preprocessing", "raw"]
        there(board, folder, *CLI, "run", str(bundle), *common, "--results", str(results[0]))
        here("run", str(own), *common, "--results", str(results[1]))
        apart = values_apart(*map(scores, results))
        found(f"values of outputs {apart:.1e} apart")
    with step("one pipeline of both processors") as found:
        both, mixed = folder / "both.tar", folder / "both.jsonl"
        (folder / "both.toml").write_text(BOTH.format(core=min(os.sched_getaffinity(0)), address=address))
        platform = ["--platform", str(folder / "both.toml"), "--stages", "2", "--verify", "0"]
        here("compile", file, "-o", str(both), *platform, *shapes)
        here("run", str(both), *common, "--results", str(mixed))
        stages = read_documents(both).plan.stages
        across = values_apart(scores(mixed), scores(results[1]))
        found(f"stages on {' and '.join('+'.join(stage.devices) for stage in stages)}; values {across:.1e} apart")
    return max(row.apart, apart, across)


def save(model: Model, folder: Path) -> str:
    """Write a network as a file that the command line takes; return its path."""
    is_onnx = model.format == "onnx"
    file = folder / (f"{model.name}.onnx" if is_onnx else f"{model.name}.json")
    file.write_bytes(model.content)
    if model.params:
        file.with_suffix(".params").write_bytes(model.params)
    return str(file)


def scores(results: Path) -> dict[str, np.ndarray]:
    """Return the values that `DECODER` gave, of every frame, by output."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    if len(lines) != FRAMES:
        raise SystemExit(f"{results.name} has {len(lines)} lines and not {FRAMES}")
    found: dict[str, list[float]] = {}
    for line in lines:
        for annotation in line["annotations"]:
            found.setdefault(annotation["label"], []).append(annotation["score"])
    return {name: np.array(values) for name, values in found.items()}


def values_apart(there: Mapping[str, np.ndarray], here: Mapping[str, np.ndarray]) -> float:
    """Return how far values are off at most, over the largest of their output."""
    if there.keys() != here.keys() or not any(values.std() for values in here.values()):
        raise SystemExit("other outputs came out, or all their values are the same, so that nothing is compared")
    return max(float(np.abs(there[name] - values).max() / np.abs(values).max()) for name, values in here.items())


def here(*arguments: str) -> str:
    """Run a command of tvm-pipeline on this machine; return what it says. Raises SystemExit where it fails."""
    return _said([sys.executable, *CLI, *arguments], None)


def there(board: Machine, folder: Path, *arguments: str) -> str:
    """Run Python on the board, without a compiler; as `here` otherwise."""
    return _said(board.command(*arguments), board.settings(PROCESSOR, folder / "cache", compiler=False))


def _said(command: list[str], settings: Mapping[str, str] | None) -> str:
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@contextmanager
def step(name: str) -> Iterator[Callable[[str], None]]:
    """Print a step with its seconds and what it found."""
    began, found = time.monotonic(), [""]

    def tell(line: str) -> None:
        found[0] = line

    yield tell
    CONSOLE.print(f"  {name}: {time.monotonic() - began:.0f} s; {found[0]}", highlight=False)


if __name__ == "__main__":
    main()
