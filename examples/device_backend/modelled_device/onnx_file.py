"""An ONNX file with a kernel for each operator; the core reads and cuts it. Next: `compiled.py`."""

from __future__ import annotations

import numpy as np
from onnx.reference import ReferenceEvaluator

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.core.graph import Operator
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.onnx_graph import OnnxGraph


class OnnxFile(OnnxGraph):
    """A Slicer of an ONNX file; it raises ModelError where the file cannot be cut or has no kernels."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        names = [operator.name for operator in self.graph.operators]
        try:
            self.kernels = {name: ReferenceEvaluator(self.part([name])) for name in names}
        except Exception as error:  # onnx raises errors of many kinds, without a common root
            raise ModelError(f"{model.name}: the modelled device cannot run it: {error}") from error

    def values(self) -> dict[str, Array]:
        tensors = {t.name: noise(Port(t.name, t.shape, t.dtype)) for t in self.graph.inputs}
        for operator in self.graph.operators:
            tensors.update(self.compute(operator, tensors))
        return tensors

    def compute(self, operator: Operator, tensors: dict[str, Array]) -> dict[str, Array]:
        """Run one operator on tensors by name; return what it writes."""
        kernel = self.kernels[operator.name]
        results = kernel.run(None, {name: tensors[name] for name in operator.inputs})
        written = dict(zip(kernel.output_names, results, strict=True))
        return {t.name: np.asarray(written[t.name], t.dtype) for t in operator.outputs}
