"""How well the constants of a device's model are learned from a few measured stages.

    python benchmarks/calibration.py          # 20 boards, about four minutes
    python benchmarks/calibration.py --short  # 2 boards and few networks, for CI

1. Hidden boards (`hidden_device.py`), each with constants of its own around those of the shipped model of an Edge TPU
   on PCIe (a factor of two either way), and with what such a model cannot say. Stages of four networks are measured,
   and all segments of the other Keras networks are predicted. The error is the mean of the absolute relative errors,
   over segments, networks and boards. Required: at most 10 % from 20 stages that the calibration chose, half of them by
   the shipped model and half by the fit to these. Beside it: stages drawn from the same candidates, the same constants
   without a prior, and the shipped model times one ratio, that of the medians. `cross-validated` is what the
   calibration itself said of its error.
2. The same boards: the bottleneck of plans from the tables of the two models over the least possible one.
3. Layers of two CPUs (`profiles/layer_times`), which are real measurements: segments of three networks are measured,
   and segments of the others are predicted by a roofline with a factor for each kind of operator. The shipped roofline
   is the mean of both CPUs' in the table of factors; here the prior is the other CPU's.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from edgetpu_model import as_tflite
from hidden_device import NOISE, HiddenDevice
from planner import coral, figure, keras, show
from rich.progress import track

from tvm_pipeline.calibration.fit import calibrated
from tvm_pipeline.calibration.posterior import posterior, prior_of
from tvm_pipeline.calibration.shipped import CPU_CORE
from tvm_pipeline.calibration.stage_choice import Candidate, candidates, next_stages
from tvm_pipeline.calibration.stage_time import StageTime
from tvm_pipeline.core.device_model import DeviceModel, KindFactor
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.modelled_stage import Floats, StageTable, WorkTable, stage_table
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.planning.corrected import cheapest_segments, model_seconds
from tvm_pipeline.profiling.layer_times import LayerTime, LayerTimes, read_layer_times

LAYER_TIMES = Path(__file__).parents[1] / "profiles/layer_times"
MEASURED = ("ResNet50", "MobileNetV2", "InceptionV3", "DenseNet121")
UNSEEN = (
    *("DenseNet169", "DenseNet201", "InceptionResNetV2", "ResNet101", "ResNet101V2", "ResNet152", "ResNet152V2"),
    *("ResNet50V2", "Xception"),
)
SHORT_UNSEEN = ("ResNet50V2", "Xception")
OTHER_BOARD = 0.7
COUNTS = (5, 10, 20, 50)
REQUIRED = 0.10  # of 20 chosen stages
STAGES = (2, 4, 6, 8)
LAYER_NETWORKS = 3  # whose layers are measured

graph_of = cache(lambda name: as_tflite(keras(name)))


# Hidden boards


@dataclass(frozen=True)
class Board:
    """A hidden board with the true seconds of all segments of some networks."""

    device: HiddenDevice
    true_s: dict[str, Floats]

    @classmethod
    def of(cls, shipped: DeviceModel, seed: int, unseen: Sequence[str]) -> Board:
        device = HiddenDevice.drawn(shipped, seed, other_board=OTHER_BOARD)
        return cls(device, {name: device.seconds(graph_of(name)) for name in (*MEASURED, *unseen)})

    def measured(self, stages: Sequence[Candidate], chance: np.random.Generator) -> list[StageTime]:
        """Return the stages as they are measured on the board; each is a segment of its network's order."""
        found = []
        for stage in stages:
            start = stage.graph.edges.index[stage.operators[0]]
            seconds = self.true_s[stage.graph.name][start, start + len(stage.operators)]
            found.append(StageTime(stage.graph, stage.operators, seconds * chance.normal(1.0, NOISE), NOISE))
        return found

    def error(self, model: DeviceModel, name: str) -> float:
        """Return the mean absolute relative error of a model, over all segments of a network."""
        true_s = self.true_s[name]
        some = np.isfinite(true_s)
        return float(np.mean(np.abs(predicted(model, name)[some] / true_s[some] - 1)))

    def bottleneck(self, model: DeviceModel, name: str, stages: int) -> float:
        """Return the true bottleneck of the best segments by a model, over the least that is possible."""
        true_s = self.true_s[name]
        ours, best = (cheapest_segments(table, stages, np.maximum) for table in (predicted(model, name), true_s))
        return float(max(true_s[segment] for segment in ours) / max(true_s[segment] for segment in best))


def predicted(model: DeviceModel, name: str) -> Floats:
    """Return the seconds of all segments of a network by a model, as the planners price them."""
    platform = coral(1)
    graph, platform = graph_of(name), replace(platform, devices=(replace(platform.devices[0], model=model),))
    return model_seconds(Problem(graph, platform, unmeasured(graph)), platform.devices)


def chosen(shipped: DeviceModel, stages: list[Candidate], count: int, board: Board, seed: int) -> list[StageTime]:
    """Return measured stages as `tvm-pipeline calibrate` chooses them: some by the shipped model, others by the fit."""
    chance = np.random.default_rng(seed)
    times = board.measured(first_choice(shipped, tuple(stages), max(5, count // 2)), chance)
    if count > len(times):
        fitted = calibrated(shipped, times).model
        times += board.measured(next_stages(fitted, stages, count - len(times), times), chance)
    return times


@cache
def first_choice(shipped: DeviceModel, stages: tuple[Candidate, ...], count: int) -> list[Candidate]:
    return next_stages(shipped, stages, count)


def drawn(stages: list[Candidate], count: int, board: Board, seed: int) -> list[StageTime]:
    chance = np.random.default_rng(seed)
    return board.measured([stages[index] for index in chance.permutation(len(stages))[:count]], chance)


def without_prior(shipped: DeviceModel, times: Sequence[StageTime]) -> DeviceModel:
    """Return the model that least squares fit to the stages: the shipped constants are no more than a start."""
    table = stage_table([(time.graph, time.operators) for time in times])
    wide = prior_of(shipped, table.work.kinds)
    wide = replace(wide, covariance=1e4 * wide.covariance)
    return posterior(wide, table, np.array([t.seconds for t in times]), np.full(len(times), NOISE)).model


def one_ratio(shipped: DeviceModel, times: Sequence[StageTime]) -> float:
    table = stage_table([(time.graph, time.operators) for time in times])
    return float(np.median(np.array([time.seconds for time in times]) / table.seconds(shipped)))


def slower(model: DeviceModel, ratio: float) -> DeviceModel:
    """Return the model of a device that takes so many times as long for everything."""
    wide = prior_of(model, ())
    sign = np.array([1.0 if name in ("call_s", "operator_s") else -1.0 for name in wide.names])
    return wide.at(wide.centre + np.log(ratio) * sign * np.array([name != "cached_bytes" for name in wide.names]))


def hidden_boards(seeds: Sequence[int], unseen: Sequence[str], counts: Sequence[int]) -> list[tuple[str, str, str]]:
    """Print the errors and the bottlenecks; return rows of the summary."""
    shipped = coral(1).devices[0].model
    if shipped is None:
        raise SystemExit("coral-pcie-8.toml has no model to begin with")
    stages = candidates([graph_of(name) for name in MEASURED])
    errors: dict[tuple[int, str], list[float]] = defaultdict(list)
    plans: dict[tuple[int, str], list[float]] = defaultdict(list)
    refused = 0
    for seed in track(seeds, "boards", transient=True):
        board = Board.of(shipped, seed, unseen)
        errors[0, "prior"] += [board.error(shipped, name) for name in unseen]
        for count in counts:
            try:
                times = chosen(shipped, stages, count, board, seed)
                found = calibrated(shipped, times)
                others = drawn(stages, count, board, seed)
                by_chance = calibrated(shipped, others)
            except ProfileError as error:
                print(f"board {seed}, {count} stages: {error}")
                refused += 1
                continue
            models = {
                "chosen": found.model,
                "drawn": by_chance.model,
                "chosen, without prior": without_prior(shipped, times),
                "chosen, one ratio": slower(shipped, one_ratio(shipped, times)),
            }
            for way, model in models.items():
                errors[count, way] += [board.error(model, name) for name in unseen]
            errors[count, "cross-validated"].append(found.error)
            errors[count, "cross-validated, drawn"].append(by_chance.error)
            if count == 20:
                for name in unseen:
                    for parts in STAGES:
                        plans[parts, "prior"].append(board.bottleneck(shipped, name, parts))
                        plans[parts, "calibrated"].append(board.bottleneck(found.model, name, parts))
    columns = list(dict.fromkeys(way for _, way in errors if way != "prior"))
    rows = [(count, *(f"{statistics.mean(errors[count, way]):.1%}" for way in columns)) for count in counts]
    prior = statistics.mean(errors[0, "prior"])
    show(
        f"Error on {len(unseen)} unseen networks, {len(seeds)} boards; the shipped model: {prior:.1%}",
        ("stages", *columns),
        rows,
    )
    worst = {way: f"{max(errors[20, way]):.0%}" for way in columns}
    print(
        "The worst network and board from 20 stages:", ", ".join(f"{way} {most}" for way, most in worst.items()), "\n"
    )
    rows = [(parts, *(median_and_worst(plans[parts, way]) for way in ("prior", "calibrated"))) for parts in STAGES]
    title = "Bottleneck over the least possible, from 20 chosen stages: median, worst"
    show(title, ("stages of the plan", "shipped model", "calibrated"), rows)
    return [
        figure("error on unseen networks, 20 chosen stages", statistics.mean(errors[20, "chosen"]), percent, REQUIRED),
        figure("the same of the shipped model", prior, percent),
        figure("calibrations that were refused", refused, str, 0),
    ]


def median_and_worst(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f}, {max(ratios):.2f}" if ratios else ""


def percent(value: float) -> str:
    return f"{value:.1%}"


# Layers of real CPUs


def table_of(stages: Sequence[Sequence[LayerTime]]) -> tuple[StageTable, Floats]:
    """Return layers in a row as stages, with their measured seconds; inputs and outputs of a stage cost nothing."""
    works = [layer.work for stage in stages for layer in stage]
    count = np.array([len(stage) for stage in stages], np.float64)
    nothing = np.zeros(len(stages))
    stage = np.repeat(np.arange(len(stages)), count.astype(np.int64))
    table = StageTable(count, nothing, nothing, nothing, nothing, WorkTable.of(works), stage)
    return table, np.array([sum(layer.seconds for layer in stage) for stage in stages])


def cpu_roofline(times: LayerTimes) -> DeviceModel:
    """Return the roofline of a CPU by all its layers; the factors of plain convolutions and of moves are 1."""
    table, seconds = table_of([[layer] for layers in times.networks.values() for layer in layers])
    free = prior_of(replace(CPU_CORE, call_s=0.0, kind=()), table.work.kinds)
    fixed = ("factor of conv2d kxk float32", "factor of elementwise float32")
    free = replace(free, covariance=np.diag([1e-8 if name in fixed else 100.0 for name in free.names]))
    return posterior(free, table, seconds, np.full(len(seconds), 0.02)).model


def drawn_segments(layers: Sequence[LayerTime], count: int, chance: np.random.Generator) -> list[list[LayerTime]]:
    """Return segments of a network, short and long."""
    found = []
    for _ in range(count):
        length = max(1, round(float(np.exp(chance.uniform(0, np.log(len(layers)))))))
        start = int(chance.integers(0, len(layers) - length + 1))
        found.append(list(layers[start : start + length]))
    return found


def real_layers(draws: int, counts: Sequence[int]) -> None:
    """Print the shipped roofline's figures as they are fitted here, and its errors when it is calibrated."""
    cpus = {path.stem: read_layer_times(path) for path in sorted(LAYER_TIMES.glob("*.json"))}
    models = {name: cpu_roofline(times) for name, times in cpus.items()}
    rows = [
        (name, f"{model.macs_per_s:.3g}", f"{model.bytes_per_s:.3g}", f"{model.operator_s:.2g}")
        for name, model in models.items()
    ]
    show("Rooflines of the CPUs", ("CPU", "macs_per_s", "bytes_per_s", "operator_s"), rows)
    show_factors(models)
    errors: dict[tuple[int, str], list[float]] = defaultdict(list)
    for name, times in cpus.items():
        (other,) = (model for another, model in models.items() if another != name)
        for draw in range(draws):
            transferred(times, other, counts, np.random.default_rng(draw), errors)
    columns = list(dict.fromkeys(way for _, way in errors))
    show(
        f"Error on unseen networks of real CPUs; the prior is the other CPU's roofline; {draws} draws of 3 networks",
        ("measured segments", *columns),
        [(count, *(f"{statistics.mean(errors[count, way]):.1%}" for way in columns)) for count in (0, *counts)],
    )


def show_factors(models: Mapping[str, DeviceModel]) -> None:
    factors = {name: {kind.name: kind.factor for kind in model.kind} for name, model in models.items()}
    shipped = {kind.name: kind.factor for kind in CPU_CORE.kind}
    rows = []
    for kind in sorted(shipped):
        found = [factors[name][kind] for name in models]
        rows.append((kind, *(f"{f:.2f}" for f in found), f"{statistics.geometric_mean(found):.2f}", shipped[kind]))
    show("Factors of kinds", ("kind", *models, "mean", "shipped"), rows)


def transferred(
    times: LayerTimes,
    other: DeviceModel,
    counts: Sequence[int],
    chance: np.random.Generator,
    errors: dict[tuple[int, str], list[float]],
) -> None:
    """Add the errors on networks that were not measured, from segments of some that were."""
    networks = [*chance.permutation(list(times.networks))]
    known, unseen = networks[:LAYER_NETWORKS], networks[LAYER_NETWORKS:]
    pool = [stage for name in known for stage in drawn_segments(times.networks[name], 50, chance)]
    tests = [
        stage for name in unseen for stage in (times.networks[name], *drawn_segments(times.networks[name], 30, chance))
    ]
    table, true_s = table_of(tests)
    alike = replace(other, kind=tuple(KindFactor(kind.name, 1.0) for kind in other.kind))
    shuffled = [pool[index] for index in chance.permutation(len(pool))]
    for way, prior, wider in (("with prior", other, 1.0), ("without prior", alike, 1e2)):
        errors[0, way].append(float(np.mean(np.abs(table.seconds(prior) / true_s - 1))))
        for count in counts:
            stages, seconds = table_of(shuffled[:count])
            before = prior_of(prior, stages.work.kinds)
            before = replace(before, covariance=wider * before.covariance)
            found = posterior(before, stages, seconds, np.full(count, 0.02)).model
            errors[count, way].append(float(np.mean(np.abs(table.seconds(found) / true_s - 1))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="2 boards and few networks, for CI")
    options = parser.parse_args()
    boards = (range(2), SHORT_UNSEEN, (5, 20)) if options.short else (range(20), UNSEEN, COUNTS)
    summary = hidden_boards(*boards)
    real_layers(*((2, (20,)) if options.short else (20, COUNTS)))
    show("Calibration", ("figure", "measured", "required, at most"), summary)


if __name__ == "__main__":
    main()
