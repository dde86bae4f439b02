"""A stage of a network with its measured seconds."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_pipeline.core.graph import OperatorGraph


@dataclass(frozen=True, slots=True)
class StageTime:
    """A stage that was compiled for a device and timed there, alone.

    Attributes:
        graph: the network.
        operators: names of the stage's operators.
        seconds: the median, with the transfers of the stage's inputs and outputs where the device has any.
        spread: the interquartile range over the median.
    """

    graph: OperatorGraph
    operators: tuple[str, ...]
    seconds: float
    spread: float = 0.0
