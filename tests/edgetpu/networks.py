"""TFLite files for the tests, their results on TFLite's own kernels, and legal ways to cut a graph.

The files are written with the schema's classes, not with the product's code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from tests.support.graphs import random_order
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage

MOBILENET = Path(__file__).parent / "data" / "mobilenet_v2_int8.tflite"
Op, Type, Options = schema.BuiltinOperator, schema.TensorType, schema.BuiltinOptions


class Writer:
    """A TFLite file of int8 operators, one after another; every tensor has the same scale."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.buffers: list[Any] = [schema.BufferT()]
        self.operators: list[Any] = []
        self.codes: list[Any] = []

    def tensor(self, shape: tuple[int, ...], type_: int = Type.INT8, *, scale: float = 0.05, data: Any = None) -> int:
        """Add a tensor to be computed or, with `data`, a constant; a scale of 0 means no quantisation."""
        # As converters do, each tensor has a buffer of its own, an empty one where it is computed.
        self.buffers.append(schema.BufferT(data=None if data is None else np.frombuffer(data.tobytes(), np.uint8)))
        quantization = schema.QuantizationParametersT(scale=[scale], zeroPoint=[0]) if scale else None
        self.tensors.append(
            schema.TensorT(
                shape=list(shape),
                type=type_,
                buffer=len(self.buffers) - 1,
                name=f"tensor/{len(self.tensors)}:0",
                quantization=quantization,
            )
        )
        return len(self.tensors) - 1

    def shape(self, index: int) -> tuple[int, ...]:
        return tuple(self.tensors[index].shape)

    def operator(
        self,
        code: int,
        reads: list[int],
        writes: list[int],
        options_type: int = 0,
        options: Any = None,
        version: int = 2,
    ) -> list[int]:
        self.codes.append(schema.OperatorCodeT(deprecatedBuiltinCode=min(code, 127), builtinCode=code, version=version))
        self.operators.append(
            schema.OperatorT(
                opcodeIndex=len(self.codes) - 1,
                inputs=reads,
                outputs=writes,
                builtinOptionsType=options_type,
                builtinOptions=options,
            )
        )
        return writes

    def content(self, inputs: list[int], outputs: list[int]) -> bytes:
        subgraph = schema.SubGraphT(self.tensors, inputs, outputs, self.operators, "main")
        return packed(schema.ModelT(3, self.codes, [subgraph], "a test", self.buffers))


def packed(model: Any) -> bytes:
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def changed(content: bytes, change: Callable[[Any], None]) -> bytes:
    """Return the file with a change made to its parsed form."""
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    change(model)
    return packed(model)


def random_network(seed: int, operators: int = 12) -> bytes:
    """Return a network with branches, joins, shared weights, two inputs, and some outputs that are read as well."""
    draw, writer = random.Random(seed), Writer()
    rng = np.random.default_rng(seed)
    inputs = [writer.tensor((1, 4, 4, 4)), writer.tensor((1, 4, 4, 4))]
    known = list(inputs)
    axis = writer.tensor((), Type.INT32, scale=0, data=np.int32(3))
    weights: dict[int, tuple[int, int]] = {}
    for _ in range(operators):
        kind = draw.choice(("add", "conv", "conv", "pool", "split", "concat"))
        left = draw.choice(known[-6:])
        shape = writer.shape(left)
        if kind == "split" and shape[3] % 2 == 0:
            halves = [writer.tensor((*shape[:3], shape[3] // 2)) for _ in range(2)]
            known += writer.operator(Op.SPLIT, [axis, left], halves, Options.SplitOptions, schema.SplitOptionsT(2))
        elif kind == "concat" and shape[3] <= 8:
            right = draw.choice(known)
            joined = writer.tensor((*shape[:3], shape[3] + writer.shape(right)[3]))
            options = schema.ConcatenationOptionsT(axis=3)
            known += writer.operator(Op.CONCATENATION, [left, right], [joined], Options.ConcatenationOptions, options)
        elif kind == "pool":
            options = schema.Pool2DOptionsT(strideW=1, strideH=1, filterWidth=2, filterHeight=2)
            made = writer.tensor(shape)
            known += writer.operator(Op.MAX_POOL_2D, [left], [made], Options.Pool2DOptions, options)
        elif kind == "add":
            right = draw.choice([index for index in known if writer.shape(index) == shape])
            made = writer.tensor(shape)
            known += writer.operator(Op.ADD, [left, right], [made], Options.AddOptions, schema.AddOptionsT())
        else:
            channels = shape[3]
            if channels not in weights:  # else convolutions share them
                filters = rng.integers(-30, 31, (4, 3, 3, channels)).astype(np.int8)
                bias = rng.integers(-999, 999, 4).astype(np.int32)
                weights[channels] = (
                    writer.tensor(filters.shape, scale=0.01, data=filters),
                    writer.tensor((4,), Type.INT32, scale=0.0005, data=bias),
                )
            options = schema.Conv2DOptionsT(strideW=1, strideH=1)
            made = writer.tensor((*shape[:3], 4))
            known += writer.operator(
                Op.CONV_2D, [left, *weights[channels]], [made], Options.Conv2DOptions, options, version=3
            )
    read = {index for operator in writer.operators for index in operator.inputs}
    computed = known[len(inputs) :]
    outputs = [index for index in computed if index not in read] + draw.sample(computed, 1)
    outputs = list(dict.fromkeys(outputs))
    draw.shuffle(outputs)
    return writer.content(inputs, outputs)


def random_stages(graph: OperatorGraph, count: int, seed: int) -> list[Stage]:
    """Cut a random topological order at random: stages are seldom contiguous in the order of the file."""
    draw = random.Random(seed)
    order = random_order(draw, graph)
    cuts = [0, *sorted(draw.sample(range(1, len(order)), count - 1)), len(order)]
    return [Stage((f"tpu{i}",), tuple(order[a:b])) for i, (a, b) in enumerate(pairwise(cuts))]


def random_feeds(graph: OperatorGraph, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {t.name: rng.integers(-128, 128, t.shape).astype(t.dtype) for t in graph.inputs}


def run(
    content: bytes, feeds: Mapping[str, np.ndarray], *, every: bool = False, xnnpack: bool = False
) -> dict[str, np.ndarray]:
    """Return what a file computes, by the tensors' names: its outputs, or every tensor where `every` is set."""
    kernels = OpResolverType.BUILTIN if xnnpack else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(
        model_content=content,
        num_threads=1,
        experimental_op_resolver_type=kernels,
        experimental_preserve_all_tensors=every,
    )
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], feeds[detail["name"]])
    interpreter.invoke()
    details = interpreter.get_tensor_details() if every else interpreter.get_output_details()
    return {detail["name"]: interpreter.get_tensor(detail["index"]) for detail in details}
