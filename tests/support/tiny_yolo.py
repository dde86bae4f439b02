"""A YOLO file of empty convolutions, with Ultralytics' metadata: it finds the same two things in every picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SIDE = 64
CELLS = 64 + 16 + 4
# Center and size in pixels of the input, class and score.
FOUND = (((20.0, 32.0, 16.0, 8.0), 0, 0.9), ((44.0, 30.0, 12.0, 20.0), 1, 0.6))


def write_tiny_yolo(path: Path, *, open_size: bool = True) -> Path:
    """Write a net with an input [1, 3, height, width] that the file leaves open, and `output0` [1, 6, 84]."""
    from onnx import TensorProto, helper, numpy_helper, save

    table = np.zeros((1, 6, CELLS), np.float32)
    table[0, :2] = np.linspace(3, 60, CELLS)
    for cell, (box, kind, score) in zip((5, 70), FOUND, strict=True):
        table[0, :4, cell], table[0, 4 + kind, cell] = box, score
    weights, nodes = [numpy_helper.from_array(table, "table")], []
    for stride in (8, 16, 32):
        weights += [
            numpy_helper.from_array(np.zeros((6, 3, stride, stride), np.float32), f"w{stride}"),
            numpy_helper.from_array(np.array([1, 6, (SIDE // stride) ** 2]), f"flat{stride}"),
        ]
        nodes += [
            helper.make_node("Conv", ["images", f"w{stride}"], [f"c{stride}"], strides=[stride, stride]),
            helper.make_node("Reshape", [f"c{stride}", f"flat{stride}"], [f"r{stride}"]),
        ]
    nodes += [
        helper.make_node("Concat", ["r8", "r16", "r32"], ["cells"], axis=2),
        helper.make_node("Add", ["cells", "table"], ["output0"]),
    ]
    shape = [1, 3, *(("height", "width") if open_size else (SIDE, SIDE))]
    graph = helper.make_graph(
        nodes,
        "tiny_yolo",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, [1, 6, CELLS])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8, producer_name="pytorch")
    helper.set_model_props(
        model, {"task": "detect", "names": "{0: 'cat', 1: 'dog'}", "imgsz": f"[{SIDE}, {SIDE}]", "stride": "32"}
    )
    save(model, str(path))
    return path
