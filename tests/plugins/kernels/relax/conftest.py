"""The GPUs of tests/relax: CUDA made of software, and PoCL."""

from __future__ import annotations

from tests.relax.conftest import (  # noqa: F401
    _software_cuda,
    pocl,
    software_cuda,
    software_cuda_device,
    software_cuda_folder,
)
