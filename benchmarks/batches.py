"""What calls of several frames gain: 1, 2, 4 and 8 frames a call, predicted against measured, and the choice.

    python benchmarks/batches.py                     # networks of the package onnx, by TVM
    python benchmarks/batches.py --engines openvino
    python benchmarks/batches.py --short             # a small network, briefly: proves that it works

For each network and each batch: compile, profile, plan and verify as `tvm-pipeline compile --batch` does, which
compares the frames of calls with frames alone. Then the chosen plans run in turns. `auto` takes the fastest batch that
it measured; its loss is how much faster the best one was in these turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import networks
import numpy as np
from rich.console import Console
from rich.table import Table

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import Problem
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import shown_stages
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.runtime.comparison import runner, side_by_side
from tvm_pipeline.runtime.verification import VERIFY_S
from tvm_pipeline.workflow.batches import AUTO, Planned, best_of, compared, planned_batch
from tvm_pipeline.workflow.steps import REPEATS, Compiled, compile_source, decide, measured_profile

MODELS = (
    *("light_bvlc_alexnet", "light_zfnet512", "light_squeezenet", "light_resnet50", "light_shufflenet"),
    *("light_inception_v2", "light_densenet121", "resnet-18"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="names that networks.py knows, or files")
    parser.add_argument("--engines", default="", help="as `compile --engines`")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each plan in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    batches, repeats, verify_s, folder = AUTO, REPEATS, VERIFY_S, tempfile.TemporaryDirectory()
    if arguments.short:
        arguments.models = [str(write_picture_net(Path(folder.name) / "net.onnx"))]
        arguments.seconds, arguments.rounds = 0.05, 1
        batches, repeats, verify_s = AUTO[:1], 4, 0.0
    columns = ("network", "frames a call", "plan", "predicted", "measured", "error", "over 1", "difference", "auto")
    table = Table(*columns)
    errors: list[float] = []
    lost: list[float] = []
    equal: list[bool] = []

    def recompiled(model: Model) -> Compiled:
        return compile_source(model, engines=arguments.engines)

    def decided(made: Compiled, problem: Problem) -> Planned:
        decision, profile = decide(problem, compiled=made.compiled, verify_s=verify_s)
        return Planned(made, replace(problem, profile=profile), decision)

    for name in arguments.models:
        model = networks.load(name)
        made = recompiled(model)
        alone = decided(made, Problem(made.compiled.graph, made.platform, measured_profile(made, repeats=repeats)))
        found = [alone]
        for batch in batches:
            try:
                found.append(planned_batch(model, alone, batch, recompiled, decided))
            except PipelineError as error:
                print(f"{name}: {error}")
                break
        chosen = best_of(found, verify_s)
        runs = [(one.plan, runner(one.made.compiled, one.made.platform)) for one in found]
        measured = side_by_side(runs, seconds=arguments.seconds, rounds=arguments.rounds)
        rates = [one.throughput_fps for one in measured]
        for one, ran in zip(found, measured, strict=True):
            batch, difference = one.plan.batch, compared(alone, one) if one is not alone else 0.0
            errors.append(ran.prediction_error)
            equal.append(difference == 0.0)
            is_chosen = one.plan.batch == chosen.plan.batch
            if is_chosen:
                lost.append(1 - ran.throughput_fps / max(rates))
            table.add_row(
                *(name, str(batch), shown_stages(one.plan.stages), f"{one.plan.predicted.throughput_fps:.1f}"),
                *(f"{ran.throughput_fps:.1f} ± {ran.spread:.0%}", f"{ran.prediction_error:+.1%}"),
                *(f"{ran.throughput_fps / rates[0]:.2f}", f"{difference:.0e}" if difference else "none"),
                "chosen" if is_chosen else "",
            )
        for one in found:
            one.made.compiled.close()
    console = Console(width=160)
    console.print(table)
    sizes = np.abs(errors)
    console.print(f"error of the prediction: median {np.median(sizes):.1%}, worst {sizes.max():.1%}")
    console.print(f"frames equal bit for bit: {sum(equal)} of {len(equal)} plans")
    console.print(f"what `auto` loses to the best batch: median {statistics.median(lost):.1%}, worst {max(lost):.1%}")


if __name__ == "__main__":
    main()
