"""Model files: what is read of them, and what is said of those that are damaged, open or strange."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs
from tvm_pipeline import frontends
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.errors import GraphError, ModelError, OptionError
from tvm_pipeline.frontends import TESTING_NETWORKS, interface_of, is_relay, load, parse_shapes

# ---------------------------------------------------------------------------------------------- --input-shapes


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("data:[1,3,224,224]", {"data": (1, 3, 224, 224)}),
        ("a:[1] b:[2,3]", {"a": (1,), "b": (2, 3)}),
        ("a:[1],b:[2,3]", {"a": (1,), "b": (2, 3)}),
        (" a:[ 1 , 2 ] , b:[3] ", {"a": (1, 2), "b": (3,)}),
        ("serving_default_x:0:[1,2]", {"serving_default_x:0": (1, 2)}),
    ],
)
def test_shapes_are_read_as_tvmc_writes_them(text: str, shapes: dict[str, tuple[int, ...]]) -> None:
    assert parse_shapes(text) == shapes


NAME = st.text(st.characters(categories=("L", "N"), include_characters="_:./"), min_size=1, max_size=8)


@given(st.dictionaries(NAME, st.lists(st.integers(1, 999), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4))
def test_shapes_round_trip(shapes: dict[str, tuple[int, ...]]) -> None:
    for separator in (" ", ",", ", "):
        text = separator.join(f"{name}:[{','.join(map(str, shape))}]" for name, shape in shapes.items())
        assert parse_shapes(text) == shapes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "data",
        "data:1,3",
        "data:[]",
        "data:[1,3",
        "data[1,3]",
        ":[1,3]",
        "data:[1,3]]",
        "data:[1,,3]",
        "data:[1,3,]",
        "data:[0,3]",
        "data:[-1,3]",
        "data:[?,3]",
        "data:[1.5]",
        "data:[1,3] rest",
        "data:[1,3] data:[1,4]",
        "data:[1_0]",
    ],
)
def test_shapes_that_are_none_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match=r"`input_shapes` .*give it as \"data:\[1,3,224,224\]\"") as raised:
        parse_shapes(text)
    assert repr(text) in str(raised.value)


# ---------------------------------------------------------------------------------------------- any file


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"net\.onnx: no such file, and no built-in network; built-in are squeezenet, "
    ):
        load(tmp_path / "net.onnx")
    for name in ("empty.onnx", "empty.tflite", "empty.relay", "empty.bin"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ModelError, match=rf"{name}: the file is empty"):
            load(tmp_path / name)
    (tmp_path / "net.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"net\.bin: unknown kind of model; it must be one of \.onnx, \.tflite"):
        load(tmp_path / "net.bin")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ModelError, match=r"cannot read .*folder\.onnx: Is a directory"):
        load(tmp_path / "folder.onnx")


def test_built_in_networks() -> None:
    assert "resnet-50" in TESTING_NETWORKS
    model = load("resnet-50")
    assert (model.name, model.format, model.content, model.inputs) == ("resnet-50", "relay.testing", b"", ())
    sized = load("resnet-50", {"data": (1, 3, 64, 64)})
    assert sized.inputs == (Tensor("data", (1, 3, 64, 64)),)
    assert len({model.digest, sized.digest, load("resnet-18").digest}) == 3
    for shapes in ({"x": (1, 3, 64, 64)}, {"data": (1, 3)}, {"data": (1, 3, 64, 64), "x": (1,)}):
        with pytest.raises(OptionError, match="`input_shapes`: resnet-50 has one input, data, with four dimensions"):
            load("resnet-50", shapes)


def test_relay_files_bring_their_parameters(tmp_path: Path) -> None:
    (tmp_path / "net.relay").write_bytes(b'#[version = "0.0.5"]')
    (tmp_path / "net.json").write_bytes(b'{"root": 1}')
    bare = load(tmp_path / "net.relay")
    assert (bare.name, bare.format, bare.params) == ("net", "relay", b"")
    (tmp_path / "net.params").write_bytes(b"weights")
    full = load(tmp_path / "net.relay")
    assert full.params == b"weights"
    assert full.digest != bare.digest
    assert load(tmp_path / "net.json").format == "relay.json"
    with pytest.raises(OptionError, match=r"`input_shapes`: .*net\.relay fixes its shapes itself"):
        load(tmp_path / "net.relay", {"data": (1,)})


def test_a_relay_module_is_told_from_an_operator_graph(tmp_path: Path) -> None:
    needs("Relay")
    import tvm
    from tvm import relay

    x = relay.var("x", shape=(1, 4))
    module = tmp_path / "module.json"
    module.write_text(tvm.ir.save_json(tvm.IRModule.from_expr(relay.nn.relu(x))))
    assert is_relay(module)
    profiles = Path(__file__).parents[2] / "profiles"
    assert not any(map(is_relay, profiles.glob("keras/*.json")))
    # A graph whose operators happen to be called so, after its name.
    graph = tmp_path / "graph.json"
    graph.write_text('{"name": "' + "n" * 100 + '", "nodes": [{"name": "root"}]}')
    assert not is_relay(graph)
    with pytest.raises(GraphError, match=r"nowhere\.json"):
        is_relay(tmp_path / "nowhere.json")


def test_the_examples_of_the_docstrings_run() -> None:
    found = doctest.testmod(frontends)
    assert found.failed == 0
    assert found.attempted == 4


# ---------------------------------------------------------------------------------------------- ONNX


def onnx_net(shape: Any = (1, 30), kind: str = "FLOAT", change: Callable[[Any], None] = lambda model: None) -> bytes:
    """Return y = x @ w, in which the graph lists the initializer w among its inputs, as old files do."""
    needs("onnx")
    import onnx

    helper, dtype = onnx.helper, getattr(onnx.TensorProto, kind)
    weight = onnx.numpy_helper.from_array(np.ones((30, 30), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [
            helper.make_tensor_value_info("x", dtype, shape),
            helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, (30, 30)),
        ],
        [helper.make_tensor_value_info("y", dtype, ("rows", "columns"))],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    change(model)
    content: bytes = model.SerializeToString()
    return content


def onnx_file(folder: Path, content: bytes) -> Path:
    path = folder / "net.onnx"
    path.write_bytes(content)
    return path


def test_onnx_inputs_are_those_that_are_not_weights(tmp_path: Path) -> None:
    content = onnx_net()
    model = load(onnx_file(tmp_path, content))
    assert (model.name, model.format, model.content) == ("net", "onnx", content)
    assert model.inputs == (Tensor("x", (1, 30), "float32"),)
    assert load(onnx_file(tmp_path, onnx_net(kind="INT64"))).inputs == (Tensor("x", (1, 30), "int64"),)


@pytest.mark.parametrize(
    ("shape", "shown", "advice"),
    [
        (("N", 30), "[N,30]", '"x:[1,30]"'),
        ((-1, 30), "[?,30]", '"x:[1,30]"'),
        ((None, None), "[?,?]", '"x:[1,D1]" and numbers for D1, as the model was made for'),
        (
            ("batch_size", 3, "height", "width"),
            "[batch_size,3,height,width]",
            '"x:[1,3,height,width]" and numbers for height and width, as the model was made for',
        ),
        (
            (1, 3, None, None),
            "[1,3,?,?]",
            '"x:[1,3,H,W]" and numbers for H (height) and W (width), as the model was made for',
        ),
        (
            (None, "?", -1, 3),
            "[?,?,?,3]",
            '"x:[1,H,W,3]" and numbers for H (height) and W (width), as the model was made for',
        ),
        (("samples",), "[samples]", '"x:[samples]" and numbers for samples, as the model was made for'),
        (("N", "T", "T"), "[N,T,T]", '"x:[1,D1,T]" and numbers for D1 and T, as the model was made for'),
    ],
)
def test_onnx_with_open_extents_asks_for_shapes(tmp_path: Path, shape: Any, shown: str, advice: str) -> None:
    path = onnx_file(tmp_path, onnx_net(shape))
    with pytest.raises(ModelError) as raised:
        load(path)
    assert str(raised.value) == f"{path}: input x has the shape {shown}; fix it with `input_shapes` {advice}"
    given = tuple(4 if not isinstance(extent, int) or extent < 1 else extent for extent in shape)
    model = load(path, {"x": given})
    assert (model.inputs, model.shaped) == ((Tensor("x", given, "float32"),), ("x",))


def test_the_open_shapes_of_all_inputs_are_told_at_once(tmp_path: Path) -> None:
    content = onnx_net(("batch", 30), change=lambda model: setattr(second_input(model), "dim_param", "steps"))
    with pytest.raises(
        ModelError, match=r"batch,30\], input h has the shape \[2,steps\]; fix them with `input_shapes` "
    ) as e:
        load(onnx_file(tmp_path, content))
    assert str(e.value).endswith('"x:[1,30] h:[2,steps]" and numbers for steps, as the model was made for')


def second_input(model: Any) -> Any:
    """Add an input h of shape [2, ?]; return its open extent."""
    added = model.graph.input.add(name="h")
    added.type.tensor_type.elem_type = 1
    added.type.tensor_type.shape.dim.add(dim_value=2)
    return added.type.tensor_type.shape.dim.add()


def test_onnx_shapes_of_unknown_inputs_and_other_ranks(tmp_path: Path) -> None:
    path = onnx_file(tmp_path, onnx_net(("N", 30)))
    with pytest.raises(OptionError, match=r"`input_shapes`: .*net\.onnx has no input data; its inputs are x$"):
        load(path, {"data": (1, 30)})
    with pytest.raises(OptionError, match="has no input w"):
        load(path, {"x": (1, 30), "w": (30, 30)})
    with pytest.raises(OptionError, match="input x has 2 dimensions, not 3"):
        load(path, {"x": (1, 1, 30)})
    scalar = onnx_file(tmp_path, onnx_net(()))
    with pytest.raises(OptionError, match="input x has 0 dimensions, not 1"):
        load(scalar, {"x": (1,)})


def clear_nodes(model: Any) -> None:
    del model.graph.node[:]


def sequence_input(model: Any) -> None:
    model.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = 1
    model.graph.input[0].type.sequence_type.elem_type.tensor_type.shape.SetInParent()


def weights_elsewhere(model: Any) -> None:
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = 1
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "weights.bin"


def unknown_operator_input(model: Any) -> None:
    model.graph.node[0].input[0] = "nowhere"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (clear_nodes, "the graph has no inputs or no operators"),
        (sequence_input, "input x is not a tensor of numbers that numpy knows"),
        (lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 0), "input x is not a tensor"),
        (lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 77), "input x is not a tensor"),
        (lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 8), "input x is not a tensor"),
        (lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 14), "input x is not a tensor"),
        (weights_elsewhere, "its weights lie in another file; make it one with onnx.save"),
        (unknown_operator_input, "not a valid ONNX file, perhaps cut short: .*nowhere"),
    ],
)
def test_onnx_that_cannot_be_used_says_why(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    path = onnx_file(tmp_path, onnx_net(change=change))
    with pytest.raises(ModelError, match=message) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_onnx_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    content = onnx_net()
    for end in (*range(1, 60), *range(60, len(content), 97), len(content) - 1):
        with pytest.raises(ModelError, match=r"net\.onnx: "):
            load(onnx_file(tmp_path, content[:end]))


def test_damaged_onnx_is_read_or_refused_and_never_worse(tmp_path: Path) -> None:
    assert_no_surprise(onnx_file(tmp_path, onnx_net()))


def assert_no_surprise(path: Path) -> None:
    rng, content = random.Random(0), path.read_bytes()
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2, 5, 40))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            model = load(path)
        except ModelError:
            continue
        assert all(min(tensor.shape, default=1) > 0 for tensor in model.inputs)


# ---------------------------------------------------------------------------------------------- TFLite


def tflite_net(
    shape: tuple[int, ...] = (1, 4),
    signature: tuple[int, ...] = (),
    *,
    kind: str = "INT8",
    subgraphs: int = 1,
    operators: int = 1,
    variable: bool = False,
    inputs: int = 1,
) -> bytes:
    """Return a TFLite file of the smallest kind: x, weights in a buffer, and operators that read them."""
    needs("tflite")
    import tflite

    needs("flatbuffers")
    import flatbuffers

    builder = flatbuffers.Builder(0)

    def offsets(start: Callable[..., None], items: list[int]) -> int:
        start(builder, len(items))
        for item in reversed(items):
            builder.PrependUOffsetTRelative(item)
        return int(builder.EndVector())

    def ints(values: tuple[int, ...]) -> int:
        return int(builder.CreateNumpyVector(np.array(values, np.int32)))

    data = builder.CreateByteVector(bytes(range(64)) * 4)
    buffers = []
    for content in (None, data):
        tflite.BufferStart(builder)
        if content is not None:
            tflite.BufferAddData(builder, content)
        buffers.append(tflite.BufferEnd(builder))
    tflite.OperatorCodeStart(builder)
    tflite.OperatorCodeAddBuiltinCode(builder, tflite.BuiltinOperator.ADD)
    code = tflite.OperatorCodeEnd(builder)
    graphs = []
    for _ in range(subgraphs):
        tensors = []
        for name, extents, buffer in (("x", shape, 0), ("weights", (64, 4), 1)):
            label, size, open_size = builder.CreateString(name), ints(extents), ints(signature)
            tflite.TensorStart(builder)
            tflite.TensorAddName(builder, label)
            tflite.TensorAddShape(builder, size)
            if signature and name == "x":
                tflite.TensorAddShapeSignature(builder, open_size)
            tflite.TensorAddType(builder, getattr(tflite.TensorType, kind))
            tflite.TensorAddBuffer(builder, buffer)
            tflite.TensorAddIsVariable(builder, variable)
            tensors.append(tflite.TensorEnd(builder))
        nodes = []
        for _ in range(operators):
            reads, writes = ints((0, 1)), ints((0,))
            tflite.OperatorStart(builder)
            tflite.OperatorAddInputs(builder, reads)
            tflite.OperatorAddOutputs(builder, writes)
            nodes.append(tflite.OperatorEnd(builder))
        listed = offsets(tflite.SubGraphStartTensorsVector, tensors)
        ran = offsets(tflite.SubGraphStartOperatorsVector, nodes)
        given_in = ints(tuple(range(inputs)))
        tflite.SubGraphStart(builder)
        tflite.SubGraphAddTensors(builder, listed)
        tflite.SubGraphAddOperators(builder, ran)
        tflite.SubGraphAddInputs(builder, given_in)
        graphs.append(tflite.SubGraphEnd(builder))
    all_graphs = offsets(tflite.ModelStartSubgraphsVector, graphs)
    all_buffers = offsets(tflite.ModelStartBuffersVector, buffers)
    all_codes = offsets(tflite.ModelStartOperatorCodesVector, [code])
    tflite.ModelStart(builder)
    tflite.ModelAddVersion(builder, 3)
    tflite.ModelAddOperatorCodes(builder, all_codes)
    tflite.ModelAddSubgraphs(builder, all_graphs)
    tflite.ModelAddBuffers(builder, all_buffers)
    builder.Finish(tflite.ModelEnd(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def tflite_file(folder: Path, content: bytes) -> Path:
    path = folder / "net.tflite"
    path.write_bytes(content)
    return path


def test_tflite_fixes_its_inputs_itself(tmp_path: Path) -> None:
    path = tflite_file(tmp_path, tflite_net())
    model = load(path)
    assert (model.name, model.format) == ("net", "tflite")
    assert model.inputs == (Tensor("x", (1, 4), "int8"),)
    assert load(path, {"x": (1, 4)}) == model
    for shapes in ({"x": (2, 4)}, {"data": (1, 4)}):
        with pytest.raises(OptionError, match=r"net\.tflite fixes its inputs itself: x:\[1, 4\]"):
            load(path, shapes)
    # An open batch is run as the file's own shape says, unless another one is given: test_tflite_resizing.py.
    batch = tflite_file(tmp_path, tflite_net(signature=(-1, 4)))
    assert load(batch).inputs == (Tensor("x", (1, 4), "int8"),)


def test_a_file_tells_its_outputs_before_it_is_compiled() -> None:
    """TFLite's interpreter has the shapes that it computes."""
    needs("ai_edge_litert")
    from ai_edge_litert.interpreter import Interpreter

    path = Path(__file__).parents[2] / "examples/street/detector.tflite"
    told = interface_of(load(path))
    computed = Interpreter(str(path)).get_output_details()
    assert told
    assert [told.tensors[name] for name in told.outputs] == [
        Tensor(one["name"], tuple(one["shape"].tolist()), np.dtype(one["dtype"]).name) for one in computed
    ]
    assert interface_of(load("mlp")) is None


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"subgraphs": 0}, "it has no graph"),
        ({"shape": (1, 1), "signature": (1, -1)}, r'input x .* \[1, -1\]; fix it with `input_shapes` "x:\[1,\?\]"'),
        ({"shape": (0, 4)}, r"input x has the open shape \(0, 4\)"),
        ({"kind": "STRING"}, "input x is of type STRING, which is not supported"),
        ({"inputs": 0}, "the graph has no inputs or no operators"),
        ({"operators": 0}, "the graph has no inputs or no operators"),
    ],
)
def test_tflite_that_cannot_be_used_says_why(tmp_path: Path, figures: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"net\.tflite: {message}"):
        load(tflite_file(tmp_path, tflite_net(**figures)))


@pytest.mark.parametrize("figures", [{"subgraphs": 2}, {"variable": True}])
def test_tflite_with_control_flow_or_state_is_read(tmp_path: Path, figures: dict[str, Any]) -> None:
    """TFLite's kernels run it; TVM refuses it when it imports."""
    assert load(tflite_file(tmp_path, tflite_net(**figures))).inputs == (Tensor("x", (1, 4), "int8"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00", "the identifier TFL3 is missing"),
        (b"PK\x03\x04 a zip archive", "the identifier TFL3 is missing"),
        (b"\x18\x00\x00\x00TFL", "the identifier TFL3 is missing"),
        (b"\x18\x00\x00\x00TFL3", "a damaged TFLite file, perhaps cut short"),
        (b"\xff\xff\xff\xffTFL3" + bytes(64), "a damaged TFLite file, perhaps cut short"),
        (b"\x08\x00\x00\x00TFL3" + b"\xff" * 64, "a damaged TFLite file, perhaps cut short"),
    ],
)
def test_what_is_no_tflite_file(tmp_path: Path, content: bytes, message: str) -> None:
    needs("tflite")
    with pytest.raises(ModelError, match=rf"net\.tflite: .*{message}"):
        load(tflite_file(tmp_path, content))


def test_tflite_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    content = tflite_net()
    for end in range(1, len(content) - 8):
        with pytest.raises(ModelError, match=r"net\.tflite: "):
            load(tflite_file(tmp_path, content[:end]))


def test_damaged_tflite_is_read_or_refused_and_never_worse(tmp_path: Path) -> None:
    assert_no_surprise(tflite_file(tmp_path, tflite_net()))
