"""With Relax, models are not rewritten to save memory, and the option says so."""

from __future__ import annotations

import pytest

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import OptionError
from tvm_pipeline_tvm.host.host import HostBackend


def test_the_option_names_the_environment_that_has_it() -> None:
    with pytest.raises(OptionError, match=r"`memory_rewrite` needs Relay .* compile without it, or run `pip install"):
        HostBackend().rewriting(Model("net", "onnx", b""))
