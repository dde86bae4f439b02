"""The networks of benchmarks/memory_networks.py against what their papers publish, and against figures of others."""

from __future__ import annotations

import pytest

from tests.support.memory_networks import NETWORKS, randwire
from tvm_pipeline.memory import memory_graph, minimum_peak, peak_bytes
from tvm_pipeline.memory.orders import kahn_order, program_order


def test_randwire_is_the_stage_that_was_measured_before() -> None:
    """Operators, and the peaks of program order and of Kahn's, as an earlier implementation measured them."""
    for seed, figures in enumerate([(115, 1437696, 1517568), (111, 1198080, 1357824)]):
        graph = memory_graph(randwire(seed=seed))
        peaks = (peak_bytes(graph, order(graph)) for order in (program_order, kahn_order))
        assert (len(graph), *peaks) == figures


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "program", "least"),
    [
        ("NASNetMobile", 4079616, 3665664),
        ("NASNetLarge", 28713024, 25156800),
    ],
)
def test_nasnets_as_files_are_those_that_were_measured_before(name: str, program: int, least: int) -> None:
    graph = memory_graph(NETWORKS[f"{name}.tflite"]())
    found = minimum_peak(graph)
    # The earlier figures count tensors in steps of 64 bytes.
    assert peak_bytes(graph, program_order(graph)) == pytest.approx(program, abs=63)
    assert found.peak_bytes == found.bound_bytes == pytest.approx(least, abs=63)


@pytest.mark.parametrize(
    ("name", "params", "macs"),
    [
        ("DARTS", 4.7e6, 574e6),
        ("NASNetMobile", 5.3e6, 564e6),
        ("NASNetLarge", 88.9e6, 23.8e9),
        ("PNASNet", 5.1e6, 588e6),
        ("AmoebaNet-A", 5.1e6, 555e6),
    ],
)
def test_networks_of_cells_are_as_large_as_published(name: str, params: float, macs: float) -> None:
    graph = NETWORKS[name]()
    assert sum(part.param_bytes for part in graph.operators) / 4 == pytest.approx(params, rel=0.04)
    assert sum(part.macs for part in graph.operators) == pytest.approx(macs, rel=0.08)


def test_every_network_is_a_graph_with_an_input() -> None:
    for name, make in NETWORKS.items():
        graph = make()
        assert graph.inputs, name
        assert graph == make(), name
        assert {tensor.dtype for tensor in graph.tensors.values()} <= {"float32"}, name
