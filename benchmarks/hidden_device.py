"""A device that exists nowhere, with what a model of six constants does not know: what methods are compared on.

No Edge TPU is here. So methods that learn a device, or correct their idea of it by measurements, are tried on a device
of our own making. Its figures compare methods, and promise nothing about hardware. What it hides from a `DeviceModel`:

- The systolic array is used well or badly, by kind of operator and by its channels.
- Kinds have overheads of their own.
- Each operator of each network is slower or faster by a factor of its own, 15 % one way or the other.
- The cache keeps whole operators, first come, first kept, so a longer segment can take less.
- The rates of the link are other ones.
- A measurement has noise of 1.5 %.

`seed` draws all this anew, so that one seed is one board: the networks that a method learned on a board, and those that
it is asked about, must have the same one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph
from tvm_pipeline.planning.search.cuts import Floats, prefixes

NOISE = 0.015
RESIDUAL = 0.15
LANES = 64  # of the systolic array, each way

# How well products use the array, and how many operators' overhead a kind has, before a board's own draw.
_USED = {"conv": 0.9, "depthwise": 0.12, "sepconv": 0.5, "dense": 0.3, "pool": 0.25, "add": 0.2}
_OVERHEAD = {"conv": 1.0, "depthwise": 1.3, "sepconv": 1.6, "dense": 1.2, "pool": 0.8, "add": 0.7, "concat": 0.5}


@dataclass(frozen=True)
class HiddenDevice:
    """A board: its own constants, near those of a shipped model, and what such a model cannot say.

    Attributes:
        model: the board's constants, drawn around the given ones.
        used, overhead: by family of kinds.
        seed: of all draws.
    """

    model: DeviceModel
    seed: int
    used: Mapping[str, float] = field(default_factory=dict)
    overhead: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def drawn(cls, shipped: DeviceModel, seed: int, *, other_board: float = 0.0) -> HiddenDevice:
        """Return a board like the shipped model.

        Args:
            other_board: the standard deviation of the logarithm of each constant's ratio to the shipped one. 0.15 is a
                board of the same kind, 0.7 one of another interface or generation.
        """
        chance = np.random.default_rng(seed)

        def near(value: float | None, sigma: float = other_board) -> float | None:
            return None if value is None else value * float(chance.lognormal(0.0, sigma))

        model = replace(
            shipped,
            macs_per_s=near(shipped.macs_per_s),
            call_s=near(shipped.call_s),
            operator_s=near(shipped.operator_s),
            input_bytes_per_s=near(shipped.input_bytes_per_s, max(other_board, 0.2)),
            output_bytes_per_s=near(shipped.output_bytes_per_s, max(other_board, 0.2)),
            refill_bytes_per_s=near(shipped.refill_bytes_per_s),
        )
        used = {name: min(1.0, share * float(chance.lognormal(0.0, 0.2))) for name, share in _USED.items()}
        overhead = {name: share * float(chance.lognormal(0.0, 0.2)) for name, share in _OVERHEAD.items()}
        return cls(model, seed, used, overhead)

    def seconds(self, graph: OperatorGraph) -> Floats:
        """Return (n+1) x (n+1) seconds of each segment [start, end] of the graph's order; infinite where it is empty.

        They are without the noise of a measurement, see `measured`.
        """
        model, operators = self.model, graph.operators
        if model.cached_bytes is None or model.macs_per_s is None:
            raise SystemExit("the hidden device is made from a model with a cache and a rate of work")
        crossing = prefixes(graph).crossing_bytes
        count = len(operators)
        taken_s = np.full((count + 1, count + 1), math.inf)
        # For each start, what the segment from there up to the operator at hand comes to.
        fixed_s, work_s, refill_s, kept = np.zeros((4, count))
        for last, operator in enumerate(operators):
            family, factor = _family(operator), self._residual(graph, operator)
            here = slice(last + 1)
            fits = kept[here] + operator.param_bytes <= model.cached_bytes
            kept[here] += fits * operator.param_bytes
            refill_s[here] += ~fits * operator.param_bytes * model.spill_s_per_byte * factor
            fixed_s[here] += model.operator_s * self.overhead.get(family, 1.0) * factor
            used = self.used.get(family, 0.3) * _filled(operator)
            work_s[here] += operator.macs / (model.macs_per_s * used) * factor
            transfer_s = crossing[here] * model.transfer_s(1, 0) + model.transfer_s(0, int(crossing[last + 1]))
            taken_s[here, last + 1] = model.call_s + fixed_s[here] + np.maximum(work_s, refill_s)[here] + transfer_s
        return taken_s

    def measured(self, seconds: Floats, chance: np.random.Generator) -> Floats:
        """Return the seconds as a measurement gives them, each with its noise."""
        noisy: Floats = seconds * chance.normal(1.0, NOISE, seconds.shape)
        return noisy

    def _residual(self, graph: OperatorGraph, operator: Operator) -> float:
        """Return the factor of one operator of one network, which stays as long as the board does."""
        text = f"{self.seed} {graph.name} {graph.fingerprint} {operator.name}"
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        return float(np.random.default_rng(digest).lognormal(0.0, RESIDUAL))


def _family(operator: Operator) -> str:
    """Return the family of an operator's kind, whatever the source of the graph."""
    kind = operator.kind.lower()
    for part, family in (
        ("depthwise", "depthwise"),
        ("sep", "sepconv"),
        ("conv", "conv"),
        ("dense", "dense"),
        ("fully", "dense"),
        ("pool", "pool"),
        ("mean", "pool"),
        ("concat", "concat"),
        ("add", "add"),
        ("mul", "add"),
    ):
        if part in kind:
            return family
    return "other"


def _filled(operator: Operator) -> float:
    """Return the part of the array's lanes that an operator's output channels fill."""
    shape = operator.outputs[0].shape if operator.outputs else ()
    channels = shape[-1] if shape else 1
    return channels / (LANES * math.ceil(channels / LANES)) if channels else 1.0
