"""Slices against the whole model on TFLite's own kernels, bit for bit; the same kernels on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from tests.edgetpu.networks import MOBILENET, changed, random_feeds, random_network, random_stages, run
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.errors import PlanError
from tvm_pipeline_edgetpu.model import TfliteModel, read_model
from tvm_pipeline_edgetpu.slicer import Slice, slice_model


def read(tmp_path, content: bytes) -> TfliteModel:
    (tmp_path / "net.tflite").write_bytes(content)
    return read_model(tmp_path / "net.tflite")


def forwarded(slices: list[Slice], feeds: dict[str, np.ndarray], **how: bool) -> dict[str, np.ndarray]:
    """Return all inputs and outputs of the slices; each slice reads by name what the slices before it wrote."""
    known = dict(feeds)
    for part in slices:
        known |= run(part.content, known, **how)
    return known


def assert_equal(found: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> None:
    for name, value in found.items():
        assert value.dtype == whole[name].dtype
        np.testing.assert_array_equal(value, whole[name], err_msg=name)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 8))
def test_random_networks_cut_anywhere_give_every_tensor_of_the_whole(tmp_path_factory, seed, count):
    content = random_network(seed)
    model = read(tmp_path_factory.mktemp("net"), content)
    feeds = random_feeds(model.graph, seed)
    slices = slice_model(model, random_stages(model.graph, count, seed))
    found = forwarded(slices, feeds)
    assert set(model.graph.outputs) <= set(found)
    assert_equal(found, run(content, feeds, every=True))


def test_the_random_cuts_are_the_hard_ones(tmp_path):
    """The networks of the test above are hard: stages out of file order, skipping tensors, several outputs."""
    scattered = skipping = several = 0
    for seed in range(20):
        graph = read(tmp_path, random_network(seed)).graph
        stages = random_stages(graph, 4, seed)
        position = {operator.name: index for index, operator in enumerate(graph.operators)}
        positions = [[position[name] for name in stage.operators] for stage in stages]
        stage_of = {name: index for index, stage in enumerate(stages) for name in stage.operators}
        writer = {tensor.name: stage_of[o.name] for o in graph.operators for tensor in o.outputs}
        scattered += any(max(p) - min(p) >= len(p) for p in positions)
        skipping += any(stage_of[o.name] - writer.get(r, 9) > 1 for o in graph.operators for r in o.inputs)
        several += len(graph.outputs) > 1
    assert min(scattered, skipping, several) >= 10


@pytest.fixture(scope="module")
def mobilenet() -> tuple[TfliteModel, dict[str, np.ndarray], dict[str, np.ndarray]]:
    model = read_model(MOBILENET)
    feeds = random_feeds(model.graph)
    return model, feeds, run(MOBILENET.read_bytes(), feeds, every=True)


@pytest.mark.parametrize("count", range(2, 9))
def test_mobilenet_is_cut_bit_exact_and_grows_by_less_than_half_a_percent(mobilenet, count):
    model, feeds, whole = mobilenet
    slices = slice_model(model, random_stages(model.graph, count, count))
    assert_equal(forwarded(slices, feeds), whole)
    assert sum(len(part.content) for part in slices) < MOBILENET.stat().st_size * 1.005


def test_mobilenet_is_cut_bit_exact_on_xnnpack_too(mobilenet):
    model, feeds, _ = mobilenet
    found = forwarded(slice_model(model, random_stages(model.graph, 3, 0)), feeds, xnnpack=True)
    assert_equal({name: found[name] for name in model.graph.outputs}, run(MOBILENET.read_bytes(), feeds, xnnpack=True))


def test_the_ends_of_a_slice_are_those_of_its_file_in_its_order(tmp_path):
    model = read(tmp_path, random_network(3))
    for part in slice_model(model, random_stages(model.graph, 4, 3)):
        interpreter = Interpreter(model_content=part.content)
        for tensors, details in (
            (part.inputs, interpreter.get_input_details()),
            (part.outputs, interpreter.get_output_details()),
        ):
            assert [(t.name, t.shape, t.dtype) for t in tensors] == [
                (d["name"], tuple(d["shape"]), np.dtype(d["dtype"]).name) for d in details
            ]


def test_one_stage_gives_the_models_outputs_in_its_order(tmp_path):
    model = read(tmp_path, random_network(3))
    assert len(model.graph.outputs) > 1
    (part,) = slice_model(model, random_stages(model.graph, 1, 0))
    assert tuple(tensor.name for tensor in part.outputs) == model.graph.outputs


def test_an_open_batch_is_closed(tmp_path):
    def open_batch(model):
        for tensor in model.subgraphs[0].tensors:
            if len(tensor.shape) == 4:
                tensor.shapeSignature = [-1, *tensor.shape[1:]]

    model = read(tmp_path, changed(random_network(5), open_batch))
    for part in slice_model(model, random_stages(model.graph, 3, 5)):
        for detail in Interpreter(model_content=part.content).get_tensor_details():
            assert list(detail["shape_signature"]) == list(detail["shape"])


def test_constants_are_aligned_as_the_schema_asks(mobilenet):
    model, _, _ = mobilenet
    for part in slice_model(model, random_stages(model.graph, 3, 1)):
        start = np.frombuffer(part.content, np.uint8).ctypes.data
        buffers = schema.ModelT.InitFromPackedBuf(part.content, 0).buffers
        assert {(b.data.ctypes.data - start) % 16 for b in buffers if b.data is not None} == {0}


def test_illegal_stages_are_refused_by_name(tmp_path):
    model = read(tmp_path, random_network(1))
    stages = random_stages(model.graph, 3, 1)
    with pytest.raises(PlanError, match="wrong order"):
        slice_model(model, stages[::-1])
    with pytest.raises(PlanError, match=f"{stages[2].operators[0]}|missing in all"):
        slice_model(model, stages[:2])
    with pytest.raises(PlanError, match="conv_2d_99"):
        slice_model(model, [*stages, Stage(("tpu",), ("conv_2d_99",))])
    with pytest.raises(PlanError, match="no stages"):
        slice_model(model, [])
