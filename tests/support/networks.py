"""Small networks that compile in a second or two, with what makes cutting hard: branches, operators of several
outputs, reshapes that run nothing, outputs that are read inside, several inputs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import tvm_pipeline_tvm  # noqa: F401 - before `import tvm`, since it sets TVM's environment up

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline_tvm.relay.compiled import RelayModel


class Weights:
    """Seeded weights, as parameters of `main`, scaled so that values neither vanish nor explode."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(0)
        self.params: dict[str, Any] = {}

    def __call__(self, *shape: int, dtype: str = "float32") -> relay.Var:
        name = f"w{len(self.params)}"
        if dtype == "float32":
            values = self._draw.standard_normal(shape) * np.sqrt(2 / max(np.prod(shape[1:]), 1))
        else:
            values = self._draw.integers(-50, 50, shape)
        self.params[name] = tvm.nd.array(values.astype(dtype))
        return relay.var(name, shape=shape, dtype=dtype)

    def conv(self, x: relay.Expr, channels: int, kernel: int = 3, **options: Any) -> relay.Expr:
        """Return a convolution of the same extent, its bias and its ReLU."""
        groups = options.get("groups", 1)
        read = int(relay.transform.InferTypeLocal(x).shape[1]) // groups
        x = relay.nn.conv2d(
            x,
            self(channels, read, kernel, kernel),
            channels=channels,
            kernel_size=(kernel, kernel),
            padding=(kernel // 2, kernel // 2),
            **options,
        )
        return relay.nn.relu(relay.nn.bias_add(x, self(channels)))

    def dense(self, x: relay.Expr, units: int) -> relay.Expr:
        read = int(relay.transform.InferTypeLocal(x).shape[1])
        return relay.nn.dense(x, self(units, read))


def image(name: str = "data", channels: int = 3, extent: int = 16) -> relay.Var:
    return relay.var(name, shape=(1, channels, extent, extent))


def branching(w: Weights) -> relay.Expr:
    """Return two branches joined by a concatenation, a residual addition, and a flattening before the last product."""
    stem = w.conv(image(), 16)
    joined = relay.concatenate([w.conv(stem, 8, 1), w.conv(stem, 8, 3)], axis=1)
    x = relay.add(w.conv(joined, 16), stem)
    x = relay.nn.max_pool2d(x, (2, 2), (2, 2))
    x = relay.nn.avg_pool2d(w.conv(x, 32), (2, 2), (2, 2))
    return w.dense(relay.nn.batch_flatten(x), 10)


def splitting(w: Weights) -> relay.Expr:
    """Return an operator of three outputs; their readers are far apart, and one output is read twice."""
    x = w.conv(image(), 24)
    first, second, third = relay.split(x, 3, axis=1)
    a = w.conv(first, 8)
    b = w.conv(relay.sigmoid(second), 8)
    c = relay.nn.max_pool2d(third, (3, 3), padding=(1, 1))
    x = w.conv(relay.concatenate([a, b, c], axis=1), 16)
    x = relay.concatenate([x, third], axis=1)
    return relay.mean(w.conv(x, 8), axis=(2, 3))


def two_in_two_out(w: Weights) -> relay.Expr:
    """Return two inputs of different shapes; the first output is read inside as well."""
    picture, vector = image(), relay.var("vector", shape=(1, 12))
    x = w.conv(picture, 16)
    y = relay.tanh(w.dense(vector, 16))
    gated = relay.multiply(x, relay.reshape(y, (1, 16, 1, 1)))
    first = relay.sigmoid(w.conv(gated, 8))
    x = w.conv(relay.concatenate([first, gated], axis=1), 16)
    second = w.dense(relay.reshape(relay.nn.global_avg_pool2d(x), (1, 16)), 5)
    return relay.Tuple([first, relay.add(second, w.dense(y, 5))])


def shapes(w: Weights) -> relay.Expr:
    """Return reshapes that run nothing, and an output that is also read under another shape inside."""
    x = w.conv(image(extent=8), 8)
    flat = relay.reshape(x, (1, 512))
    scores = relay.nn.softmax(relay.multiply(w.dense(flat, 16), relay.const(0.3)))
    square = relay.reshape(scores, (1, 1, 4, 4))
    inside = w.conv(square, 4)
    rows = relay.reshape(inside, (4, 16))
    turned = relay.transpose(rows, (1, 0))
    return relay.Tuple([relay.reshape(scores, (4, 4)), relay.nn.softmax(turned), relay.add(inside, square)])


def mobile(w: Weights) -> relay.Expr:
    """Return depthwise, grouped and transposed convolutions, and a resize."""
    x = w.conv(image(), 16, strides=(2, 2))
    x = w.conv(x, 16, groups=16)
    skip = x = w.conv(x, 32, 1)
    x = w.conv(x, 32, strides=(2, 2), groups=4)
    x = relay.nn.conv2d_transpose(
        x, w(32, 16, 2, 2), channels=16, kernel_size=(2, 2), strides=(2, 2), data_layout="NCHW"
    )
    x = relay.concatenate([relay.nn.relu(x), skip], axis=1)
    x = relay.image.resize2d(
        w.conv(x, 8, 1), (12, 12), method="nearest_neighbor", coordinate_transformation_mode="asymmetric"
    )
    return w.conv(x, 4)


def int8(w: Weights) -> relay.Expr:
    """Return quantized convolutions with a residual addition, as a TFLite importer would write them."""
    one, zero = relay.const(0.05), relay.const(0)

    def conv(x: relay.Expr, read: int) -> relay.Expr:
        x = relay.qnn.conv2d(
            x,
            w(16, read, 3, 3, dtype="int8"),
            zero,
            zero,
            one,
            one,
            kernel_size=(3, 3),
            channels=16,
            padding=(1, 1),
        )
        x = relay.nn.bias_add(x, w(16, dtype="int32"))
        return relay.qnn.requantize(x, relay.const(0.0025), zero, one, zero, out_dtype="int8")

    x = relay.qnn.quantize(relay.var("data", shape=(1, 3, 12, 12)), one, zero, out_dtype="int8")
    stem = conv(x, 3)
    x = relay.qnn.add(conv(conv(stem, 16), 16), stem, one, zero, one, zero, one, zero)
    x = relay.nn.max_pool2d(x, (2, 2), (2, 2))
    return relay.qnn.dequantize(x, one, zero)


NETWORKS: dict[str, Callable[[Weights], relay.Expr]] = {
    network.__name__: network for network in (branching, splitting, two_in_two_out, shapes, mobile, int8)
}


def relay_module(name: str) -> tuple[tvm.IRModule, dict[str, Any]]:
    """Return one of NETWORKS in Relay, and its parameters."""
    weights = Weights()
    return module_of(NETWORKS[name](weights)), weights.params


def module_of(body: relay.Expr) -> tvm.IRModule:
    """Return the module, with types, whose `main` computes an expression from its free variables."""
    function = relay.Function(relay.analysis.free_vars(body), body)
    return relay.transform.InferType()(tvm.IRModule.from_expr(function))


def as_model(name: str, mod: tvm.IRModule, params: dict[str, Any]) -> Model:
    """Return the module as if it had been read from a file of Relay JSON with its parameters beside it.

    Its digest is the same in each process, so that what one of them compiled is found by the others. It has direct
    sums, as plain TVM has.
    """
    return Model(name, "relay.json", tvm.ir.save_json(mod).encode(), params=_saved(params), tolerance=0.0)


def _saved(params: Mapping[str, Any]) -> bytes:
    """Return parameters as TVM saves them, by name: its own order differs from process to process."""
    header, names, arrays = b"", b"", b""
    for key in sorted(params):  # each saved alone: 16 bytes, a count, the length of the name, the name, a count, data
        saved = bytes(tvm.runtime.save_param_dict({key: params[key]}))
        ends = 32 + len(key.encode())
        header, names, arrays = saved[:16], names + saved[24:ends], arrays + saved[ends + 8 :]
    count = struct.pack("<Q", len(params))
    return header + count + names + count + arrays if params else b""


def whole_outputs(model: RelayModel, target: str, frame: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of the unsplit model, by TVM's own executor over the whole library."""
    library = model.libraries[target]
    executor = graph_executor.create(json.dumps(library.graph), library.module, tvm.cpu())
    executor.set_input(**library.params)
    executor.set_input(**frame)
    executor.run()
    return [executor.get_output(index).numpy() for index in range(executor.get_num_outputs())]


def every_tensor(model: RelayModel, target: str, frame: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of every operator of the unsplit model, in logical order.

    TVM's own executor runs the whole library, with every entry of its graph an output.
    """
    library = model.libraries[target]
    graph = json.loads(json.dumps(library.graph))
    rows, nodes = graph["node_row_ptr"], graph["nodes"]
    storage = list(range(rows[-1]))
    for position, node in enumerate(nodes):
        if node["op"] != "null" and node["attrs"]["func_name"] == "__nop":
            producer, index, _ = node["inputs"][0]
            storage[rows[position]] = storage[rows[producer] + index]
    numbers = {entry: number for number, entry in enumerate(dict.fromkeys(storage))}
    graph["attrs"]["storage_id"][1] = [numbers[entry] for entry in storage]
    kernels = [kernel for kernel in library.kernels if not kernel.is_glue]
    fields = [
        (tensor.name, kernel.node, field, kernel.outputs[field].layout)
        for operator, kernel in zip(model.graph.operators, kernels, strict=True)
        for field, tensor in enumerate(operator.outputs)
    ]
    graph["heads"] = [[node, field, 0] for _, node, field, _ in fields]
    executor = graph_executor.create(json.dumps(graph), library.module, tvm.cpu())
    executor.set_input(**library.params)
    executor.set_input(**frame)
    executor.run()
    return {
        name: to_logical(executor.get_output(index).numpy(), layout)
        for index, (name, _, _, layout) in enumerate(fields)
    }
