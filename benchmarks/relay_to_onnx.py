"""Write a network of Relay as ONNX, with its weights, so that other engines run the same one.

It knows the operators of `relay.testing`'s networks. TVM's own `to_onnx` gives another inception_v3, since it drops
`count_include_pad` of average pooling and uses the scale of a batch normalisation that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

from tvm_pipeline_tvm.relay.kernel_walkers import outer_expressions

import tvm  # isort: skip
from tvm import relay  # isort: skip

OPSET, IR_VERSION = 13, 8
Attributes = dict[str, Any]


def as_onnx(name: str, mod: tvm.IRModule, params: Mapping[str, Any]) -> onnx.ModelProto:
    """Return a type-checked Relay module as ONNX; raise SystemExit naming an operator that is not known here.

    Args:
        params: the weights, by the names of parameters of `main`; its other parameters are the inputs.
    """
    writer = _Writer(params)
    main = mod["main"]
    for expr in outer_expressions(main.body):
        writer.write(expr)
    inputs = [parameter for parameter in main.params if parameter.name_hint not in params]
    graph = helper.make_graph(
        writer.nodes,
        name,
        [_value(parameter.name_hint, parameter.checked_type) for parameter in inputs],
        [_value(writer.names[main.body], main.body.checked_type)],
        writer.constants,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(made)
    return made


def _value(name: str, type_: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [int(extent) for extent in type_.shape])


class _Writer:
    """Makes nodes in order; `names` has the ONNX name of each expression's first output."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.names: dict[relay.Expr, str] = {}
        self._params = params

    def write(self, expr: relay.Expr) -> None:
        if isinstance(expr, relay.Var):
            self.names[expr] = expr.name_hint
            if expr.name_hint in self._params:
                self.constant(expr.name_hint, self._params[expr.name_hint].numpy())
        elif isinstance(expr, relay.Constant):
            self.names[expr] = self.constant(f"constant_{len(self.names)}", expr.data.numpy())
        elif isinstance(expr, relay.TupleGetItem) and expr.index == 0:
            self.names[expr] = self.names[expr.tuple_value]
        elif isinstance(expr, relay.Call):
            self.names[expr] = self._call(expr)
        elif not isinstance(expr, relay.Tuple):
            raise SystemExit(f"relay_to_onnx.py does not know {type(expr).__name__}; add it there")

    def constant(self, name: str, array: Any) -> str:
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def _call(self, call: relay.Call) -> str:
        operator = call.op.name
        if operator not in _OPERATORS:
            raise SystemExit(f"relay_to_onnx.py does not know the operator {operator}; add it there")
        kind, attributes = _OPERATORS[operator]
        read = call.args[0].fields if isinstance(call.args[0], relay.Tuple) else call.args
        inputs = [self.names[argument] for argument in read]
        name = f"{operator}_{len(self.names)}"
        if operator in ("nn.bias_add", "nn.batch_norm"):
            inputs = self._along_channels(call, inputs, name)
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes(call.attrs)))
        return name

    def _along_channels(self, call: relay.Call, inputs: list[str], name: str) -> list[str]:
        """Return the inputs as ONNX wants them: a bias that broadcasts, and a scale and offset that are used."""
        if call.op.name == "nn.batch_norm":
            value, *weights = inputs
            for index, (is_used, neutral) in enumerate(((call.attrs.scale, 1), (call.attrs.center, 0))):
                if not is_used:
                    array = self._params[weights[index]].numpy() * 0 + neutral
                    weights[index] = self.constant(f"{name}_{index}", array.astype("float32"))
            return [value, *weights]
        rank = len(call.checked_type.shape)
        behind = rank - 1 - int(call.attrs.axis) % rank
        bias = self._params[inputs[1]].numpy()
        return [inputs[0], self.constant(f"{name}_bias", bias.reshape(-1, *[1] * behind))]


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]


def _pads(padding: Any) -> list[int]:
    """Return (top, left, bottom, right) of Relay's one, two or four numbers."""
    sides = _ints(padding)
    return (sides * 4)[:4] if len(sides) < 4 else sides


def _convolution(attrs: Any) -> Attributes:
    return {
        "group": int(attrs.groups),
        "kernel_shape": _ints(attrs.kernel_size),
        "strides": _ints(attrs.strides),
        "pads": _pads(attrs.padding),
        "dilations": _ints(attrs.dilation),
    }


def _pooling(attrs: Any) -> Attributes:
    return {
        "kernel_shape": _ints(attrs.pool_size),
        "strides": _ints(attrs.strides),
        "pads": _pads(attrs.padding),
        "ceil_mode": int(attrs.ceil_mode),
    }


def _average(attrs: Any) -> Attributes:
    return {**_pooling(attrs), "count_include_pad": int(attrs.count_include_pad)}


def _plain(_: Any) -> Attributes:
    return {}


_OPERATORS: dict[str, tuple[str, Callable[[Any], Attributes]]] = {
    "add": ("Add", _plain),
    "nn.bias_add": ("Add", _plain),
    "nn.batch_flatten": ("Flatten", _plain),
    "nn.batch_norm": ("BatchNormalization", lambda attrs: {"epsilon": float(attrs.epsilon)}),
    "nn.conv2d": ("Conv", _convolution),
    "concatenate": ("Concat", lambda attrs: {"axis": int(attrs.axis)}),
    "nn.dense": ("Gemm", lambda _: {"transB": 1}),
    "nn.dropout": ("Identity", _plain),
    "nn.avg_pool2d": ("AveragePool", _average),
    "nn.global_avg_pool2d": ("GlobalAveragePool", _plain),
    "nn.max_pool2d": ("MaxPool", _pooling),
    "nn.relu": ("Relu", _plain),
    "nn.softmax": ("Softmax", lambda attrs: {"axis": int(attrs.axis)}),
}
