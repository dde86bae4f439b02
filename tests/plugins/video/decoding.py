"""Models that are nothing but an interface, for decoders, and boxes as a model's outputs would have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline_video import Annotation, Interpretation, Request, interpret

# The picture of the tests, of another aspect than most inputs, and things in it: left, top, right, bottom, and class.
PICTURE = (300, 240)
THINGS = [((20.0, 30.0, 110.0, 120.0), 0), ((150.0, 60.0, 290.0, 190.0), 2), ((60.0, 90.0, 140.0, 180.0), 1)]


def interface(
    outputs: Mapping[str, tuple[int, ...]],
    size: tuple[int, int] = (64, 64),
    *,
    nhwc: bool = False,
    gives: str = "float32",
    takes: str = "float32",
) -> OperatorGraph:
    """Return a model of one operator: a picture of this size goes in, and these outputs come out."""
    width, height = size
    picture = Tensor("picture", (1, height, width, 3) if nhwc else (1, 3, height, width), takes)
    tensors = tuple(Tensor(name, shape, gives) for name, shape in outputs.items())
    return OperatorGraph("net", (picture,), (Operator("net", "net", ("picture",), tensors),), tuple(outputs))


def shapes(outputs: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in outputs.items()}


def on_input(found: Interpretation, box: Sequence[float]) -> np.ndarray:
    """Return a box of the picture in pixels of the model's input: left, top, right, bottom."""
    transform = found.preprocessing.transform(*PICTURE)
    scale = np.array([transform.scale_x, transform.scale_y] * 2)
    return np.asarray(box) * scale + np.array([transform.offset_x, transform.offset_y] * 2)


def as_center(box: np.ndarray) -> np.ndarray:
    """Return left, top, right, bottom as center x, center y, width, height."""
    return np.concatenate([(box[:2] + box[2:]) / 2, box[2:] - box[:2]])


def found_in(
    outputs: Mapping[str, np.ndarray],
    request: Request | None = None,
    size: tuple[int, int] = (64, 64),
    metadata: Mapping[str, str] | None = None,
    nhwc: bool = False,
) -> list[Annotation]:
    """Return what the decoder for these outputs finds in them, in pixels of PICTURE."""
    found = interpret(interface(shapes(outputs), size, nhwc=nhwc), metadata, request)
    assert found.decode is not None, found.said
    return list(found.decode(outputs, found.preprocessing.transform(*PICTURE)))


def assert_things(
    found: Sequence[Annotation], wanted: Sequence[tuple[Sequence[float], str]], within: float = 0.05
) -> None:
    """Check that these boxes with these labels were found, and no others, whatever their order."""
    key = lambda pair: (pair[1], tuple(pair[0]))  # noqa: E731
    pairs = sorted(((one.box, one.label) for one in found), key=key)
    assert [label for _, label in pairs] == [label for _, label in sorted(wanted, key=key)]
    for (box, _), (expected, _) in zip(pairs, sorted(wanted, key=key), strict=True):
        np.testing.assert_allclose(box, expected, atol=within)
