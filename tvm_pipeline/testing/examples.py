"""The small network that the examples in docstrings share: `double`, then `increment`, on a machine of two devices.

A test may use it as well. `fake.py` says what a FakeModel is.
"""

from __future__ import annotations

from tvm_pipeline.backends.bundle import Bundle
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.planning import plan
from tvm_pipeline.testing.fake import FakeBackend, FakeModel


def example_graph() -> OperatorGraph:
    """Return the graph: two operators in a row on vectors of four numbers."""
    x, middle, y = Tensor("x", (4,)), Tensor("middle", (4,)), Tensor("y", (4,))
    double = Operator("double", "multiply", ("x",), (middle,), param_bytes=4, macs=4)
    increment = Operator("increment", "add", ("middle",), (y,), param_bytes=4, macs=4)
    return OperatorGraph("net", (x,), (double, increment), ("y",))


def example_problem() -> Problem:
    """Return the problem of most frames a second: `d0` doubles faster, and `d1` increments faster."""
    graph = example_graph()
    platform = Platform("box", (Device("d0", "fake"), Device("d1", "fake")))
    seconds = {
        "d0": DeviceProfile.in_order(graph, [0.02, 0.04]),
        "d1": DeviceProfile.in_order(graph, [0.04, 0.02]),
    }
    return Problem(graph, platform, Profile(graph.name, graph.fingerprint, seconds))


def example_model() -> FakeModel:
    """Return the graph as a model that really computes."""
    return FakeModel(example_graph(), {"double": _double, "increment": _increment})


def example_backend() -> FakeBackend:
    """Return the backend, named `fake`, of the two devices; it compiles the model."""
    return FakeBackend(example_problem().platform.devices, [example_model()])


def example_bundle() -> Bundle:
    """Return the model with its best plan."""
    problem = example_problem()
    return Bundle(problem.graph, problem.platform, problem.profile, plan(problem).plan, example_model())


# Functions of a module, for a model is saved by pickling them.
def _double(x: Array) -> list[Array]:
    return [2 * x]


def _increment(x: Array) -> list[Array]:
    return [x + 1]
