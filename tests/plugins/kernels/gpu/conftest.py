"""The devices of tests/gpu."""

from __future__ import annotations

from tests.gpu.conftest import (  # noqa: F401
    _cuda_is_software,
    _faults_end,
    compiled,
    cpu,
    gpu,
    mixed,
    model,
    nothing_to_free,
    software_cuda,
    software_cuda_folder,
)
