"""Boards whose times follow a model exactly, and networks whose stages tell all of its constants."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.support import generators
from tvm_pipeline.calibration.constants import constants_of, with_constants
from tvm_pipeline.calibration.stage_choice import Candidate, candidates
from tvm_pipeline.calibration.stage_time import StageTime
from tvm_pipeline.core.device_model import DeviceModel, KindFactor
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.cost.modelled_stage import stage_seconds

PRIOR = DeviceModel(
    macs_per_s=2e10,
    call_s=1e-3,
    operator_s=5e-4,
    input_bytes_per_s=2e8,
    output_bytes_per_s=1e8,
    cached_bytes=500_000,
    refill_bytes_per_s=1e8,
)
ROOFLINE = DeviceModel(
    macs_per_s=2e9, bytes_per_s=2e8, call_s=1e-3, operator_s=2e-4, kind=(KindFactor("elementwise float32", 1.5),)
)


def networks(count: int = 4, operators: int = 24) -> list[OperatorGraph]:
    """Return small networks of sizes that span three orders of magnitude; each has a name of its own."""
    graphs = [generators.random_dag(random.Random(seed), operators) for seed in range(count)]
    return [replace(graph, name=f"net{number}") for number, graph in enumerate(graphs)]


def stages(count: int = 40, seed: int = 0) -> list[Candidate]:
    """Return some of the candidates of the networks."""
    found = candidates(networks())
    return [found[index] for index in np.random.default_rng(seed).permutation(len(found))[:count]]


def timed(model: DeviceModel, chosen: Sequence[Candidate], spread: float = 0.0) -> list[StageTime]:
    """Return the stages with the seconds of the model, without noise."""
    return [StageTime(c.graph, c.operators, stage_seconds(model, c.graph, c.operators), spread) for c in chosen]


def board(prior: DeviceModel, factors: Sequence[float]) -> DeviceModel:
    """Return the model with its constants times some factors."""
    values = constants_of(prior)
    return with_constants(prior, {name: value * f for (name, value), f in zip(values.items(), factors, strict=False)})
