"""The software CUDA device of tests/relax."""

from __future__ import annotations

from tests.relax.conftest import _software_cuda, software_cuda, software_cuda_folder  # noqa: F401
