"""What TVM's importer of TFLite lacks, as an importer that has it: `relay.frontend.from_tflite(op_converter=...)`.

- Sparse weights in float16: DENSIFY leaves a value, and DEQUANTIZE, which reads a buffer, has to take it.
- SELECT_V2 is SELECT with broadcasting, which `relay.where` has.
- Operators that read constants where TVM expects computed tensors.
- MediaPipe's custom operator Convolution2DTransposeBias is TRANSPOSE_CONV with a bias.

Next: `../tflite_walk.py`, which says before an import what is missing even so.
"""

from __future__ import annotations

from typing import Any

from tvm import relay
from tvm.relay.frontend.tflite import OperatorConverter

from tvm_pipeline_tvm.mediapipe import TRANSPOSE_BIAS, is_transpose_bias, transpose_bias


class RepairedConverter(OperatorConverter):
    """TVM's converter of TFLite operators, with what it lacks."""

    def __init__(self, model: Any, subgraph: Any, exp_tab: Any) -> None:
        super().__init__(model, subgraph, exp_tab)
        self._file = model
        self.convert_map |= {"SELECT_V2": self.convert_select, TRANSPOSE_BIAS: self.convert_transpose_bias}

    def get_op_code_str(self, op: Any) -> str:
        """Return the key of an operator in `convert_map`."""
        code = self._file.OperatorCodes(op.OpcodeIndex())
        return TRANSPOSE_BIAS if is_transpose_bias(code) else super().get_op_code_str(op)

    def get_expr(self, input_tensor_idx: int) -> relay.Expr:
        """Return what a tensor is computed by, or a constant's value."""
        if self.has_expr(input_tensor_idx):
            return super().get_expr(input_tensor_idx)
        return self.get_tensor_expr(*self.get_tensors([input_tensor_idx]))

    def convert_dequantize(self, op: Any) -> relay.Expr:
        """Convert DEQUANTIZE, of weights that DENSIFY made as well."""
        [weights] = self.get_input_tensors(op)
        if not self.is_prefetched(weights.tensor_idx):
            return super().convert_dequantize(op)
        dense = self.get_prefetched_node(weights.tensor_idx)
        constant = self.exp_tab.new_const(dense, dtype=str(dense.dtype), source_name=weights.tensor.Name())
        return relay.cast(constant, "float32")

    def convert_transpose_bias(self, op: Any) -> relay.Expr:
        """Convert MediaPipe's transposed convolution of NHWC images by weights OHWI, with a bias, all in float32."""
        image, weights, bias = self.get_input_tensors(op)
        channels, *kernel, _ = (int(extent) for extent in weights.tensor.ShapeAsNumpy())
        strides, padding = transpose_bias(op, image.tensor.ShapeAsNumpy(), weights.tensor.ShapeAsNumpy())
        product = relay.nn.conv2d_transpose(
            self.get_tensor_expr(image),
            relay.transpose(self.get_tensor_expr(weights), (3, 0, 1, 2)),
            strides=strides,
            padding=padding,
            channels=channels,
            kernel_size=kernel,
            data_layout="NHWC",
            kernel_layout="IOHW",
        )
        return relay.nn.bias_add(product, self.get_tensor_expr(bias), axis=3)
