"""A model whose concatenations are done in parts before Relay compiles it: RewriteConcat on the imported module.

The result is a Model again, Relay as JSON, so that every target compiles the same module, and the cache, stages and
bundles know it by its own content. Next: `rewrite_concat.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tvm
from tvm import relay

from tvm_pipeline.core.model import Model
from tvm_pipeline_tvm.relay.fold import FoldConstantFast
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.rewrite_concat import Concatenations

_log = logging.getLogger(__name__)


class RelayRewriting:
    """A Model that Relay imports, and its concatenations; see `backends.contract.Rewriting`.

    Raises:
        ModelError: TVM cannot import the model.
    """

    refused: Mapping[str, str] = {}

    def __init__(self, model: Model) -> None:
        _log.info(f"importing {model.name}")
        mod, params = import_model(model)
        if params:
            mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
        passes = (relay.transform.SimplifyInference(), FoldConstantFast(), relay.transform.InferType())
        with tvm.transform.PassContext(opt_level=3):
            mod = tvm.transform.Sequential(passes)(mod)
        self._model = model
        self._concatenations = Concatenations(mod)
        self.names = self._concatenations.names
        self.is_quantized = any(name.startswith("qnn.") for name in relay.analysis.list_op_freqs(mod))

    def peak_bytes(self, chosen: Sequence[str]) -> int:
        _log.info(f"least memory of {self._model.name} with {len(chosen)} of {len(self.names)} in parts")
        return self._concatenations.peak_bytes(chosen)

    def rewritten(self, chosen: Sequence[str]) -> Model:
        mod = self._concatenations.rewritten(chosen)
        content = tvm.ir.save_json(mod).encode()
        return replace(self._model, format="relay.json", content=content, params=b"")
