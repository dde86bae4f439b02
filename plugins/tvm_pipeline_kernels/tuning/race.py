"""Two libraries of one network side by side: passes in turns, and each kernel timed where it runs in the network.

Kernels of CPU cores are timed in processor time of the thread, those of a GPU by the wall or by its own clock. Other
programs make kernels slower and never faster. So the passes are dealt out to a few comparisons, and each takes the
fastest run of every kernel. What differs between the comparisons is the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tvm_pipeline_kernels.tuning.candidates import W

COMPARISONS = 4
ROUNDS = 5 * COMPARISONS  # passes of each library
LEAST_GAIN = 1.01  # what a kernel must win in every comparison, so that noise is no gain

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a network, in each comparison.

    Attributes:
        whole: seconds of a pass.
        workloads: seconds of a pass in the kernels of a workload, and how many these are.
    """

    whole: Seconds
    workloads: Mapping[Any, tuple[Seconds, int]]


class Runner(Protocol):
    """A whole network that runs node by node."""

    def run(self) -> Seconds:
        """Run a pass; return the seconds of each node."""

    def times(self, seconds: Seconds) -> Times:
        """Sum up the seconds of passes (passes x nodes)."""


def race(
    runners: Sequence[Runner], rounds: int = ROUNDS, pulse: Callable[[], None] = lambda: None
) -> tuple[Times, Times]:
    """Return the times of two runners, whose passes take turns.

    Args:
        rounds: of passes of both; a multiple of `COMPARISONS`.
        pulse: is called before each pass.
    """
    samples: list[list[Seconds]] = [[], []]
    for _ in range(rounds + 1):  # the first pass of each does not count
        for taken, runner in zip(samples, runners, strict=True):
            pulse()
            taken.append(runner.run())
    first, second = (runner.times(np.array(taken[1:])) for runner, taken in zip(runners, samples, strict=True))
    return first, second


def winners(default: Times, tuned: Times, workloads: Iterable[W]) -> set[W]:
    """Return the workloads that the second library computes faster, by more than the noise."""
    return {
        workload
        for workload in workloads
        if np.min(default.workloads[workload][0] / tuned.workloads[workload][0]) > LEAST_GAIN
    }


def fastest(seconds: Seconds) -> Seconds:
    """Return the fastest run of each node in each comparison (comparisons x nodes); passes are dealt out in turn."""
    return np.array([seconds[first::COMPARISONS].min(axis=0) for first in range(min(COMPARISONS, len(seconds)))])


def by_workload(fastest: Seconds, workloads: Sequence[Any]) -> dict[Any, tuple[Seconds, int]]:
    columns: dict[Any, list[int]] = {}
    for node, workload in enumerate(workloads):
        if workload is not None:
            columns.setdefault(workload, []).append(node)
    return {workload: (fastest[:, own].sum(axis=1), len(own)) for workload, own in columns.items()}
