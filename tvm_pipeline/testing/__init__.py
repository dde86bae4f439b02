"""For tests of backends, and of what runs on one; needs nothing that tvm-pipeline itself does not need.

fake.py           FakeBackend: a backend without hardware, which holds its caller to the contract
conformance.py    check_backend: whether a backend keeps the contract
cut_cases.py      the cuts that it makes, and how tensors go through them

    from tvm_pipeline.testing import check_backend

    def test_my_backend_keeps_the_contract():
        check_backend(my_package.backend, load("model.onnx"))
"""

from tvm_pipeline.testing.conformance import ContractError, check_backend
from tvm_pipeline.testing.fake import LAYOUTS, FakeBackend, FakeModel, FakeRunner, Function, Hook, busy, raise_at

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
    "raise_at",
]
