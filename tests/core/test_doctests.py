"""The examples in the docstrings of the vocabulary run and say what they print."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from tvm_pipeline import core
from tvm_pipeline.core.graph import Edges, Operator, OperatorGraph, Tensor, crossing_tensors
from tvm_pipeline.core.graph_files import graph_from_networkx, merge_graphs, read_graph
from tvm_pipeline.core.partition import check_partition, check_stage

MODULES = sorted(f"{core.__name__}.{module.name}" for module in pkgutil.iter_modules(core.__path__))
WITH_EXAMPLES = (
    *(Tensor, Operator, OperatorGraph, Edges, crossing_tensors),
    *(read_graph, graph_from_networkx, merge_graphs, check_partition, check_stage),
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("described", WITH_EXAMPLES, ids=lambda described: described.__name__)
def test_each_public_name_of_graphs_has_an_example(described: object) -> None:
    assert doctest.DocTestParser().get_examples(described.__doc__ or "")
