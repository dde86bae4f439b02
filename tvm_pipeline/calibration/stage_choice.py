"""Which stages to measure, so that a device's constants become known, and what further measurements would tell.

Each stage is worth by how much it is expected to lower the variance of the seconds that the model predicts, in the mean
over all candidates (V-optimal design), a second of measuring. The best is chosen, then the best beside it, and so on.
How much a constant changes a stage's seconds depends on the constants themselves: parameters that fit the cache tell
nothing of the rate at which others are fetched. So the worth is the mean over some boards that are held possible.

Chaloner and Verdinelli, "Bayesian experimental design: a review", Statistical Science 10(3), 1995. Next: `fit.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tvm_pipeline.calibration.fit import Calibration, noise_of, stage_name
from tvm_pipeline.calibration.posterior import deviation_of, prior_of
from tvm_pipeline.calibration.stage_time import StageTime
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.partition import longest_stages
from tvm_pipeline.cost.modelled_stage import Floats, stage_table

STAGE_S = 5.0  # of compiling a stage and of warming up, before it is timed
RUNS = 100  # of a stage that is timed
NOISE = 0.02  # that a measurement is thought to have
_BOARDS = 12  # that are held possible
_EVEN = (2, 3, 4, 6, 8)  # stages of even cuts
_HEAVY = 4  # single operators of a network: those with most work, and those with most parameters
MOST_SENTENCES = 5  # about constants
_WORTH_TELLING = 0.02  # of the expected error, relative to it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stage that can be measured."""

    graph: OperatorGraph
    operators: tuple[str, ...]

    @property
    def name(self) -> str:
        """The stage as messages name it, such as `resnet-18: conv ... add (12)`."""
        return stage_name(self.graph, self.operators)


def candidates(graphs: Sequence[OperatorGraph], count: int = 60, seed: int = 0) -> list[Candidate]:
    """Return stages of networks that may tell something: each network gives up to about `count`.

    They are the whole network, the stages of even cuts, its heaviest operators alone, and random segments of its order,
    short and long. Operators of the host are in none.

    Args:
        seed: of the random segments.
    """
    chance = np.random.default_rng(seed)
    return [
        Candidate(graph, operators) for graph in graphs for operators in dict.fromkeys(_stages(graph, count, chance))
    ]


def _stages(graph: OperatorGraph, count: int, chance: np.random.Generator) -> Iterator[tuple[str, ...]]:
    operators = [operator for operator in graph.operators if not operator.is_host]
    names = [operator.name for operator in operators]
    if not names:
        return
    length = len(names)
    segments = [(0, length)]
    for parts in _EVEN:
        ends = [round(length * part / parts) for part in range(parts + 1)]
        segments += pairwise(ends)
    for figures in ([operator.macs for operator in operators], [operator.param_bytes for operator in operators]):
        heaviest = sorted(range(length), key=figures.__getitem__)[-_HEAVY:]
        segments += [(index, index + 1) for index in heaviest]
    while len(segments) < count:
        many = max(1, round(math.exp(chance.uniform(0, math.log(length)))))
        start = int(chance.integers(0, length - many + 1))
        segments.append((start, start + many))
    for start, end in segments:
        # A segment of the order between operators of the host may be no legal stage; its longest part is one.
        if end > start:
            longest = max(longest_stages(graph, names[start:end]), key=lambda stage: len(stage))
            yield tuple(longest)


def next_stages(
    model: DeviceModel, candidates: Sequence[Candidate], count: int, measured: Sequence[StageTime] = ()
) -> list[Candidate]:
    """Return up to `count` candidates to measure next, the one that tells most first.

    Args:
        model: the shipped model, or the one that was fitted to `measured`.
        measured: stages that were measured already; they are not chosen again.
    """
    design = _Design(model, candidates, measured)
    return [candidates[index] for index, _ in design.choices(count)]


def expected_error(model: DeviceModel, candidates: Sequence[Candidate], measured: Sequence[StageTime]) -> float:
    """Return what the constants are expected to contribute to the error of a candidate, after stages were measured."""
    return _Design(model, candidates, measured).error() if candidates else 0.0


def report(calibration: Calibration, candidates: Sequence[Candidate], measured: Sequence[StageTime]) -> list[str]:
    """Return in words which constants are still uncertain, and which stage would tell most of each.

    They are at most MOST_SENTENCES constants, first the one that makes the seconds of stages most uncertain. The last
    sentence says by how much the error that the constants cause would fall if the best five stages were measured.
    """
    if not candidates:
        return ["every stage of these networks was measured; calibrate with another network as well"]
    design = _Design(calibration.model, candidates, measured)
    sentences = []
    for name in design.names_by_doubt():
        constant = calibration.constants.get(name)
        if constant is not None and constant.is_known:
            continue
        best = design.teller(name)
        if best is None:
            how = "none of these networks' stages would tell; calibrate with another network as well"
        else:
            how = f"measure {candidates[best].name}"
        known = "was not measured" if constant is None else f"is known to a factor of {math.exp(constant.sd):.2g} only"
        sentences.append(f"{name} {known}: {how}")
    del sentences[MOST_SENTENCES:]
    chosen = design.choices(5)
    if chosen:
        before, after = design.error(), chosen[-1][1]
        if before - after > _WORTH_TELLING * before:
            names = ", ".join(candidates[index].name for index, _ in chosen)
            sentences.append(
                f"measuring {names} would lower what the constants contribute to the error of a stage from "
                f"{before:.1%} to {after:.1%}, as expected"
            )
        else:
            sentences.append("no further stage of these networks would lower the expected error by much")
    return sentences


class _Design:
    """The worth of measuring each of N candidates, on each of some boards with K constants."""

    def __init__(self, model: DeviceModel, candidates: Sequence[Candidate], measured: Sequence[StageTime]) -> None:
        stages = [(candidate.graph, candidate.operators) for candidate in candidates]
        table = stage_table([*stages, *((time.graph, time.operators) for time in measured)])
        known = {(time.graph.fingerprint, frozenset(time.operators)) for time in measured}
        self.open = [(graph.fingerprint, frozenset(operators)) not in known for graph, operators in stages]
        self.before = prior_of(model, table.work.kinds)
        count = len(candidates)
        self.table = table.only(np.arange(count))
        self.variance = deviation_of(self.table, self.before.model_error) ** 2 + NOISE**2
        self.cost_s = STAGE_S + RUNS * self.table.seconds(model)
        noise = np.array([noise_of(time) for time in measured])
        done = table.only(np.arange(count, count + len(measured)))
        done_variance = deviation_of(done, self.before.model_error) ** 2 + noise**2
        _, slopes = self.before.slopes(done, self.before.centre)
        covariance = self._after(slopes, done_variance)
        self.slopes: list[Floats] = []
        self.covariances: list[Floats] = []
        for logarithms in self._boards(covariance):
            self.slopes.append(self.before.slopes(self.table, logarithms)[1])
            self.covariances.append(self._after(self.before.slopes(done, logarithms)[1], done_variance))

    def _after(self, slopes: Floats, variance: Floats) -> Floats:
        """Return the covariance of the constants after stages of these slopes were measured."""
        information = np.linalg.inv(self.before.covariance) + (slopes / variance[:, None]).T @ slopes
        return np.asarray(np.linalg.inv(information), np.float64)

    def _boards(self, covariance: Floats) -> list[Floats]:
        """Return the logarithms of the constants of some boards; the first is the model."""
        drawn = np.random.default_rng(0).multivariate_normal(self.before.centre, covariance, _BOARDS - 1)
        return [self.before.centre, *drawn]

    def error(self) -> float:
        """Return the expected deviation of a candidate's seconds that the constants cause."""
        return _deviation(self.slopes, self.covariances)

    def names_by_doubt(self) -> list[str]:
        """Return the constants, first the one whose uncertainty makes the candidates' seconds most uncertain."""
        pairs = zip(self.slopes, self.covariances, strict=True)
        doubt = sum((slopes**2).mean(axis=0) * np.diag(covariance) for slopes, covariance in pairs)
        return [self.before.names[index] for index in np.argsort(-np.asarray(doubt), kind="stable")]

    def choices(self, count: int) -> list[tuple[int, float]]:
        """Return candidates in the order of their choice, each with the `error` after it was measured, too."""
        covariances, free = list(self.covariances), np.array(self.open, bool)
        found: list[tuple[int, float]] = []
        while len(found) < count and free.any():
            worth = np.zeros(len(free))
            for slopes, covariance in zip(self.slopes, covariances, strict=True):
                shared = slopes @ covariance @ slopes.T  # N x N: of the candidates' seconds
                worth += (shared**2).mean(axis=0) / (self.variance + np.diag(shared)) / max(np.trace(shared), 1e-12)
            best = int(np.argmax(np.where(free, worth / self.cost_s, -1.0)))
            free[best] = False
            covariances = [
                covariance - np.outer(covariance @ slope, covariance @ slope) / (variance + slope @ covariance @ slope)
                for slope, covariance, variance in (
                    (slopes[best], covariance, self.variance[best])
                    for slopes, covariance in zip(self.slopes, covariances, strict=True)
                )
            ]
            found.append((best, _deviation(self.slopes, covariances)))
        return found

    def teller(self, name: str) -> int | None:
        """Return the candidate that tells most of a constant; None where none tells anything worth measuring."""
        index = self.before.names.index(name)
        lowered = np.zeros(len(self.open))
        for slopes, covariance in zip(self.slopes, self.covariances, strict=True):
            shared = slopes @ covariance
            total = self.variance + np.einsum("nk,nk->n", shared, slopes)
            lowered += shared[:, index] ** 2 / total / covariance[index, index] / len(self.slopes)
        lowered = np.where(self.open, lowered, 0.0)
        best = int(np.argmax(lowered))
        return best if lowered[best] > _WORTH_TELLING else None


def _deviation(slopes: Sequence[Floats], covariances: Sequence[Floats]) -> float:
    """Return the root of the mean variance of the candidates' seconds, over candidates and boards."""
    variances = [np.einsum("nk,kl,nl->n", s, c, s).mean() for s, c in zip(slopes, covariances, strict=True)]
    return float(np.sqrt(np.mean(variances)))
