"""The most probable constants of a device's model, given the seconds of some stages.

The logarithms of the constants are thought to be normally distributed around the shipped ones, each with the width of
`constants.py`. The logarithm of measured over modelled seconds is thought to be normal, too: its variance is the sum
of that of the model's error, which is the same for all stages and is itself estimated, and that of the measurement.
Stages further off than OUTLYING standard deviations count less (Huber, Annals of Mathematical Statistics 35(1), 1964).
The most probable logarithms are found by Levenberg and Marquardt's method, from several starts because `max` in the
model makes local optima.

Next: `fit.py`, which calls it for all stages and for all but those of a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_pipeline.calibration.constants import constants_of, width_of, with_constants
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.cost.modelled_stage import Floats, StageTable

OUTLYING = 1.5
MODEL_ERROR = 0.1  # what a model's error is thought to be before anything is measured, of the logarithm of seconds
OPERATORS = 16.0  # the variance of the model's error on one operator alone, beside that on a long stage
_MODEL_STAGES = 3.0  # as many stages as that thought is worth
_STEP = 1e-5  # of a logarithm, for derivatives
_MOST_STEPS = 30
_ROUNDS = 3  # of estimating the model's error


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """What is known of K constants.

    Attributes:
        prior: the shipped model.
        names: of the constants.
        centre: K; the most probable logarithms.
        covariance: K x K; of the logarithms, by a Gaussian around the centre (Laplace's approximation).
        model_error: the standard deviation of the logarithm of measured over modelled seconds, on long stages.
    """

    prior: DeviceModel
    names: tuple[str, ...]
    centre: Floats
    covariance: Floats
    model_error: float

    @property
    def model(self) -> DeviceModel:
        """The model with the most probable constants."""
        return self.at(self.centre)

    def at(self, logarithms: Floats) -> DeviceModel:
        """Return the model with the constants of these K logarithms."""
        return with_constants(self.prior, dict(zip(self.names, np.exp(logarithms).tolist(), strict=True)))

    def slopes(self, table: StageTable, logarithms: Floats) -> tuple[Floats, Floats]:
        """Return the logarithms of N stages' seconds, and N x K by how much they change with each constant's."""
        here = np.log(table.seconds(self.at(logarithms)))
        moved = [np.log(table.seconds(self.at(logarithms + step))) for step in _STEP * np.eye(len(self.names))]
        return here, (np.array(moved).reshape(len(self.names), -1).T - here[:, None]) / _STEP


def prior_of(model: DeviceModel, kinds: Sequence[str]) -> Posterior:
    """Return what is known of a device before anything is measured on it."""
    constants = constants_of(model, kinds)
    widths = np.array([width_of(model, name) for name in constants])
    centre = np.log(np.array([*constants.values()]))
    return Posterior(model, tuple(constants), centre, np.diag(widths**2), MODEL_ERROR)


def posterior(before: Posterior, table: StageTable, seconds: Floats, noise: Floats) -> Posterior:
    """Return what is known after N stages were measured.

    Args:
        seconds: N; measured.
        noise: N; standard deviations of the logarithms of the measured seconds.
    """
    measured = np.log(seconds)
    fit = _Fit(before, table, measured, noise**2, deviation_of(table, 1.0) ** 2)
    error = before.model_error
    centre = min((fit.settled(start, error) for start in fit.starts()), key=lambda found: fit.loss(found, error))
    for _ in range(_ROUNDS):
        centre = fit.settled(centre, error)
        error = fit.model_error(centre, error)
    _, information = fit.normal_equations(centre, error)
    return replace(
        before, centre=centre, covariance=np.asarray(np.linalg.inv(information), np.float64), model_error=error
    )


def deviation_of(table: StageTable, model_error: float) -> Floats:
    """Return N standard deviations of the logarithm of seconds: errors of operators average out over a stage."""
    return np.asarray(model_error * np.sqrt(1 + OPERATORS / table.operators), np.float64)


class _Fit:
    """The fit of one set of stages; `shares` are variances of the model's error, relative to that on long stages."""

    def __init__(
        self, before: Posterior, table: StageTable, measured: Floats, variance: Floats, shares: Floats
    ) -> None:
        self.before, self.table, self.measured, self.variance, self.shares = before, table, measured, variance, shares
        self.prior_information = np.linalg.inv(before.covariance)

    def starts(self) -> list[Floats]:
        """Return logarithms to begin with: the prior's, those of a device as fast as this, with other bandwidths."""
        names, centre = self.before.names, self.before.centre
        slower = float(np.median(self.residuals(centre)))
        sign = np.array([1.0 if name in ("call_s", "operator_s") else -1.0 for name in names])
        scaled = centre + slower * sign * np.array([name.endswith("_s") for name in names])
        found = [centre, scaled]
        for shift in (-1.0, 1.0):
            for name in ("refill_bytes_per_s", "bytes_per_s"):
                if name in names:
                    found.append(scaled + shift * (np.array(names) == name))
        return found

    def residuals(self, logarithms: Floats) -> Floats:
        return np.asarray(self.measured - np.log(self.table.seconds(self.before.at(logarithms))), np.float64)

    def loss(self, logarithms: Floats, error: float) -> float:
        """Return the negative logarithm of the probability, up to a constant."""
        size = np.abs(self.residuals(logarithms)) / np.sqrt(self.total(error))
        huber = np.where(size <= OUTLYING, size**2 / 2, OUTLYING * (size - OUTLYING / 2))
        away = logarithms - self.before.centre
        return float(huber.sum() + away @ self.prior_information @ away / 2)

    def total(self, error: float) -> Floats:
        """Return the variance of each stage: the model's and the measurement's."""
        return np.asarray(error**2 * self.shares + self.variance, np.float64)

    def weights(self, residuals: Floats, error: float) -> Floats:
        """Return the weight of each stage: one over its variance, less for an outlying stage."""
        variance = self.total(error)
        size = np.abs(residuals) / np.sqrt(variance)
        return np.asarray(np.minimum(1.0, OUTLYING / np.maximum(size, 1e-12)) / variance, np.float64)

    def normal_equations(self, logarithms: Floats, error: float) -> tuple[Floats, Floats]:
        """Return the descent direction before it is scaled, and the information: the Hessian by Gauss and Newton."""
        here, slopes = self.before.slopes(self.table, logarithms)
        residuals = self.measured - here
        weighted = slopes * self.weights(residuals, error)[:, None]
        downhill = weighted.T @ residuals - self.prior_information @ (logarithms - self.before.centre)
        return downhill, weighted.T @ slopes + self.prior_information

    def settled(self, logarithms: Floats, error: float) -> Floats:
        """Return the logarithms at the end of the descent."""
        damping, loss = 1e-3, self.loss(logarithms, error)
        for _ in range(_MOST_STEPS):
            downhill, information = self.normal_equations(logarithms, error)
            while damping < 1e6:
                step = np.linalg.solve(information + damping * np.diag(np.diag(information)), downhill)
                found = logarithms + np.clip(step, -1.0, 1.0)
                found_loss = self.loss(found, error)
                if found_loss <= loss:
                    break
                damping *= 5
            else:
                return logarithms
            gain, logarithms, loss = loss - found_loss, found, found_loss
            damping = max(damping / 10, 1e-9)
            if gain < 1e-7:
                return logarithms
        return logarithms

    def model_error(self, logarithms: Floats, error: float) -> float:
        """Return the model's error as the residuals show it, what was thought of it before included."""
        here, slopes = self.before.slopes(self.table, logarithms)
        residuals = self.measured - here
        weights = self.weights(residuals, error)
        data = (slopes * weights[:, None]).T @ slopes
        spent = float(np.trace(np.linalg.solve(data + self.prior_information, data)))
        robust = weights * self.total(error)  # 1 but for outlying stages
        unexplained = float(np.sum(np.maximum(robust * residuals**2 - self.variance, 0.0) / self.shares))
        stages = _MODEL_STAGES + max(len(residuals) - spent, 0.0)
        return float(np.sqrt((_MODEL_STAGES * MODEL_ERROR**2 + unexplained) / stages))
