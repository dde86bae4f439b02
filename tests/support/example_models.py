"""Tiny models with the inputs and outputs of those that the examples download, whose answers can be told by looking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]


def write(
    path: Path, nodes: Sequence[Any], inputs: Shapes, outputs: Shapes, weights: Mapping[str, Any], **metadata: str
) -> Path:
    from onnx import TensorProto, checker, helper, numpy_helper, save

    def values(shapes: Shapes) -> list[Any]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]

    arrays = [
        numpy_helper.from_array(
            array if isinstance(array, np.ndarray) and array.dtype == np.int64 else np.asarray(array, "float32"), name
        )
        for name, array in weights.items()
    ]
    graph = helper.make_graph(nodes, path.stem, values(inputs), values(outputs), arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, metadata)
    checker.check_model(model)
    save(model, str(path))
    return path


def write_detector(path: Path) -> Path:
    """CenterFace for 64 x 48 pixels: a white cell of 4 x 4 pixels is the centre of a face of 16 x 16."""
    from onnx.helper import make_node

    weights = {"grey": np.full((1, 3, 1, 1), 1 / (3 * 255))}
    nodes = [
        make_node("Conv", ["picture", "grey"], ["light"]),
        make_node("AveragePool", ["light"], ["heat"], kernel_shape=[4, 4], strides=[4, 4]),
    ]
    for name, channels, value in (("size", 2, np.log(4)), ("offset", 2, 0.0), ("marks", 10, 0.5)):
        weights |= {f"{name}.w": np.zeros((channels, 1, 1, 1)), f"{name}.b": np.full(channels, value)}
        nodes.append(make_node("Conv", ["heat", f"{name}.w", f"{name}.b"], [name]))
    outputs = {"heat": 1, "size": 2, "offset": 2, "marks": 10}
    shapes = {name: (1, channels, 12, 16) for name, channels in outputs.items()}
    return write(path, nodes, {"picture": (1, 3, 48, 64)}, shapes, weights)


def write_mesh(path: Path) -> Path:
    """A face mesh whose 468 points lie at the centre of the crop, sure of it where the crop is not black."""
    from onnx.helper import make_node

    weights = {
        "points.w": np.zeros((3, 1404)),
        "points.b": np.tile([96.0, 96.0, 0.0], 468),
        "score.w": np.full((3, 1), 1e5),
        "score.b": [-5.0],
    }
    nodes = [
        make_node("GlobalAveragePool", ["crop"], ["mean"]),
        make_node("Flatten", ["mean"], ["flat"]),
        make_node("Gemm", ["flat", "points.w", "points.b"], ["points"]),
        make_node("Gemm", ["flat", "score.w", "score.b"], ["score"]),
    ]
    return write(path, nodes, {"crop": (1, 3, 192, 192)}, {"points": (1, 1404), "score": (1, 1)}, weights)


def write_line_detector(path: Path) -> Path:
    """DBNet for 96 x 64 pixels: what has a colour, and is neither black, grey nor white, is a line of text."""
    from onnx.helper import make_node

    # Blue less red and its opposite; the input is normalised, so both are about 0 for grey.
    weights = {"apart": np.reshape([1.0, 0, -1, -1, 0, 1, -1, 2, -1], (3, 3, 1, 1)), "ten": 10.0, "five": -5.0}
    nodes = [
        make_node("Conv", ["picture", "apart"], ["differences"]),
        make_node("ReduceMax", ["differences"], ["colour"], axes=[1]),
        make_node("Mul", ["colour", "ten"], ["stretched"]),
        make_node("Add", ["stretched", "five"], ["shifted"]),
        make_node("Sigmoid", ["shifted"], ["map"]),
    ]
    return write(path, nodes, {"picture": (1, 3, 64, 96)}, {"map": (1, 1, 64, 96)}, weights)


def write_line_reader(path: Path) -> Path:
    """A recogniser that reads columns of red as r, of green as g and of blue as b, and all else as nothing."""
    from onnx.helper import make_node

    # The channels are blue, green and red, from -1 to 1; a class wins where its channel stands out.
    weights = {
        "classes.w": np.reshape([[0.0, 0, 0], [-9, -9, 9], [-9, 9, -9], [9, -9, -9]], (4, 3, 1, 1)),
        "classes.b": [3.0, 0.0, 0.0, 0.0],
        "flat": np.array([1, 4, 40]),
    }
    nodes = [
        make_node("AveragePool", ["line"], ["columns"], kernel_shape=[48, 8], strides=[48, 8]),
        make_node("Conv", ["columns", "classes.w", "classes.b"], ["scores"]),
        make_node("Reshape", ["scores", "flat"], ["rows"]),
        make_node("Transpose", ["rows"], ["places"], perm=[0, 2, 1]),
        make_node("Softmax", ["places"], ["probabilities"], axis=2),
    ]
    return write(path, nodes, {"line": (1, 3, 48, 320)}, {"probabilities": (1, 40, 4)}, weights, character="r\ng\nb")


def write_speech_detector(path: Path) -> Path:
    """Silero VAD whose state is a mean of the loudness that fades, and speech what that exceeds."""
    from onnx.helper import make_node

    weights = {"fade": 0.5, "share": 0.5, "slope": 200.0, "shift": -10.0, "axes": np.array([1])}
    nodes = [
        make_node("Abs", ["input"], ["loudness"]),
        make_node("ReduceMean", ["loudness"], ["mean"], axes=[1], keepdims=1),
        make_node("Mul", ["mean", "share"], ["new"]),
        make_node("Mul", ["state", "fade"], ["old"]),
        make_node("Add", ["old", "new"], ["stateN"]),
        make_node("ReduceMean", ["stateN"], ["level"], axes=[0, 2], keepdims=0),
        make_node("Mul", ["level", "slope"], ["stretched"]),
        make_node("Add", ["stretched", "shift"], ["shifted"]),
        make_node("Sigmoid", ["shifted"], ["flat"]),
        make_node("Unsqueeze", ["flat", "axes"], ["output"]),
    ]
    return write(
        path,
        nodes,
        {"input": (1, 576), "state": (2, 1, 128)},
        {"output": (1, 1), "stateN": (2, 1, 128)},
        weights,
    )
