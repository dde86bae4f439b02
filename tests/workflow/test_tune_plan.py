"""Tuning and planning in turns: what bounds the plan is searched, and the plan follows what was gained."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tvm_pipeline import planning
from tvm_pipeline.backends.contract import Guide, TuningReport
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import OptionError
from tvm_pipeline.testing import FakeBackend, FakeModel, installed
from tvm_pipeline.workflow import tune_plan as module
from tvm_pipeline.workflow.tune_plan import PlanTuning, tune_plan

OPERATORS = 8
KERNELS = [f"kernel{index}" for index in range(OPERATORS)]

tensors = [Tensor(f"t{index}", (4,)) for index in range(OPERATORS + 1)]
GRAPH = OperatorGraph(
    "chain",
    (tensors[0],),
    tuple(Operator(f"o{i}", "add", (f"t{i}",), (tensors[i + 1],)) for i in range(OPERATORS)),
    (tensors[-1].name,),
)
# Tuned kernels may store weights otherwise, as Winograd's algorithm does.
TUNED = replace(GRAPH, operators=tuple(replace(operator, param_bytes=64) for operator in GRAPH.operators))
CPU, GPU = Device("cpu", "fake", target="cpu"), Device("gpu", "fake", target="gpu")


@dataclass
class Machine:
    """Seconds of each operator on both devices, and what tuning gains on the CPU."""

    cpu_s: list[float]
    gpu_s: list[float]
    gains: dict[Hashable, float]

    def profile(self, gains: Mapping[Hashable, float]) -> Profile:
        tuned = [seconds / gains.get(kernel, 1.0) for kernel, seconds in zip(KERNELS, self.cpu_s, strict=True)]
        devices = {"cpu": DeviceProfile.in_order(GRAPH, tuned), "gpu": DeviceProfile.in_order(GRAPH, self.gpu_s)}
        return Profile(GRAPH.name, (TUNED if gains else GRAPH).fingerprint, devices)

    def best(self, gains: Mapping[Hashable, float], objective: Objective = "throughput") -> float:
        """Return the figure of the best plan where these kernels have gained."""
        graph = TUNED if gains else GRAPH
        problem = Problem(graph, Platform("two", (CPU, GPU)), self.profile(gains), objective)
        [value] = planning.plan(problem).plan.value or ()
        return value


# The first four operators are slow on the CPU, and tuning makes them twice as fast.
UNEVEN = Machine(
    [0.004] * 4 + [0.001] * 4, [0.0025] * 8, {kernel: 2.0 if i < 4 else 1.0 for i, kernel in enumerate(KERNELS)}
)


class TunableModel(FakeModel):
    def kernels_to_tune(self, device: Device) -> dict[str, Sequence[str]]:
        return {f"o{i}": [f"kernel{i}"] for i in range(OPERATORS)} if device.name == "cpu" else {}


def _model(graph: OperatorGraph) -> TunableModel:
    return TunableModel(graph, {operator.name: lambda x: [x + 1] for operator in graph.operators})


class TuningBackend(FakeBackend):
    """Its search asks the guide, and each kernel that it searches gains what the machine says."""

    can_tune = True

    def __init__(self, machine: Machine) -> None:
        super().__init__([CPU, GPU], [_model(GRAPH)])
        self.machine = machine
        self.batches: list[set[Hashable]] = []

    def tune(self, model: Model, device: Device, seconds: float, guide: Guide | None = None) -> TuningReport:
        assert guide is not None
        gained: dict[Hashable, float] = {}
        while batch := set(guide(gained)):
            assert not batch & gained.keys()
            self.batches.append(batch)
            gained.update({kernel: self.machine.gains[kernel] for kernel in batch})
        tuned = sum(gain > 1 for gain in gained.values())
        self._models = {GRAPH.name: _model(TUNED)}
        ratio = 1.5 if tuned else None
        return TuningReport(model.name, device.target, OPERATORS, tuned, len(gained), 0, 0.0, "done", ratio=ratio)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[PlanTuning, list[set[Hashable]]]]:
    """Return what tunes for the best plan of a machine, whose profiles are known before and after it."""

    def tune(machine: Machine, objective: Objective = "throughput") -> tuple[PlanTuning, list[set[Hashable]]]:
        profiles = iter([machine.profile({}), machine.profile(machine.gains)])
        chain = Model(GRAPH.name, "onnx", b"", GRAPH.inputs)
        monkeypatch.setattr(module, "measured_profile", lambda *_: next(profiles))
        monkeypatch.setattr(module, "load", lambda *_: chain)
        monkeypatch.setattr("tvm_pipeline.workflow.steps.load", lambda *_: chain)
        monkeypatch.setattr(module, "TURN_S", 0.01)
        backend = TuningBackend(machine)
        with installed(backend):
            return tune_plan("chain", objective), backend.batches

    return tune


def test_what_bounds_the_plan_is_searched_and_the_plan_follows(tuned: Callable[..., Any]) -> None:
    found, batches = tuned(UNEVEN)
    assert found.before is not None
    assert [stage.devices for stage in found.before.stages] == [("gpu",), ("cpu",)]
    assert batches == [
        {"kernel3", "kernel4", "kernel5", "kernel6", "kernel7"}
    ]  # those of the CPU's stage, at first 8 ms
    assert found.predicted == pytest.approx((1 / 0.008, 1 / 0.0075))  # now the GPU bounds it
    assert found.reports[0].stopped == "nothing else of this target bounds the best plan"
    assert found.after is not None
    assert found.after.devices == ("cpu", "gpu")
    assert [result.plan for result in found.measured] == [found.before, found.after]


@pytest.mark.thorough
def test_each_figure_is_that_of_the_best_plan_by_what_was_gained(tuned: Callable[..., Any]) -> None:
    draw = np.random.default_rng(3)
    lengths = []
    for _ in range(8):
        cpu_s, gpu_s = draw.uniform(0.001, 0.004, (2, OPERATORS)).tolist()
        machine = Machine(cpu_s, gpu_s, dict(zip(KERNELS, draw.uniform(1.0, 1.6, OPERATORS).tolist(), strict=True)))
        found, batches = tuned(machine)
        gains: dict[Hashable, float] = {}
        assert found.predicted[0] == pytest.approx(machine.best({}))
        for batch, figure in zip(batches, found.predicted[1:], strict=True):
            gains.update({kernel: machine.gains[kernel] for kernel in batch})
            assert figure == pytest.approx(machine.best(gains))
        lengths.append(len(batches))
    assert max(lengths) > 1


def test_for_latency_all_kernels_of_the_device_that_the_plan_uses_are_searched(tuned: Callable[..., Any]) -> None:
    found, batches = tuned(UNEVEN, "latency")
    assert batches == [{f"kernel{i}" for i in range(4, 8)}]  # the first four operators are the GPU's
    assert found.predicted == pytest.approx((0.014, 0.014))
    assert found.reports[0].stopped == "the best plan became less than 1% better"
    assert (found.before, found.measured) == (None, ())


def test_bytes_are_refused(tuned: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="tuning changes none; give throughput, latency or energy"):
        tuned(UNEVEN, "memory,communication")
