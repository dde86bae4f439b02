"""TVM's importer of TFLite files for Relax, with what it lacks.

TVM computes quantised operators in float32, between dequantize and quantize. So the outputs of an integer model may
differ from TFLite's by some steps of their scale. What only moves numbers is computed on the integers as they are.

    PAD(x), of x and y with one scale   ->  nn.pad(x, zero point of x)

Next: `channels_first.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend.tflite import from_tflite
from tvm.relax.frontend.tflite.tflite_frontend import ExprTable, OperatorConverter

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.mediapipe import TRANSPOSE_BIAS, is_transpose_bias, transpose_bias
from tvm_pipeline_tvm.relax.channels_first import channels_first
from tvm_pipeline_tvm.relax.simplify import simplified
from tvm_pipeline_tvm.tflite_walk import obstacles
from tvm_pipeline_tvm.tvm_errors import on_shapes, reason

# Operators that move numbers and compute none. TVM refuses them for integers, and its converters of them do no harm.
_MOVES = frozenset(
    (
        *("BATCH_TO_SPACE_ND", "DEPTH_TO_SPACE", "EXPAND_DIMS", "GATHER", "PACK", "PAD", "PADV2", "SLICE"),
        *("SPACE_TO_DEPTH", "SPLIT", "SPLIT_V", "SQUEEZE", "STRIDED_SLICE", "TILE", "TRANSPOSE", "UNPACK"),
    )
)


def imported_tflite(model: Model) -> tvm.IRModule:
    """Return the module of a TFLite file as one block of dataflow; raise ModelError where TVM refuses it."""
    import tflite

    parsed = tflite.Model.GetRootAsModel(model.content, 0)
    shapes = {tensor.name: list(tensor.shape) for tensor in model.inputs}
    dtypes = {tensor.name: tensor.dtype for tensor in model.inputs}
    converter = _Converter(parsed, parsed.Subgraphs(0), ExprTable(), None)
    if obstacle := obstacles(parsed, converter.convert_map):
        raise ModelError(f"{model.name}: TVM cannot import it: {obstacle}")
    try:
        converter.check_unsupported_ops()
        mod = from_tflite(parsed, shapes, dtypes, _Converter)
        mod["main"] = mod["main"].without_attr("params").without_attr("num_input")
    except Exception as error:  # TVM's importer raises any type of error
        raise ModelError(f"{model.name}: TVM cannot import it: {reason(error)}{on_shapes(model)}") from error
    return channels_first(simplified(mod))


class _Converter(OperatorConverter):
    """TVM's converter of TFLite operators, with what it lacks."""

    _SUPPORTED_QUANTIZED_OPS = OperatorConverter._SUPPORTED_QUANTIZED_OPS | _MOVES

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self._file = model
        self.convert_map[TRANSPOSE_BIAS] = self.convert_transpose_bias

    def get_op_code_str(self, op: Any) -> str:
        """Return the key of an operator in `convert_map`."""
        code = self._file.OperatorCodes(op.OpcodeIndex())
        return TRANSPOSE_BIAS if is_transpose_bias(code) else str(super().get_op_code_str(op))

    def check_unsupported_ops(self) -> None:
        """Raise OpNotImplemented for what cannot be imported; of what moves numbers, where the scale changes."""
        super().check_unsupported_ops()
        for index in range(self.subgraph.OperatorsLength()):
            op = self.subgraph.Operators(index)
            kind = self.get_op_code_str(op)
            tensors = [
                t for t in (*self.get_input_tensors(op), *self.get_output_tensors(op)) if t.qnn_params is not None
            ]
            if kind in _MOVES and not all(self.has_same_qnn_params(tensors[0], other) for other in tensors):
                raise tvm.error.OpNotImplemented(f"{kind} changes the scale of the numbers that it moves")

    def convert_dequantize(self, op: Any) -> Any:
        """Convert DEQUANTIZE, of weights that DENSIFY made as well."""
        [weights] = self.get_input_tensors(op)
        if not self.is_prefetched(weights.tensor_idx):
            return super().convert_dequantize(op)
        return relax.const(self.get_prefetched_node(weights.tensor_idx).astype("float32"))

    def convert_prelu(self, op: Any) -> Any:
        """Convert PRELU, of one slope for each channel as such; TVM's own method flattens the picture."""
        data, slopes = self.get_input_tensors(op)
        rank, shape = data.tensor.ShapeLength(), slopes.tensor.ShapeAsNumpy()
        if max(shape[:-1], default=1) > 1:
            return super().convert_prelu(op)
        by_channel = self.bb.normalize(relax.op.reshape(self.get_tensor_expr(slopes), [int(shape[-1])]))
        return relax.op.nn.prelu(self.get_tensor_expr(data), by_channel, axis=rank - 1)

    def convert_transpose_bias(self, op: Any) -> Any:
        """Convert MediaPipe's transposed convolution of NHWC images by weights OHWI, with a bias, all in float32."""
        image, weights, bias = self.get_input_tensors(op)
        strides, padding = transpose_bias(op, image.tensor.ShapeAsNumpy(), weights.tensor.ShapeAsNumpy())
        product = relax.op.nn.conv2d_transpose(
            self.get_tensor_expr(image),
            self.bb.normalize(relax.op.permute_dims(self.get_tensor_expr(weights), (3, 0, 1, 2))),
            strides=strides,
            padding=padding,
            data_layout="NHWC",
            kernel_layout="IOHW",
        )
        return relax.op.add(self.bb.normalize(product), self.get_tensor_expr(bias))

    def has_same_qnn_params(self, lhs_tensor: Any, rhs_tensor: Any) -> bool:
        """Return whether two tensors have one scale and one zero point; TVM's own method lacks an argument."""
        names, lhs, rhs = ("scale", "zero_point"), lhs_tensor.qnn_params, rhs_tensor.qnn_params
        return all(np.array_equal(lhs[name].value.numpy(), rhs[name].value.numpy()) for name in names)
