"""Give a TFLite file with open inputs fixed shapes, as LiteRT's interpreter computes them. Next: `tflite.py`.

Converters write an extent that is open as -1, and the file's tensors have the shapes of some example. LiteRT resizes
the inputs, runs one frame of zeros, and then knows the extents of every tensor; these are written into the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvm_pipeline.errors import ModelError

# The schema demands it (`force_align: 16`), but flatbuffers' Python code does not do it.
_ALIGNMENT = 16


def resized(path: Path, content: bytes, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return a .tflite whose inputs have these shapes, and whose other tensors have those that follow.

    Args:
        path: the file, for messages alone.
        shapes: by input name.

    Raises:
        ModelError: LiteRT is not installed, or its kernels refuse the shapes; the message has its reason.
    """
    try:
        from ai_edge_litert import schema_py_generated as schema
        from ai_edge_litert.interpreter import Interpreter, OpResolverType
    except ImportError as error:
        raise ModelError(
            f"{path}: to give it input shapes needs LiteRT, which resizes its tensors: pip install "
            "'tvm-pipeline[edgetpu]'. Or convert the model again with fixed shapes"
        ) from error
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        interpreter = Interpreter(
            model_content=content, experimental_preserve_all_tensors=True, experimental_op_resolver_type=plain
        )
        for detail in interpreter.get_input_details():
            if detail["name"] in shapes:
                interpreter.resize_tensor_input(detail["index"], shapes[detail["name"]])
        interpreter.allocate_tensors()
        interpreter.invoke()
    except (ValueError, RuntimeError) as error:
        given = ", ".join(f"{name}:{list(shape)}" for name, shape in shapes.items())
        raise ModelError(f"{path}: LiteRT cannot run it with the shapes {given}: {error}") from error
    parsed = schema.ModelT.InitFromPackedBuf(content, 0)
    graph = parsed.subgraphs[0]
    found = {
        detail["index"]: [int(extent) for extent in detail["shape"]] for detail in interpreter.get_tensor_details()
    }
    computed = {*map(int, graph.inputs), *(int(index) for operator in graph.operators for index in operator.outputs)}
    for index in computed:
        graph.tensors[index].shape = found[index]
        graph.tensors[index].shapeSignature = None
    return packed(parsed)


def packed(parsed: Any) -> bytes:
    """Return the bytes of a schema's `ModelT`; its buffers are replaced by aligned ones."""
    import flatbuffers

    parsed.buffers = [_AlignedBuffer(buffer.data) for buffer in parsed.buffers]
    builder = flatbuffers.Builder(sum(len(buffer.data) for buffer in parsed.buffers) + 4096)
    builder.Finish(parsed.Pack(builder), b"TFL3")
    return bytes(builder.Output())


class _AlignedBuffer:
    """A stand-in for the schema's BufferT, which packs its data in the same way but aligned."""

    def __init__(self, data: Any) -> None:
        self.data = b"" if data is None else bytes(data)

    def Pack(self, builder: Any) -> int:  # noqa: N802, the schema calls it by this name
        from ai_edge_litert import schema_py_generated as schema

        if self.data:
            builder.StartVector(1, len(self.data), _ALIGNMENT)
            builder.head -= len(self.data)
            builder.Bytes[builder.head : builder.head + len(self.data)] = self.data
            data = builder.EndVector()
        schema.BufferStart(builder)
        if self.data:
            schema.BufferAddData(builder, data)
        return int(schema.BufferEnd(builder))
