"""The model of a device with its constants refitted to stages that were measured there.

The error of the result is that on stages which the fit did not see. Where three networks or more were measured, each is
left out in turn, and else each of some folds of stages. Leaving out stages alone would promise too much: on real layers
of two CPUs it says 9 % where other networks are 19 % off, and leaving out networks says 21 %.

Next: `posterior.py`, the fit itself; `stage_choice.py`, what to measure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_pipeline.calibration.constants import width_of
from tvm_pipeline.calibration.posterior import Posterior, deviation_of, posterior, prior_of
from tvm_pipeline.calibration.stage_time import StageTime
from tvm_pipeline.core.device_model import LONGEST_S, DeviceModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.cost.modelled_stage import Floats, Integers, StageTable, stage_table
from tvm_pipeline.errors import ProfileError

LEAST_STAGES = 5  # that differ; fewer cannot tell the constants of a device from one factor
LEAST_ERROR = 0.1  # times that vary by less than this are no reason to refuse a fit, however good the model is
SAME_STAGE = 0.1  # relative difference of two measurements of one stage that needs no explanation
CONTRADICTORY = 0.4  # a median deviation from the fit, of logarithms, that no error of a model explains
_MOST_FOLDS = 10
_FEWEST_NETWORKS = 3  # from which a network at a time is left out
_DOUBTFUL = 4.0  # standard deviations from the model


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of the model, before and after.

    Attributes:
        prior: the shipped value.
        fitted: the refitted value.
        prior_sd: standard deviation of the logarithm around the shipped value, before anything was measured.
        sd: that around the fitted value; 0.1 is an uncertainty of 10 %.
    """

    prior: float
    fitted: float
    prior_sd: float
    sd: float

    @property
    def is_known(self) -> bool:
        """Whether the stages tell more of it than the shipped value did."""
        return self.sd < self.prior_sd / 2


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model that was fitted to measured stages.

    Attributes:
        model: the refitted model.
        error: its mean absolute relative error on stages that were left out of the fit.
        prior_error: that of the shipped model on the same stages.
        constants: by name; see `constants.py`.
        left_out: what was left out at a time to find the error, such as `each of 4 networks`.
        stages: how many were measured.
        model_error: standard deviation of the logarithm of measured over modelled seconds, on long stages.
        doubtful: a sentence for each stage that neither the model's error nor noise explains; it counts less.
    """

    model: DeviceModel
    error: float
    prior_error: float
    constants: Mapping[str, Constant]
    left_out: str
    stages: int
    model_error: float
    doubtful: tuple[str, ...] = ()


def calibrated(prior: DeviceModel, times: Sequence[StageTime]) -> Calibration:
    """Return the model of a device with its constants refitted to measured stages.

    The prior holds where the stages tell nothing. The order of the stages does not matter.

    Args:
        prior: the shipped model. Constants that it states as zero or None are not fitted.

    Raises:
        ProfileError: there are too few stages, their seconds contradict each other, or the device's times vary by
            more than the model's error. The message does not know the device's name.

    Examples:
        A board of half the speed, and five stages of one operator on it.

        >>> from tvm_pipeline.core.graph import Operator, Tensor
        >>> x, y = Tensor("x", (1,)), Tensor("y", (1,))
        >>> def stage(macs):
        ...     conv = Operator("conv", "conv2d", ("x",), (y,), macs=macs)
        ...     return StageTime(OperatorGraph(f"net{macs}", (x,), (conv,), ("y",)), ("conv",), macs / 5e8)
        >>> found = calibrated(DeviceModel(macs_per_s=1e9), [stage(10**power) for power in range(5, 10)])
        >>> f"{found.model.macs_per_s:.1e}, error {found.prior_error:.0%} before and {found.error:.0%} after"
        '5.0e+08, error 50% before and 1% after'
    """
    times = sorted(times, key=_identity)
    _check(times)
    data = _Data.of(times)
    before = prior_of(prior, data.table.work.kinds)
    after = data.fitted(before)
    folds, left_out = _folds(times)
    predicted = np.empty(len(times))
    for fold in folds:
        kept = np.setdiff1d(np.arange(len(times)), fold)
        predicted[fold] = data.table.only(fold).seconds(data.only(kept).fitted(before).model)
    error = _relative_error(predicted, data.measured)
    _check_fit(times, data, after, error)
    sds = np.sqrt(np.diag(after.covariance))
    constants = {
        name: Constant(float(np.exp(old)), float(np.exp(new)), width_of(prior, name), float(sd))
        for name, old, new, sd in zip(before.names, before.centre, after.centre, sds, strict=True)
    }
    prior_error = _relative_error(data.table.seconds(prior), data.measured)
    doubtful = tuple(_doubtful(times, data, after))
    return Calibration(after.model, error, prior_error, constants, left_out, len(times), after.model_error, doubtful)


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """N measured stages, as arrays."""

    table: StageTable
    measured: Floats
    noise: Floats

    @classmethod
    def of(cls, times: Sequence[StageTime]) -> _Data:
        table = stage_table([(time.graph, time.operators) for time in times])
        noise = np.array([noise_of(time) for time in times])
        return cls(table, np.array([time.seconds for time in times]), noise)

    def only(self, kept: Integers) -> _Data:
        return _Data(self.table.only(kept), self.measured[kept], self.noise[kept])

    def fitted(self, before: Posterior) -> Posterior:
        return posterior(before, self.table, self.measured, self.noise)


def noise_of(time: StageTime) -> float:
    """Return the standard deviation of the logarithm of a median: half of the middle half's spread, at least 1 %."""
    return max(time.spread / 2, 0.01)


def stage_name(graph: OperatorGraph, operators: Sequence[str]) -> str:
    """Return the stage as a message names it: `resnet-18 (all)`, `resnet-18: conv`, `resnet-18: conv ... add (12)`."""
    if len(operators) == len(graph):
        return f"{graph.name} (all)"
    if len(operators) == 1:
        return f"{graph.name}: {operators[0]}"
    return f"{graph.name}: {operators[0]} ... {operators[-1]} ({len(operators)})"


def _named(time: StageTime) -> str:
    return f"{stage_name(time.graph, time.operators)}, {time.seconds * 1e3:.3g} ms"


def _stage(time: StageTime) -> tuple[str, tuple[str, ...]]:
    return time.graph.fingerprint, tuple(sorted(time.operators))


def _identity(time: StageTime) -> tuple[str, tuple[str, ...], float, float]:
    return *_stage(time), time.seconds, time.spread


def _check(times: Sequence[StageTime]) -> None:
    """Raise ProfileError where the figures cannot be fitted, whatever the model says."""
    for time in times:
        if not (0 < time.seconds <= LONGEST_S and 0 <= time.spread < math.inf):
            raise ProfileError(
                f"calibration: {stage_name(time.graph, time.operators)} took {time.seconds} s with a spread of "
                f"{time.spread}; measure it again"
            )
    by_stage = defaultdict(list)
    for time in times:
        by_stage[_stage(time)].append(time)
    if len(by_stage) < LEAST_STAGES:
        raise ProfileError(
            f"calibration: {len(by_stage)} different stages are too few to tell the constants of a device from each "
            f"other; measure {LEAST_STAGES - len(by_stage)} more. The model stays as it was"
        )
    for same in by_stage.values():
        least, most = same[0], same[-1]  # they are sorted by seconds
        if most.seconds / least.seconds - 1 > SAME_STAGE + 2 * (least.spread + most.spread):
            raise ProfileError(
                f"calibration: measurements contradict each other: {_named(least)}, took {most.seconds * 1e3:.3g} ms "
                "another time; stop other programs, let the device cool down, and measure again"
            )


def _check_fit(times: Sequence[StageTime], data: _Data, after: Posterior, error: float) -> None:
    """Raise ProfileError where the fit says that the measurements cannot be believed."""
    worst = max(times, key=lambda time: time.spread)
    varied = float(np.median([time.spread for time in times]))
    if varied > max(error, LEAST_ERROR):
        raise ProfileError(
            f"calibration: the device's times vary by {varied:.0%} from run to run (the worst: {_named(worst)}, by "
            f"{worst.spread:.0%}), which is more than the model's error of {error:.0%}; stop other programs, fix its "
            "clocks or let it cool down, and measure again. The model stays as it was"
        )
    modelled = data.table.seconds(after.model)
    away = np.abs(np.log(data.measured / modelled))
    if np.median(away) > CONTRADICTORY:
        named = "; ".join(
            f"{_named(times[index])}, where the others say {modelled[index] * 1e3:.3g} ms"
            for index in np.argsort(-away, kind="stable")[:3]
        )
        raise ProfileError(
            "calibration: the measurements contradict each other, or the device is not one that this model describes: "
            f"no constants bring half of the stages nearer than a factor of {math.exp(np.median(away)):.2g}. The worst "
            f"are {named}. Measure those again; the model stays as it was"
        )


def _doubtful(times: Sequence[StageTime], data: _Data, after: Posterior) -> Iterator[str]:
    """Yield a sentence for each stage that is too far from the model."""
    seconds = data.table.seconds(after.model)
    deviation = np.hypot(deviation_of(data.table, after.model_error), data.noise)
    for time, modelled, sd in zip(times, seconds.tolist(), deviation.tolist(), strict=True):
        if abs(math.log(time.seconds / modelled)) > _DOUBTFUL * sd:
            yield f"{_named(time)}, where the other stages say {modelled * 1e3:.3g} ms: measure it again"


def _folds(times: Sequence[StageTime]) -> tuple[list[Integers], str]:
    """Return the stages that are left out together, by index, and what they are in words."""
    by_network = defaultdict(list)
    by_stage = defaultdict(list)
    for index, time in enumerate(times):
        by_network[time.graph.fingerprint].append(index)
        by_stage[_stage(time)].append(index)
    groups = by_network if len(by_network) >= _FEWEST_NETWORKS else by_stage
    what = "networks" if groups is by_network else "stages"
    members = [np.array(indices) for indices in groups.values()]
    if len(members) <= _MOST_FOLDS:
        return members, f"each of {len(members)} {what}"
    folds = [np.concatenate(members[first::_MOST_FOLDS]) for first in range(_MOST_FOLDS)]
    return folds, f"each tenth of {len(members)} {what}"


def _relative_error(predicted: Floats, measured: Floats) -> float:
    return float(np.mean(np.abs(predicted / measured - 1)))
