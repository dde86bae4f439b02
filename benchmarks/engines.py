"""Engines that compete for each stage, interleaved with TVM alone, OpenVINO and onnxruntime: one file, the same cores.

    python benchmarks/engines.py                               # the networks of peers.py, all cores
    python benchmarks/engines.py --cores 1                     # one core
    python benchmarks/engines.py --models squeezenet mobilenet
    python benchmarks/engines.py --short                       # one small network, for CI

Ours is the plan that `compile --engines tvm,openvino,onnxruntime` chooses and verifies, TVM alone that of
`--engines tvm`. OpenVINO and onnxruntime run in separate processes, each in its best setting, as in peers.py,
which says what a ratio is. Both are those of this environment. The exit status is 1 where outputs differ by
more than 1e-3 of the largest value.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from networks import load_lively
from peer_engines import SETTINGS
from peers import CONSOLE, NETWORKS, Ours, Peer, Race, chosen_plan, host_platform, network_file, save_inputs, summary

from tvm_pipeline import settle_platform
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.core.plan import describe
from tvm_pipeline.frontends import load
from tvm_pipeline.runtime.comparison import in_turn
from tvm_pipeline.runtime.verification import VERIFY_S
from tvm_pipeline.workflow.engines import with_engines
from tvm_pipeline.workflow.steps import REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), help="as in peers.py")
    parser.add_argument(
        "--cores", type=int, default=len(os.sched_getaffinity(0)), help="the last so many of those here"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--short", action="store_true", help="one small network, briefly: proves that it works")
    options = parser.parse_args()
    if options.short:
        options.models, options.rounds, options.seconds, options.cores = ["branching"], 2, 0.05, 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
    races = []
    for name in options.models:
        races.append(race(name, options))
        CONSOLE.print(races[-1].table())
    CONSOLE.print(summary(races))
    raise SystemExit(not all(each.agrees for each in races))


def race(name: str, options: argparse.Namespace) -> Race:
    """Choose both plans, then run them interleaved with the peers."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as opened:
        model, (_, host) = load_lively(name), host_platform()
        file = network_file(model, Path(temporary))
        if model.format != "onnx":
            model = load(file)
        frame = [noise(Port.of(tensor)) for tensor in model.inputs]
        save_inputs(file, frame)
        settings: list[Ours | Peer] = []
        for engine, engines in (("ours", "tvm,openvino,onnxruntime"), ("TVM alone", "tvm")):
            backend, platform = settle_platform(with_engines(host, engines))
            compiled = opened.enter_context(closing(backend.compile(model, platform.devices)))
            plan = chosen_plan(
                f"{name}, {engines}", compiled, platform, *((0.05, 4) if options.short else (VERIFY_S, REPEATS))
            )
            settings.append(opened.enter_context(closing(Ours(describe(plan), compiled, plan, platform, frame))))
            settings[-1].engine = engine
        for engine in ("OpenVINO", "onnxruntime"):
            for setting in SETTINGS[engine][: 1 if options.cores == 1 else None]:
                settings.append(opened.enter_context(closing(Peer(engine, setting, options.cores, file, None))))
        turns = [[] for _ in settings]
        for round_ in range(options.rounds):
            for index in in_turn(range(len(settings)), round_):
                turns[index].append(settings[index].take_turn(options.seconds))
        return Race(name, settings, turns, exact=True)


if __name__ == "__main__":
    main()
