"""The scheduler `predpar`, and the predictor that `pred-profpar` asks: plans by learned seconds of segments.

The shipped predictor was trained on segments of random networks, on a simulated Edge TPU on PCIe that exists nowhere
(`benchmarks/train_predpar.py`). So what it says of a real device is no more than an estimate.

Next: `partition_search.py`, the two algorithms; `segment_predictor.py`, the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from tvm_pipeline import Device, Plan, Problem
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.planning import (
    THROUGHPUT,
    Partition,
    Scheduler,
    best_pipeline,
    by_predictions,
    even_cuts,
    known_cost_of,
)
from tvm_pipeline_papers.learned.partition_search import pred_profpar_partition, predpar_partition
from tvm_pipeline_papers.learned.segment_predictor import SegmentPredictor, read_predictor, segment_predictor
from tvm_pipeline_papers.learned.weights import Weights

SHIPPED = Path(__file__).with_name("predpar_extended.npz")


def predpar(problem: Problem) -> Plan:
    """Return PredPar's plan along the graph's own order: segments of the shortest predicted bottleneck that it finds.

    Source: Zou et al., MILCOM 2024. The predicted seconds choose the cuts for each number of devices. The plan's
    figures, and so the number of devices where it is free, are those of the devices' models, as for every scheduler.

    Raises:
        InfeasibleError: there are too few devices, or they cannot run or hold their segments.
        ModelError: the shipped weights are damaged.
        PlatformError: the devices are not Edge TPUs with the same model.
    """
    asked: list[SegmentPredictor] = []  # one for all numbers of devices

    def cuts_for(devices: Sequence[Device]) -> Sequence[int]:
        asked[:] = asked or [shipped_predictor(problem, devices, "predpar")]
        first = even_cuts(problem.graph, len(devices))
        return predpar_partition(asked[0].predicted, len(problem.graph), first).cuts

    return best_pipeline(problem, "predpar", cuts_for)


def pred_profpar(problem: Problem, devices: Sequence[Device], timed: Callable[[int, int], float]) -> Partition:
    """Return Pred-ProfPar's cuts of the graph's order, by predictions and by the seconds that `timed` measures.

    Source: Zou et al., MILCOM 2024.

    Raises what `shipped_predictor` raises.
    """
    predictor = shipped_predictor(problem, devices, "pred-profpar")
    first = even_cuts(problem.graph, len(devices))
    return pred_profpar_partition(predictor.predicted, timed, len(problem.graph), first)


def shipped_predictor(problem: Problem, devices: Sequence[Device], scheduler: str) -> SegmentPredictor:
    """Return the shipped predictor of a graph's segments on one of these devices.

    Raises:
        ModelError: the weights are damaged.
        PlatformError: the devices are not alike, or are none that the weights are for.
        ProfileError: they have neither measurements nor a model.
    """
    first = devices[0]
    for device in devices:
        if replace(device, name=first.name, target=first.target) != first:
            raise PlatformError(
                f"scheduler {scheduler}: devices {first.name} and {device.name} differ; it plans for equal devices: "
                "leave one of them out of the platform file, or take another scheduler"
            )
    costs = known_cost_of(problem, first)
    if not costs.is_modelled or math.isinf(costs.cached_bytes):
        raise PlatformError(
            f"scheduler {scheduler}: device {first.name} has no model with `cached_bytes`; its predictor was trained "
            "for Edge TPUs: take their model from profiles/platforms/, or another scheduler"
        )
    return segment_predictor(problem.graph, int(costs.cached_bytes), _shipped_weights())


@cache
def _shipped_weights() -> Weights:
    return read_predictor(SHIPPED)[0]


PREDPAR = Scheduler(predpar, "segments of Edge TPUs by learned seconds, after Zou et al.", THROUGHPUT)
PRED_PROFPAR = Scheduler(
    by_predictions, "measured segments that learned seconds chose, after Zou et al.", THROUGHPUT, cut=pred_profpar
)
