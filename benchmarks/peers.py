"""This project beside other engines: the same networks, weights and cores, in turns.

    python benchmarks/peers.py                                 # all cores, OpenVINO and onnxruntime
    python benchmarks/peers.py --only engines --peers all      # and MNN, IREE, ExecuTorch
    python benchmarks/peers.py --cores 1                       # one core, one thread: CPU time is what counts
    python benchmarks/peers.py --only engines --cores 1 --avx2 # on a machine with AVX-512, too
    python benchmarks/peers.py --only schedules                # our schedules beside TOPI's
    python benchmarks/peers.py --only operators --models squeezenet    # where our kernels lose
    python benchmarks/peers.py --short                         # little of each, for CI, which installs no peer

engines    Each engine with its own best settings: ours, with the TVM of the environment, has the plan that the planner
           chose and verified, the whole model on all cores, and replicas; OpenVINO has its hints for throughput and
           latency; the others have all cores, and replicas. Networks in .tflite run on OpenVINO and TFLite. In a round
           every setting has one turn. A ratio is the median over rounds of what the two did in one round, with
           quartiles, and above 1 ours is the better one. A peer has the setting in which it is best.
schedules  With Relay. The library as it is built, beside one with TOPI's schedules alone: CPU time, outputs, CPU
           seconds to build.
operators  With Relay. The CPU time of each operator against the multiply-adds that the core can do.

The benchmark installs each peer once, into a separate environment in the cache; ExecuTorch's takes 1.3 GB.
A peer that cannot read a network is named, and left out. The exit status is 1 if outputs of two engines differ by more
than 1e-3 of the largest value (.tflite: whatever they differ by is printed), or those of the two schedules by more than
1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import avx2_only
import numpy as np
import onnx
from core_distance import core_distance
from networks import load_lively
from peer_engines import SETTINGS, Turn, apart, repeated, take_turn
from rich.console import Console

from tvm_pipeline import Pipeline, Plan, Platform, Prediction, Problem, Stage, planning, profile_model, settle_platform
from tvm_pipeline.backends.contract import Array, Backend, CompiledModel
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.backends.registry import find_backend, platform_backend
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.files import cache_folder
from tvm_pipeline.frontends import load
from tvm_pipeline.report import TextTable
from tvm_pipeline.runtime.comparison import in_turn, runner
from tvm_pipeline.runtime.verification import VERIFY_S, verified
from tvm_pipeline.workflow.steps import REPEATS

PEERS = {
    "OpenVINO": ("openvino==2026.4.1",),
    "onnxruntime": ("onnxruntime==1.32.0",),
    "TFLite": ("ai-edge-litert==2.3.0",),
    "MNN": ("MNN==3.6.1", "onnx==1.23.2"),
    "IREE": ("iree-base-compiler[onnx]==3.13.0", "iree-base-runtime==3.13.0"),
    # Without what ExecuTorch and onnx2torch name beside these: for other systems, for training and for other networks.
    "ExecuTorch": (
        *("executorch==1.5.1", "torch==2.13.0", "torchao==0.18.0", "onnx2torch==1.5.15", "onnx==1.23.2", "--no-deps"),
        *("numpy", "protobuf", "ml_dtypes", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "MarkupSafe"),
        *("fsspec", "filelock", "flatbuffers", "packaging", "pyyaml", "ruamel.yaml", "tabulate", "pandas"),
        *("python-dateutil", "six", "expecttest", "hypothesis", "sortedcontainers", "parameterized"),
    ),
}
AVX2 = "llvm -mcpu=x86-64-v3"
PARTS = ("engines", "schedules", "operators")
DEFAULT_PEERS = ("OpenVINO", "onnxruntime")
NETWORKS = ("squeezenet", "mobilenet", "resnet-18", "resnet-50", "densenet-121", "inception_v3", "centerface")
LIMIT = 1e-3  # of the largest value of an output
LEAST_VALUES = 5  # of an output that differ from their mean
CONSOLE = Console(width=170)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="this part; else the first two")
    parser.add_argument(
        "--models", nargs="+", default=list(NETWORKS), help="names that networks.py knows, or files@shapes"
    )
    parser.add_argument(
        "--cores", type=int, default=len(os.sched_getaffinity(0)), help="the last so many of those here"
    )
    parser.add_argument(
        "--peers", nargs="+", choices=[*PEERS, "all"], default=DEFAULT_PEERS, metavar="PEER", help=", ".join(PEERS)
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each turn of an engine that is kept full")
    parser.add_argument(
        "--tune", type=float, default=0.0, help="seconds for each network, which then runs tuned as well"
    )
    parser.add_argument("--avx2", action="store_true", help="all engines as on a processor with AVX2 alone")
    parser.add_argument("--short", action="store_true", help="one small network, briefly: proves that it works")
    parser.add_argument("--json", type=Path, help="also write all turns here")
    options = parser.parse_args()
    if options.short:
        options.models, options.rounds, options.seconds, options.tune = ["branching"], 1, 0.05, 1e-3
    if "all" in options.peers:
        options.peers = list(PEERS)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
    wanted = [options.only] if options.only else list(PARTS)[: 3 if options.short else 2]
    right = [engines(CONSOLE, options) if part == "engines" else _of_kernels(part, options) for part in wanted]
    raise SystemExit(not all(right))


def _of_kernels(part: str, options: argparse.Namespace) -> bool:
    import peer_kernels  # which needs Relay

    run = peer_kernels.schedules if part == "schedules" else peer_kernels.operators
    return run(CONSOLE, options)


def engines(console: Console, options: argparse.Namespace) -> bool:
    """Run all settings of all engines in turns; return whether their outputs agree."""
    peers = dict.fromkeys([*options.peers, *(["TFLite"] if options.avx2 else [])])
    pythons = {
        peer: python for peer in peers if (python := peer_python(peer, install=not options.short, avx2=options.avx2))
    }
    if options.short:
        check_process()
    races = []
    for name in options.models:
        races.append(race(name, pythons, options))
        console.print(races[-1].table())
        if options.tune:
            console.print(f"{name}: tuned over not tuned {races[-1].gain()}", highlight=False)
    console.print(summary(races))
    if options.json:
        options.json.write_text(json.dumps({each.name: each.figures() for each in races}, indent=1))
    return all(each.agrees for each in races)


def peer_python(peer: str, install: bool, avx2: bool = False) -> Path | None:
    """Return the Python of a peer's environment; None, with the reason on the console, where there is none.

    Args:
        avx2: an environment in which the peer sees a processor with AVX2 alone; see `avx2_only.py`.
    """
    requirements = PEERS[peer]
    name = f"peer-{requirements[0]}-{sys.version_info.major}.{sys.version_info.minor}{'-avx2' if avx2 else ''}"
    folder = cache_folder() / "tools" / name
    done, python = folder / "installed", folder / "bin" / "python"
    if done.exists():
        return python
    if not install:
        CONSOLE.print(f"{peer} is not installed and does not run. Run this once without --short to install it.")
        return None
    CONSOLE.print(f"installing {peer} into {folder} (once)")
    venv.create(folder, clear=True, with_pip=True)
    if subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=False).returncode:
        CONSOLE.print(f"{peer} cannot be installed and does not run. Is a package registry within reach?")
        return None
    if avx2:
        avx2_only.hide(folder)
    done.touch()
    return python


# Settings that run


class Ours:
    """A plan that runs in this process."""

    engine, version = "ours", ""

    def __init__(self, setting: str, compiled: CompiledModel, plan: Plan, platform: Platform, frame: list[Array]):
        self.setting = setting
        self._inside = plan.frames_inside
        self._pipeline = Pipeline(compiled, plan, platform, in_flight=self._inside)
        self._pipeline.start()
        self._frame = {tensor.name: array for tensor, array in zip(compiled.graph.inputs, frame, strict=True)}
        self._pipeline.submit(self._frame)
        made = self._pipeline.result().outputs
        self.outputs = [made[name].copy() for name in compiled.graph.outputs]

    def alone(self) -> None:
        self._pipeline.submit(self._frame)
        self._pipeline.result()

    def full(self, seconds: float) -> int:
        for _ in range(self._inside):
            self._pipeline.submit(self._frame)
        count = repeated(self._next, seconds)
        for _ in range(self._inside):
            self._pipeline.result()
        return count + self._inside

    def _next(self) -> None:
        self._pipeline.result()
        self._pipeline.submit(self._frame)

    def take_turn(self, seconds: float) -> Turn:
        return take_turn(self, seconds)

    def close(self) -> None:
        self._pipeline.stop()


class EngineError(Exception):
    """An engine ended before it had results."""


class Peer:
    """A setting of another engine, in a process of its own (`peer_engines.py`).

    Raises:
        EngineError: the process ended before it had results.
    """

    def __init__(self, engine: str, setting: str, threads: int, network: Path, python: Path):
        self.engine, self.setting = engine, setting
        outputs = network.with_name("outputs.npz")
        arguments = (engine, setting, threads, network, network.with_name("inputs.npz"), outputs)
        command = [str(python), "-c", "import sys, peer_engines; peer_engines.serve(*sys.argv[1:])"]
        self._process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **avx2_only.preloaded(python)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()
        with np.load(outputs) as saved:
            self.outputs = [saved[key] for key in saved.files]

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.engine}, {self.setting}, has ended; see above")
        return json.loads(line)

    def take_turn(self, seconds: float) -> Turn:
        print(seconds, file=self._process.stdin, flush=True)
        return Turn(**self._answer())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def host_platform(target: str = "") -> tuple[Backend, Platform]:
    """Return the cores of this process as devices, without any GPU, perhaps for another target than they have."""
    devices = find_backend("host").detect()
    return settle_platform(
        Platform("benchmark", tuple(replace(each, target=target or each.target) for each in devices))
    )


def of_one_stage(graph: OperatorGraph, *devices: str) -> Plan:
    """Return the whole model on a device, or a replica of it on each of several."""
    stage = Stage(devices, tuple(graph.operator_names))
    return Plan(graph.name, "by hand", "throughput", (stage,), Prediction())


def check_process() -> None:
    """Let TFLite, which the environment of this project has, run a network in a process as the peers do."""
    model = load(Path(__file__).parents[1] / "tests" / "edgetpu" / "data" / "mobilenet_v2_int8.tflite")
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as opened:
        file = network_file(model, Path(temporary))
        save_inputs(file, [noise(Port.of(each)) for each in model.inputs])
        settings = [
            opened.enter_context(closing(Peer("TFLite", name, 2, file, Path(sys.executable))))
            for name in SETTINGS["TFLite"]
        ]
        for each in settings:
            each.take_turn(0.05)
        if apart(*(each.outputs for each in settings)):
            raise SystemExit("two processes of one engine gave different outputs")


def chosen_plan(name: str, compiled: CompiledModel, platform: Platform, verify_s: float, repeats: int) -> Plan:
    """Return the plan that the planner chooses and verifies; print why."""
    profile = profile_model(platform_backend(platform), compiled, platform, repeats)
    for warning in profile.warnings:
        CONSOLE.print(f"{name}: {warning}")
    problem = Problem(compiled.graph, platform, profile)
    decision = verified(problem, planning.plan(problem), runner(compiled, platform), verify_s)
    CONSOLE.print(f"{name}: {decision.why}", highlight=False)
    return decision.plan


def own_plans(name: str, compiled: CompiledModel, platform: Platform, verify_s: float, repeats: int) -> dict[str, Plan]:
    """Return our settings; the first is what we would run."""
    if len(platform.devices) == 1:
        return {"one thread": of_one_stage(compiled.graph, platform.devices[0].name)}
    chosen = chosen_plan(name, compiled, platform, verify_s, repeats)
    most = max(platform.devices, key=lambda device: len(device.cores))
    others = [device.name for device in platform.devices if device != most]
    return {
        "chosen plan": chosen,
        "all cores": of_one_stage(compiled.graph, most.name),
        "replicas": of_one_stage(compiled.graph, *others),
    }


def network_file(model: Model, folder: Path) -> Path:
    """Write the network as the peers read it."""
    if model.format == "tflite":
        path = folder / "network.tflite"
        path.write_bytes(model.content)
        return path
    if model.format == "onnx":
        proto = onnx.load_from_string(model.content)
        for tensor in model.inputs:
            declared = next(value for value in proto.graph.input if value.name == tensor.name)
            for extent, dim in zip(tensor.shape, declared.type.tensor_type.shape.dim, strict=True):
                dim.dim_value = extent
        for value in proto.graph.output:  # which follow from the inputs
            value.type.tensor_type.ClearField("shape")
        proto.graph.ClearField("value_info")
    else:
        from relay_to_onnx import as_onnx

        from tvm_pipeline_tvm.relay.importer import import_model

        proto = as_onnx(model.name, *import_model(model))
    path = folder / "network.onnx"
    onnx.save(proto, path)
    return path


def save_inputs(network: Path, frame: list[Array]) -> None:
    """Write a frame beside the network, where `Peer` looks for it."""
    np.savez(network.with_name("inputs.npz"), *frame)


# Races


def race(name: str, pythons: dict[str, Path], options: argparse.Namespace) -> Race:
    """Run every setting once for its outputs, then all of them in turns."""
    model = load_lively(name)
    backend, platform = host_platform(AVX2 if options.avx2 else "")
    tuner = backend if backend.can_tune else None
    if options.tune and tuner:
        report = tuner.tune(model, platform.devices[0], options.tune)
        CONSOLE.print(f"{name}: {report.tuned} of {report.kernels} convolutions tuned; {report.stopped}")
    compile_ = tuner.compile_untuned if tuner else backend.compile
    compiled = compile_(model, platform.devices)
    plans = own_plans(name, compiled, platform, *((0.05, 4) if options.short else (VERIFY_S, REPEATS)))
    frame = [noise(Port.of(tensor)) for tensor in compiled.graph.inputs]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as opened:
        settings: list[Ours | Peer] = []

        def add(setting: Ours | Peer) -> None:
            settings.append(opened.enter_context(closing(setting)))

        for setting, plan in plans.items():
            add(Ours(setting, compiled, plan, platform, frame))
        if options.tune:
            setting, plan = next(iter(plans.items()))
            tuned = backend.compile(model, platform.devices)
            add(Ours(f"{setting}, tuned", tuned, plan, platform, frame))
        file = network_file(model, Path(temporary))
        save_inputs(file, frame)
        for engine in readers(model, list(pythons)):
            python = pythons.get(engine, Path(sys.executable))
            for setting in SETTINGS[engine][: 1 if options.cores == 1 else None]:
                try:
                    add(Peer(engine, setting, options.cores, file, python))
                except EngineError as error:
                    CONSOLE.print(f"{name}: {error}", highlight=False)
        if options.short:  # shows without any peer that what they read is the same network
            again = backend.compile(load(file), platform.devices)
            add(
                Ours("what the peers read", again, of_one_stage(again.graph, platform.devices[0].name), platform, frame)
            )
        turns: list[list[Turn]] = [[] for _ in settings]
        before = core_distance()
        for round_ in range(options.rounds):
            for index in in_turn(range(len(settings)), round_):
                turns[index].append(settings[index].take_turn(options.seconds))
        if options.cores > 1:
            CONSOLE.print(f"{name}: {before} before, {core_distance()} after", highlight=False)
        return Race(name, settings, turns, exact=model.format != "tflite")


def readers(model: Model, peers: list[str]) -> list[str]:
    """Return the engines that read the network and are installed."""
    if model.format != "tflite":
        return [peer for peer in peers if peer != "TFLite"]
    return [*(peer for peer in peers if peer == "OpenVINO"), "TFLite"]  # which this project's environment has, too


class Race:
    """What the settings of all engines did with one network.

    Attributes:
        agrees: whether the outputs of all settings are close to those of our first.
    """

    def __init__(self, name: str, settings: list[Ours | Peer], turns: list[list[Turn]], *, exact: bool) -> None:
        self.name = name
        self._turns = {(each.engine, each.setting): found for each, found in zip(settings, turns, strict=True)}
        expected = settings[0].outputs
        for array in expected:
            if np.count_nonzero(np.abs(array - array.mean()) > LIMIT * np.abs(array).max()) < LEAST_VALUES:
                CONSOLE.print(f"{name}: nearly all values of an output are equal, so that a mistake would not show")
        self._labels = [f"{' '.join((each.engine, each.version)).strip()}, {each.setting}" for each in settings]
        self._apart = [apart(each.outputs, expected) for each in settings]
        self.agrees = not exact or max(self._apart) <= LIMIT
        self.peers = list(dict.fromkeys(engine for engine, _ in self._turns if engine != "ours"))

    def _figures(self, key: tuple[str, str], figure: str) -> Any:
        return np.array([getattr(turn, figure) for turn in self._turns[key]])

    def _best(self, engine: str, figure: str) -> tuple[str, str]:
        """Return the setting of an engine with the best median."""
        keys = [key for key in self._turns if key[0] == engine]
        medians = [float(np.median(self._figures(key, figure))) for key in keys]
        return keys[medians.index(max(medians) if figure == "fps" else min(medians))]

    def ratio(self, peer: str, figure: str) -> list[float]:
        """Return the quartiles over rounds of how much better ours was: below, median, above.

        Frames a second and CPU time are those of our first setting and of the peer's with the most frames a second,
        latency that of the best setting of each.
        """
        if figure == "latency_s":
            own, other = self._best("ours", figure), self._best(peer, figure)
        else:
            own, other = next(iter(self._turns)), self._best(peer, "fps")
        ratios = self._figures(own, figure) / self._figures(other, figure)
        return [float(each) for each in np.quantile(ratios if figure == "fps" else 1 / ratios, (0.25, 0.5, 0.75))]

    def gain(self) -> str:
        """Return how much faster our first setting is as it is tuned, in frames a second and in CPU time."""
        first = next(iter(self._turns))
        tuned = first[0], f"{first[1]}, tuned"
        fps = self._figures(tuned, "fps") / self._figures(first, "fps")
        cpu = self._figures(first, "cpu_s") / self._figures(tuned, "cpu_s")
        low, middle, high = np.quantile(fps, (0.25, 0.5, 0.75))
        return f"{middle:.3f} ({low:.3f}-{high:.3f}), by CPU time {np.median(cpu):.3f}"

    def table(self) -> TextTable:
        rows = []
        for key, label, difference in zip(self._turns, self._labels, self._apart, strict=True):
            fps, cpu_s, latency_s = (self._figures(key, figure) for figure in FIGURES)
            low, middle, high = np.quantile(fps, (0.25, 0.5, 0.75))
            figures = f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{1e3 * np.median(cpu_s):.3f}"
            rows.append((label, *figures, f"{1e3 * np.median(latency_s):.3f}", f"{difference:.1e}"))
        columns = ("setting", "frames a second", "quartiles", "CPU ms a frame", "latency, ms", "outputs apart")
        return TextTable(self.name, columns, tuple(rows))

    def figures(self) -> dict[str, Any]:
        return {", ".join(key): [vars(turn) for turn in turns] for key, turns in self._turns.items()}


FIGURES = {"fps": "frames a second", "cpu_s": "CPU time", "latency_s": "latency"}


def summary(races: list[Race]) -> TextTable:
    """Return how much better ours is than each peer: median and quartiles, and geometric means of the medians."""
    peers = list(dict.fromkeys(peer for each in races for peer in each.peers))
    rows: list[tuple[str, ...]] = []
    medians: dict[tuple[str, str], list[float]] = {(peer, figure): [] for peer in peers for figure in FIGURES}
    for each in races:
        cells = []
        for peer, figure in medians:
            if peer not in each.peers:
                cells.append("")
                continue
            low, middle, high = each.ratio(peer, figure)
            medians[peer, figure].append(middle)
            cells.append(f"{middle:.3f} ({low:.3f}-{high:.3f})")
        rows.append((each.name, *cells, "" if each.agrees else "OUTPUTS DIFFER"))
    means = [f"{np.exp(np.mean(np.log(values))):.3f}, least {min(values):.3f}" for values in medians.values()]
    columns = ("network", *(f"{FIGURES[figure]}, over {peer}" for peer, figure in medians), "")
    load = f"load average {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}"
    title = f"Ours over the peers: above 1 ours is better ({load})"
    return TextTable(title, columns, (*rows, ("geometric mean", *means, "")))


if __name__ == "__main__":
    main()
