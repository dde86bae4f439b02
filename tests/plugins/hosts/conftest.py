"""The application loads the commands of plug-ins, so that the tests may import these."""

from __future__ import annotations

import tvm_pipeline.cli

__all__ = ["tvm_pipeline"]
