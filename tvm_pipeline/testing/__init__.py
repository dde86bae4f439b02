"""For tests of backends, and of what runs on one; needs nothing that tvm-pipeline itself does not need.

fake.py           FakeBackend: a backend without hardware, which holds its caller to the contract
conformance.py    check_backend: whether a backend keeps the contract
cut_cases.py      the cuts that it makes, and how tensors go through them
installed.py      installed: backends without a package, as if packages had installed them
whole_numbers.py  networks on which all devices must give the same bits: what `tvm-pipeline check` runs
examples.py       the small network that the examples in docstrings share

    from tvm_pipeline.testing import check_backend

    def test_my_backend_keeps_the_contract():
        check_backend(my_package.backend, load("model.onnx"))
"""

from tvm_pipeline.testing.conformance import ContractError, check_backend
from tvm_pipeline.testing.examples import (
    example_backend,
    example_bundle,
    example_graph,
    example_model,
    example_problem,
)
from tvm_pipeline.testing.fake import LAYOUTS, FakeBackend, FakeModel, FakeRunner, Function, Hook, busy, raise_at
from tvm_pipeline.testing.installed import installed

__all__ = [
    "LAYOUTS",
    "ContractError",
    "FakeBackend",
    "FakeModel",
    "FakeRunner",
    "Function",
    "Hook",
    "busy",
    "check_backend",
    "example_backend",
    "example_bundle",
    "example_graph",
    "example_model",
    "example_problem",
    "installed",
    "raise_at",
]
