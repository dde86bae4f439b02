"""TFLite operators that TVM's importer lacks, against TFLite's own kernels, and files that it cannot take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")
needs("ai_edge_litert")

import tvm
from tvm import relay

from tests.edgetpu.networks import Op, Writer, run
from tests.support.tflite_files import (
    alone,
    broadcast_choice,
    custom,
    frame_of,
    model_of,
    of_one_operator,
    sparse_weights,
    stateful,
    transposed,
)
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.relay.importer import import_model


def computed(content: bytes, frame: np.ndarray) -> np.ndarray:
    """Return what the imported module computes of a frame."""
    mod, params = import_model(model_of(content))
    with tvm.transform.PassContext(opt_level=1):
        return relay.create_executor("graph", mod, tvm.cpu(), "llvm", params).evaluate()(frame).numpy()


@pytest.mark.parametrize("build", [sparse_weights, broadcast_choice])
def test_it_computes_what_tflite_computes(build: Callable[[], bytes]) -> None:
    content, frame = build(), frame_of()
    [expected] = run(content, {"tensor/0:0": frame}).values()
    np.testing.assert_allclose(computed(content, frame), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kernel", "stride", "same"), [(2, 2, True), (3, 2, True), (4, 2, True), (3, 2, False)])
def test_mediapipes_transposed_convolution_is_tflites_with_a_bias(kernel: int, stride: int, same: bool) -> None:
    """MediaPipe pads as TFLite does where the kernel is as wide as the stride or wider, which its networks keep to."""
    frame = frame_of()
    [expected] = run(transposed(False, kernel, stride, same), {"tensor/0:0": frame}).values()
    found = computed(transposed(True, kernel, stride, same), frame)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def refused(change: Callable[[Writer, int], int], subgraphs: int = 1) -> str:
    """Return the importer's message for a file of one operator that `change` writes."""
    with pytest.raises(ModelError) as raised:
        import_model(model_of(of_one_operator(change, subgraphs)))
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "subgraphs", "message"),
    [
        (alone(Op.RFFT2D), 1, "operator rfft2d_0 is RFFT2D, which TVM 0.19 does not import; convert"),
        (alone(Op.IF), 3, "operator if_0 runs other subgraphs of the file, by what was computed (IF); export"),
        (alone(Op.READ_VARIABLE), 1, "operator read_variable_0 keeps a state between frames (READ_VARIABLE); export"),
        (stateful, 1, "operator add_0 keeps a state between frames in the tensor tensor/1:0; export the model with"),
        (custom, 1, "operator custom_0 (TransformLandmarks) is a custom operator, which only the program"),
        (alone(Op.ABS), 2, "it has 2 subgraphs, and TVM imports one; export the one that is to run alone"),
    ],
)
def test_a_file_that_tvm_cannot_take_names_the_operator(
    change: Callable[[Writer, int], int], subgraphs: int, message: str
) -> None:
    assert refused(change, subgraphs).startswith(f"net: TVM cannot import it: {message}")


def test_many_operators_of_a_kind_are_counted() -> None:
    def chain(writer: Writer, x: int) -> int:
        for _ in range(5):
            x = alone(Op.RFFT2D)(writer, x)
        return x

    assert "each of the operators rfft2d_0, rfft2d_1, rfft2d_2 and 2 more is RFFT2D" in refused(chain)
