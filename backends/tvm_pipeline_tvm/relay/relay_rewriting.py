"""A model whose concatenations are done in parts before Relay compiles it: RewriteConcat on the imported module.

Next: `rewrite_concat.py`.
"""

from __future__ import annotations

import logging

import tvm
from tvm import relay

from tvm_pipeline.core.model import Model
from tvm_pipeline_tvm.concatenations import ModelInParts
from tvm_pipeline_tvm.relay.fold import FoldConstantFast
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.rewrite_concat import Concatenations

_log = logging.getLogger(__name__)


class RelayRewriting(ModelInParts):
    """A Model that Relay imports, and its concatenations.

    Raises:
        ModelError: TVM cannot import the model.
    """

    def __init__(self, model: Model) -> None:
        _log.info(f"importing {model.name}")
        mod, params = import_model(model)
        if params:
            mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
        passes = (relay.transform.SimplifyInference(), FoldConstantFast(), relay.transform.InferType())
        with tvm.transform.PassContext(opt_level=3):
            mod = tvm.transform.Sequential(passes)(mod)
        is_quantized = any(name.startswith("qnn.") for name in relay.analysis.list_op_freqs(mod))
        super().__init__(model, Concatenations(mod), "relay.json", is_quantized=is_quantized)
