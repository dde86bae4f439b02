"""MLPerf LoadGen's verdict on this project, onnxruntime and OpenVINO: the same networks, weights, samples and cores.

    python benchmarks/loadgen.py                                  # four scenarios of three networks
    python benchmarks/loadgen.py --models resnet-50 --seconds 600 # as long as MLPerf's rules ask for
    python benchmarks/loadgen.py --short                          # one small network, briefly: proves that it works

Each turn is a test of LoadGen in a process of its own. The systems take turns in each round. A peer has the setting
that its makers advise for the scenario: for SingleStream all cores for one frame, else a frame for each core. Ours is
the plan of the engines that compete (`--engines`), these two among them. A ratio
is the median over rounds of what the two did in one round, as rates; above 1 ours is the better one.

LoadGen and the peers must be installed: pip install -e '.[loadgen,openvino,onnxruntime]'.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from tvm_pipeline_loadgen.scenarios import SCENARIOS, STREAMS, loadgen, run_test, settings_of
from tvm_pipeline_loadgen.under_test import UnderTest, samples

NETWORKS = ("mobilenet", "resnet-50", "centerface")
CONSOLE = Console(width=150)
Outputs = dict[str, Any]
RunOne = Callable[[Mapping[str, Any]], Outputs]


class Answer(NamedTuple):
    outputs: Outputs
    tag: Any


class Workers:
    """An engine without a queue of its own: each thread runs one frame after another."""

    def __init__(self, runs: Sequence[RunOne]) -> None:
        self._frames: queue.Queue[tuple[Mapping[str, Any], Any] | None] = queue.Queue(2 * len(runs))
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._workers = [threading.Thread(target=self._work, args=(run,), daemon=True) for run in runs]
        for worker in self._workers:
            worker.start()

    def _work(self, run: RunOne) -> None:
        while (frame := self._frames.get()) is not None:
            self._answers.put(Answer(run(frame[0]), frame[1]))
        self._answers.put(None)

    def submit(self, inputs: Mapping[str, Any], *, tag: Any = None) -> None:
        self._frames.put((inputs, tag))

    def results(self) -> Iterator[Answer]:
        ended = 0
        while ended < len(self._workers):
            if (answer := self._answers.get()) is None:
                ended += 1
            else:
                yield answer

    def drain(self) -> None:
        for _ in self._workers:
            self._frames.put(None)


def onnxruntime_workers(network: str, cores: int, one_frame: bool) -> Workers:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = cores if one_frame else 1, 1
    session = onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Any]) -> Outputs:
        return dict(zip(names, session.run(None, dict(inputs)), strict=True))

    return Workers([run] * (1 if one_frame else cores))


def openvino_workers(network: str, cores: int, one_frame: bool) -> Workers:
    import openvino as ov

    hints = {
        "PERFORMANCE_HINT": "LATENCY" if one_frame else "THROUGHPUT",
        "INFERENCE_NUM_THREADS": cores,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    core = ov.Core()
    model = core.compile_model(core.read_model(network), "CPU", hints)
    requests = [model.create_infer_request() for _ in range(model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))]

    def runs(request: Any) -> RunOne:
        def run(inputs: Mapping[str, Any]) -> Outputs:
            found = request.infer(dict(inputs))
            return {output.any_name: found[output].copy() for output in model.outputs}

        return run

    return Workers([runs(request) for request in requests])


PEERS = {"onnxruntime": onnxruntime_workers, "OpenVINO": openvino_workers}


def take_turn(name: str, file: str, samples_file: str, scenario: str, seconds: str, folder: str) -> None:
    """Run one test in this process, which `turn` has started, and print the verdict as JSON."""
    with np.load(samples_file) as saved:
        names = sorted({key.partition(":")[2] for key in saved.files})
        count = len(saved.files) // len(names)
        frames = [{name: saved[f"{number}:{name}"] for name in names} for number in range(count)]
    with ExitStack() as opened:
        if name == "ours":
            import tvm_pipeline as tp

            bundle = opened.enter_context(tp.open(file)).bundle
            system: Any = opened.enter_context(tp.Pipeline(bundle.compiled, bundle.plan, bundle.platform))
        else:
            system = PEERS[name](file, len(os.sched_getaffinity(0)), scenario == "SingleStream")
        under_test = opened.enter_context(UnderTest(system, frames))
        settings = settings_of(scenario, float(seconds), under_test.pace())
        verdict = run_test(under_test, settings, scenario, Path(folder))
    print(json.dumps({"valid": verdict.valid, "score": verdict.score, "speed": verdict.speed}))


def turn(name: str, *arguments: object) -> dict[str, Any]:
    """Run one test in a process of its own, and return its verdict."""
    root = Path(__file__).parents[1]
    places = root / "benchmarks", root, root / "plugins"
    command = [sys.executable, "-c", "import sys, loadgen; loadgen.take_turn(*sys.argv[1:])", name]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def race(name: str, options: argparse.Namespace) -> None:
    """Test a network by every system in every scenario, in turns, and print the table."""
    from networks import load_lively
    from peers import network_file

    import tvm_pipeline as tp
    from tvm_pipeline.report import TextTable
    from tvm_pipeline.runtime.comparison import in_turn

    model = load_lively(name)
    systems = ["ours", *(() if options.short else PEERS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        network = network_file(model, folder)
        plans = {}
        for objective in ("latency", "throughput"):
            asked = {"engines": options.engines, "objective": objective, "verify_s": options.verify}
            source = model if model.format == "onnx" else network  # engines take files of ONNX
            with tp.compile(source, devices="cpu", **asked) as pipe:
                pipe.save(folder / f"{objective}.tar")
                plans[objective] = repr(pipe)
                frames = samples(pipe.bundle.graph)
        saved = folder / "samples.npz"
        np.savez(saved, **{f"{number}:{key}": array for number, one in enumerate(frames) for key, array in one.items()})
        for objective, plan in plans.items():
            CONSOLE.print(f"{objective}: {plan}", highlight=False, markup=False)
        for scenario in options.scenarios:
            rows = []
            objective = "latency" if scenario == "SingleStream" else "throughput"
            found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
            for round_ in range(options.rounds):
                for system in in_turn(systems, round_):
                    file = folder / f"{objective}.tar" if system == "ours" else network
                    logs = folder / f"{scenario}-{system}-{round_}"
                    found[system].append(turn(system, file, saved, scenario, options.seconds, logs))
            for system, turns in found.items():
                ratios = [mine["speed"] / theirs["speed"] for mine, theirs in zip(found["ours"], turns, strict=True)]
                score = median(each["score"] for each in turns)
                rows.append(
                    (
                        scenario,
                        system,
                        f"{sum(each['valid'] for each in turns)} of {len(turns)}",
                        f"{1e3 * score:.3g} ms" if scenario in STREAMS else f"{score:.4g} fps",
                        "" if system == "ours" else f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    )
                )
            columns = ("scenario", "system", "valid", "score", "ours over it, least to greatest")
            CONSOLE.print(TextTable(f"{name}, tests of {options.seconds:g} s", columns, tuple(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), help="names that networks.py knows")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--engines", default="tvm,openvino,onnxruntime", help="that compete; tvm is TVM alone")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a test, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="one small network, briefly: proves that it works")
    options = parser.parse_args()
    options.verify = 10.0
    loadgen()
    if options.short:
        options.models, options.seconds, options.rounds, options.verify = ["branching"], 0.2, 1, 0.0
        options.engines = "tvm"
        options.scenarios = ["SingleStream", "Offline"]  # one for each plan
    for name in options.models:
        race(name, options)


if __name__ == "__main__":
    main()
