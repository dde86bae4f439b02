"""The examples in docstrings run and print what they say: of every public name, and of the vocabulary."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import tvm_pipeline
from tvm_pipeline import core
from tvm_pipeline.core.graph import Edges, crossing_tensors
from tvm_pipeline.core.partition import check_partition, check_stage

PUBLIC: dict[str, Any] = {name: getattr(tvm_pipeline, name) for name in tvm_pipeline.__all__}
MODULES = sorted(f"{core.__name__}.{module.name}" for module in pkgutil.iter_modules(core.__path__))
HEADING = "\nExamples:\n"  # as mkdocstrings wants it: under another heading the lines become quotations


def printed_failures(name: str, docstring: str, names: dict[str, Any]) -> list[str]:
    test = doctest.DocTestParser().get_doctest(docstring, dict(names), name, None, None)
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    return printed


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_has_an_example_that_runs(name: str) -> None:
    """It needs nothing but what `from tvm_pipeline import *` brings, neither TVM nor hardware."""
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    assert HEADING in docstring
    assert doctest.DocTestParser().get_examples(docstring)
    assert not (failures := printed_failures(name, docstring, PUBLIC)), "\n".join(failures)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs=PUBLIC, optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize(
    "described", [Edges, crossing_tensors, check_partition, check_stage], ids=lambda described: described.__name__
)
def test_each_name_that_graphs_need_has_an_example(described: object) -> None:
    assert doctest.DocTestParser().get_examples(described.__doc__ or "")
