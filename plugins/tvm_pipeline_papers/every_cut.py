"""Every cut in two of the graph's own order, on two devices and in both orders: the plans of a sweep.

This is the space of Algorithm 1 of Velasco-Montero et al. (IEEE Access 2023), each of its plans judged. `two_stage`
returns the best of it for the devices of a platform; a sweep shows all of it, as Figures 5, 11 and 12 of the paper do.

Next: `measured_cuts.py`, which runs them; `cost/evaluate.py`, which predicts what they cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_pipeline import Plan, Problem, Stage, evaluate
from tvm_pipeline.core.graph import crossing_tensors
from tvm_pipeline.errors import OptionError, PlanError


@dataclass(frozen=True, slots=True)
class Cut:
    """The first `operators` of the graph on one device, and the others on another one.

    Attributes:
        devices: the one that takes the frames first, and the other one.
        operators: how many the first device has; if it has all of them, the second one has nothing to do.
        total: the number of operators of the graph.
        crossing_bytes: bytes of the tensors that go from one device to the other.
        plan: with its predicted figures; None where there is an obstacle.
        obstacle: why this is no plan; empty where it is one.
    """

    devices: tuple[str, str]
    operators: int
    total: int
    crossing_bytes: int
    plan: Plan | None
    obstacle: str = ""

    def __str__(self) -> str:
        first, second = self.devices
        rest = self.total - self.operators
        return f"{self.operators} {first} | {rest} {second}" if rest else f"{self.operators} {first}"


def every_cut(problem: Problem, first: str, second: str) -> list[Cut]:
    """Return the cuts of N operators: N for each order of the devices, the last of which is one device alone.

    Raises:
        OptionError: these are not two devices of the platform that can work at the same time.
        PlatformError: the platform has no such device.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> for cut in every_cut(example_problem(), "d0", "d1"):
        ...     print(cut, round(cut.plan.predicted.throughput_fps, 1))
        1 d0 | 1 d1 50.0
        2 d0 16.7
        1 d1 | 1 d0 25.0
        2 d1 16.7
    """
    if problem.platform.device(first).overlaps(problem.platform.device(second)):
        raise OptionError(
            f"all cuts of {first},{second}: a sweep needs two devices that can work at the same time, and these share "
            "cores; `tvm-pipeline devices` lists the devices with their cores"
        )
    count = len(problem.graph)
    return [
        _cut(problem, devices, operators)
        for devices in ((first, second), (second, first))
        for operators in range(1, count + 1)
    ]


def _cut(problem: Problem, devices: tuple[str, str], operators: int) -> Cut:
    graph = problem.graph
    names = tuple(graph.operator_names)
    parts = [part for part in (names[:operators], names[operators:]) if part]
    stages = tuple(Stage((device,), part) for device, part in zip(devices, parts, strict=False))
    crossing = crossing_tensors(graph, parts)[1] if len(parts) == 2 else []
    found = devices, operators, len(graph), sum(tensor.bytes for tensor in crossing)
    try:
        predicted = evaluate(problem, stages).predicted
    except PlanError as error:
        return Cut(*found, None, str(error))
    return Cut(*found, Plan(graph.name, f"cut-{operators}", problem.objective, stages, predicted))
