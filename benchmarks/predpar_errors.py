"""How far predictors of segment latency are off, and the simple ones that a learned one must beat.

A predictor is a function from `predpar_data.Labelled` segments of a network to their seconds. Next: `train_predpar.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hidden_device import HiddenDevice
from planner import coral, show
from predpar_data import Labelled
from scipy.optimize import nnls

from tvm_pipeline.calibration.fit import calibrated
from tvm_pipeline.calibration.stage_time import StageTime
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.planning.corrected import model_seconds
from tvm_pipeline.planning.search.cuts import Floats
from tvm_pipeline_papers.learned.segment_features import KINDS, graph_features
from tvm_pipeline_papers.learned.segment_predictor import segment_predictor
from tvm_pipeline_papers.learned.weights import Weights

Predictor = Callable[[Labelled], Floats]

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # a row of the table begins at each of these numbers of operators


def by_network(weights: Weights, cached_bytes: int) -> Predictor:
    """Return the predictor of trained weights."""

    def predicted(one: Labelled) -> Floats:
        asked = segment_predictor(one.graph, cached_bytes, weights)
        asked.ask(one.segments)
        return np.array([asked.known[segment] for segment in one.segments])

    return predicted


def by_model(model: DeviceModel) -> Predictor:
    """Return the seconds of a model of the device."""
    platform = coral(1)
    platform = replace(platform, devices=(replace(platform.devices[0], model=model),))

    def predicted(one: Labelled) -> Floats:
        problem = Problem(one.graph, platform, unmeasured(one.graph))
        return _picked(model_seconds(problem, platform.devices), one)

    return predicted


def refitted(prior: DeviceModel, learned: Sequence[Labelled]) -> DeviceModel:
    """Return the model whose constants are fitted to a segment of each network, as `tvm-pipeline calibrate` does."""
    times = []
    for one in learned:
        start, end = one.segments[len(one.segments) // 2]
        names = tuple(operator.name for operator in one.graph.operators[start:end])
        times.append(StageTime(one.graph, names, float(one.seconds[len(one.segments) // 2])))
    return calibrated(prior, times).model


@dataclass(frozen=True)
class WithoutResidual(HiddenDevice):
    """A board whose operators are all as fast as their kind: what is known of a network that was never measured."""

    def _residual(self, graph: OperatorGraph, operator: Operator) -> float:
        return 1.0


def by_board(device: HiddenDevice) -> Predictor:
    """Return the seconds of the board itself, except for what is each operator's own."""
    known = WithoutResidual(device.model, device.seed, device.used, device.overhead)
    return lambda one: _picked(known.seconds(one.graph), one)


def by_least_squares(learned: Sequence[Labelled], cached_bytes: int) -> Predictor:
    """Return a sum of rates that are not negative: a call, bytes across the cuts and beyond the cache, and by kind.

    Of each kind: its operators, their multiply-accumulates, and the bytes that they write. Errors count relatively.
    """
    seconds = np.concatenate([one.seconds for one in learned])
    terms = np.concatenate([_terms(one, cached_bytes) for one in learned]) / seconds[:, None]
    size = np.maximum(terms.max(axis=0), np.finfo(float).tiny)
    rates = nnls(terms / size, np.ones(len(terms)))[0] / size
    return lambda one: _terms(one, cached_bytes) @ rates


def _terms(one: Labelled, cached_bytes: int) -> Floats:
    """Return what the seconds of each segment are summed up from, as B x (3 KINDS + 4)."""
    features = graph_features(one.graph, cached_bytes, extended=False)
    figures = np.array([(1, operator.macs, operator.output_bytes) for operator in one.graph.operators], np.float64)
    of_kind = np.eye(KINDS)[features.kind]
    before = np.cumsum((of_kind[:, :, None] * figures[:, None, :]).reshape(len(figures), -1), axis=0)
    before = np.vstack([np.zeros(before.shape[1]), before])
    starts, ends = np.array(one.segments).T
    params = features.params_before[ends] - features.params_before[starts]
    across = features.bytes_across
    whole = (np.ones(len(starts)), across[starts], across[ends], np.maximum(0, params - cached_bytes))
    return np.column_stack([before[ends] - before[starts], *whole])


def _picked(table_s: Floats, one: Labelled) -> Floats:
    starts, ends = np.array(one.segments).T
    picked: Floats = table_s[starts, ends]
    return picked


def errors(predictor: Predictor, data: Sequence[Labelled]) -> Floats:
    """Return predicted / measured - 1 of all segments."""
    return np.concatenate([predictor(one) / one.seconds - 1 for one in data])


def tell(
    title: str, predictors: Mapping[str, Predictor], tested: Sequence[Labelled], others: Sequence[Labelled]
) -> dict[str, tuple[float, float]]:
    """Show and return the mean errors on both sets of networks, and show those on the first by a segment's length.

    The one on the second set is the mean over networks, NaN where there are none.
    """
    longs = np.concatenate([[end - start for start, end in one.segments] for one in tested])
    row_of = np.searchsorted(LENGTHS, longs, "right") - 1
    rows, means = [], {}
    for name, predictor in predictors.items():
        found = errors(predictor, tested)
        by_length = [np.abs(found[row_of == index]) for index in range(len(LENGTHS))]
        on_others = [float(np.abs(errors(predictor, [one])).mean()) for one in others]
        means[name] = float(np.abs(found).mean()), statistics.mean(on_others) if on_others else math.nan
        figures = (
            means[name][0],
            np.median(found),
            means[name][1],
            *(e.mean() if len(e) else math.nan for e in by_length),
        )
        rows.append((name, *("-" if math.isnan(figure) else f"{figure:.1%}" for figure in figures)))
    show(title, ("predictor", "test", "its median", "Keras", *(f"from {length}" for length in LENGTHS)), rows)
    return means
