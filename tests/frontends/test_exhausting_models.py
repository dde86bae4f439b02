"""Small files that ask for all time and memory: each is read or refused within 20 s and 1 GB, in its own process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnx")
needs("tflite")

import flatbuffers
import tflite
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


def value(name: str, shape: Any = (1, 4), kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


X, Y = value("x"), value("y", ("a", "b"))


def made(
    nodes: Sequence[Any],
    inputs: Sequence[Any] = (X,),
    *,
    functions: Sequence[Any] = (),
    metadata: dict[str, str] | None = None,
    **weights: Any,
) -> bytes:
    """Return an ONNX file whose output is y."""
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("own", 1)]
    graph = helper.make_graph(list(nodes), "net", list(inputs), [Y], constants)
    model = helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=8)
    helper.set_model_props(model, metadata or {})
    return bytes(model.SerializeToString())


def steps(reads: str, writes: str, count: int) -> Iterable[tuple[str, str]]:
    """Return what each node of a chain reads and writes."""
    return pairwise([reads, *(f"h{index}" for index in range(count - 1)), writes])


def subgraph(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], **weights: Any) -> Any:
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    return helper.make_graph(list(nodes), "inner", list(inputs), list(outputs), constants)


# ---- Loops ----


def loop(body: Callable[[str, str], list[Any]], reads: str, writes: str, tag: str = "", trips: str = "n") -> Any:
    """Return a Loop; `body` gives the nodes that compute one name from another."""
    inside, after = f"a{tag}", f"b{tag}"
    inputs = [value(f"i{tag}", (), INT64), value(f"c{tag}", (), BOOL), value(inside)]
    nodes = [node("Identity", [f"c{tag}"], [f"d{tag}"]), *body(inside, after)]
    inner = subgraph(nodes, inputs, [value(f"d{tag}", (), BOOL), value(after, None)])
    return node("Loop", [trips, "go", reads], [writes], body=inner)


def doubled(reads: str, writes: str) -> list[Any]:
    return [node("Add", [reads, reads], [writes])]


def nested(depth: int, trips: int) -> bytes:
    """Return loops inside loops, which together have trips ** depth turns."""

    def body(level: int) -> Callable[[str, str], list[Any]]:
        if level == depth:
            return doubled
        return lambda reads, writes: [loop(body(level + 1), reads, writes, str(level + 1))]

    return made([loop(body(1), "x", "y", "1")], n=np.array(trips), go=np.array(True))


def long_body(nodes: int, trips: int = 256) -> bytes:
    def body(reads: str, writes: str) -> list[Any]:
        return [node("Neg", [one], [other]) for one, other in steps(reads, writes, nodes)]

    return made([loop(body, "x", "y")], n=np.array(trips), go=np.array(True))


def loops_in_a_row(count: int) -> bytes:
    return made(
        [loop(doubled, *ends, str(k)) for k, ends in enumerate(steps("x", "y", count))],
        n=np.array(256),
        go=np.array(True),
    )


def heavy_body(elements: int) -> bytes:
    """Return a loop whose body has a large constant as a node."""
    constant = numpy_helper.from_array(np.zeros((elements // 4, 4), "float32"))

    def body(reads: str, writes: str) -> list[Any]:
        return [node("Constant", [], ["w"], value=constant), node("Add", [reads, "w"], [writes])]

    return made([loop(body, "x", "y")], n=np.array(256), go=np.array(True))


def long_names(length: int) -> bytes:
    def body(reads: str, writes: str) -> list[Any]:
        return [loop(doubled, reads, writes, "2")]

    outer = loop(body, "x", "o" * length, "1")
    return made([outer, node("Relu", ["o" * length], ["y"])], n=np.array(200), go=np.array(True))


def endless() -> bytes:
    return made([loop(doubled, "x", "y", trips="")], go=np.array(True))


def until_a_count(trips: int) -> bytes:
    """Return a loop that its own counter ends, after more turns than are tried."""
    inputs = [value("i", (), INT64), value("c", (), BOOL), value("a")]
    nodes = [node("Less", ["i", "most"], ["d"]), node("Add", ["a", "a"], ["b"])]
    inner = subgraph(nodes, inputs, [value("d", (), BOOL), value("b", None)], most=np.array(trips))
    return made([node("Loop", ["n", "go", "x"], ["y"], body=inner)], n=np.array(2**62), go=np.array(True))


def loop_of_ifs(count: int) -> bytes:
    """Return a loop whose body has so many Ifs that depend on data."""

    def body(reads: str, writes: str) -> list[Any]:
        nodes = [node("ReduceSum", [reads], ["s"], keepdims=0), node("Cast", ["s"], ["t"], to=BOOL)]
        return [*nodes, *(choice("t", *ends) for ends in steps(reads, writes, count))]

    return made([loop(body, "x", "y")], n=np.array(256), go=np.array(True))


def scans(depth: int) -> bytes:
    """Return scans inside scans, of 128 turns each, over an axis that each takes away."""

    def scan(level: int, reads: str, writes: str) -> Any:
        shape = (128,) * (depth - level - 1)
        inner = scan(level + 1, f"p{level}", f"q{level}") if level + 1 < depth else node("Neg", ["p0"], ["q0"])
        if level + 1 == depth:
            inner = node("Neg", [f"p{level}"], [f"q{level}"])
        body = subgraph([inner], [value(f"p{level}", shape)], [value(f"q{level}", None)])
        return node("Scan", [reads], [writes], body=body, num_scan_inputs=1)

    return made([scan(0, "x", "y")], [value("x", (128,) * depth)])


# ---- Ifs ----


def choice(condition: str, reads: str, writes: str, *, differing: bool = False) -> Any:
    """Return an If that negates or subtracts, or whose branches differ in shape."""
    then = node("ReduceMax", [reads], ["then"], axes=[1]) if differing else node("Neg", [reads], ["then"])
    branches = [
        subgraph([then], [], [value("then", None)]),
        subgraph([node("Abs", [reads], ["other"])], [], [value("other", None)]),
    ]
    return node("If", [condition], [writes], then_branch=branches[0], else_branch=branches[1])


def ifs(count: int, *, differing: bool = False) -> bytes:
    """Return Ifs in a row, each with a condition that the one before computes."""
    nodes, last = [], "x"
    for index in range(count):
        name = "y" if index == count - 1 else f"f{index}"
        nodes += [
            node("ReduceSum", [last], [f"s{index}"], keepdims=0),
            node("Cast", [f"s{index}"], [f"c{index}"], to=BOOL),
        ]
        nodes.append(choice(f"c{index}", last, name, differing=differing))
        last = name
    return made(nodes)


def nested_ifs(depth: int, *, both: bool) -> bytes:
    """Return Ifs in one branch, or in both branches, of each other."""

    def branch(level: int, tag: str) -> Any:
        out = [value(f"z{tag}", None)]
        if level == depth:
            return subgraph([node("Add", ["x", "x"], [f"z{tag}"])], [], out)
        other = branch(level + 1, f"{tag}e") if both else branch(depth, f"{tag}e")
        then = branch(level + 1, f"{tag}t")
        return subgraph([node("If", ["c"], [f"z{tag}"], then_branch=then, else_branch=other)], [], out)

    top = node("If", ["c"], ["y"], then_branch=branch(1, "t"), else_branch=branch(1, "e"))
    return made([top], [X, value("c", (), BOOL)])


def settings_of_ifs(count: int) -> bytes:
    """Return a chain of computed settings with an If at each, which all stay."""
    nodes, last = [], "c"
    for index in range(count):
        nodes += [node("Not", [last], [f"c{index}"]), choice(f"c{index}", "x", f"f{index}", differing=True)]
        last = f"c{index}"
    return made([*nodes, node("Relu", [f"f{count - 1}"], ["y"])], [X, value("c", (), BOOL)])


# ---- Shapes and values ----


def with_if(nodes: Sequence[Any], name: str, **weights: Any) -> bytes:
    """Return nodes behind which an If has a condition that hangs on a tensor."""
    ends = [node("Size", [name], ["size"]), node("Equal", ["size", "four"], ["c"]), choice("c", "x", "y")]
    return made([*nodes, *ends], four=np.array(4), **weights)


def reshapes(count: int) -> bytes:
    nodes, last = [], "x"
    for index in range(count):
        nodes += [node("Shape", [last], [f"s{index}"]), node("Reshape", ["x", f"s{index}"], [f"r{index}"])]
        last = f"r{index}"
    return with_if(nodes, last)


def doublings(count: int) -> bytes:
    nodes = [node("Concat", [f"w{k}", f"w{k}"], [f"w{k + 1}"], axis=0) for k in range(count)]
    return with_if(nodes, f"w{count}", w0=np.ones(8, "int64"))


def wide_concat(count: int) -> bytes:
    return with_if([node("Concat", ["w"] * count, ["v"], axis=0)], "v", w=np.ones(1024, "int64"))


def outer_products(count: int) -> bytes:
    """Return sums that grow an axis each: 32 ** count elements."""
    weights = {f"w{k}": np.ones((32,) + (1,) * k, "int64") for k in range(count)}
    nodes = [node("Add", [f"v{k}" if k else "w0", f"w{k + 1}"], [f"v{k + 1}"]) for k in range(count - 1)]
    return with_if(nodes, f"v{count - 1}", **weights)


def huge(kind: str, *arguments: Any) -> bytes:
    weights = {f"w{k}": np.asarray(argument) for k, argument in enumerate(arguments)}
    return with_if([node(kind, list(weights), ["v"])], "v", **weights)


def dropouts(count: int) -> bytes:
    return made([node("Dropout", [one], [other]) for one, other in steps("x", "y", count)])


def plain(count: int) -> bytes:
    return made([node("Relu", [one], [other]) for one, other in steps("x", "y", count)])


# ---- Functions ----


def functions(count: int, calls: int) -> bytes:
    """Return functions that each call the next one so many times."""
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("own", 1)]
    made_ = []
    for index in range(count):
        kind, domain = (f"f{index + 1}", "own") if index < count - 1 else ("Relu", "")
        nodes = [node(kind, [one], [other], domain=domain) for one, other in steps("a", "b", calls)]
        made_.append(helper.make_function("own", f"f{index}", ["a"], ["b"], nodes, opsets))
    return made(
        [node("f0", ["x"], ["h"], domain="own"), choice("c", "h", "y")], [X, value("c", (), BOOL)], functions=made_
    )


def function_of_itself() -> bytes:
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("own", 1)]
    own = helper.make_function("own", "f", ["a"], ["b"], [node("f", ["a"], ["b"], domain="own")], opsets)
    return made(
        [node("f", ["x"], ["h"], domain="own"), choice("c", "h", "y")], [X, value("c", (), BOOL)], functions=[own]
    )


# ---- Texts ----

PICTURE = (value("x", ("n", 3, "h", "w")),)


def stating(**metadata: str) -> bytes:
    return made([node("Relu", ["x"], ["y"])], PICTURE, metadata=metadata)


# ---- TFLite ----


def lite(
    *, operators: int = 1, reads: int = 1, outputs: int = 1, name: str = "x", subgraphs: int = 1, metadata: int = 0
) -> bytes:
    """Return a TFLite file in which all operators, subgraphs or entries of the metadata are the same bytes."""
    builder = flatbuffers.Builder()

    def tables(offset: int, count: int, start: Callable[[Any, int], int]) -> int:
        start(builder, count)
        for _ in range(count):
            builder.PrependUOffsetTRelative(offset)
        return int(builder.EndVector())

    def numbers(index: int, count: int, start: Callable[[Any, int], int]) -> int:
        start(builder, count)
        for _ in range(count):
            builder.PrependInt32(index)
        return int(builder.EndVector())

    label = builder.CreateString(name)
    tflite.TensorStartShapeVector(builder, 1)
    builder.PrependInt32(4)
    shape = builder.EndVector()
    tflite.TensorStart(builder)
    tflite.TensorAddShape(builder, shape)
    tflite.TensorAddName(builder, label)
    tensor = tflite.TensorEnd(builder)
    tensors = tables(tensor, 2, tflite.SubGraphStartTensorsVector)
    read = numbers(0, reads, tflite.OperatorStartInputsVector)
    written = numbers(1, 1, tflite.OperatorStartOutputsVector)
    tflite.OperatorStart(builder)
    tflite.OperatorAddInputs(builder, read)
    tflite.OperatorAddOutputs(builder, written)
    operator = tflite.OperatorEnd(builder)
    listed = tables(operator, operators, tflite.SubGraphStartOperatorsVector)
    into = numbers(0, 1, tflite.SubGraphStartInputsVector)
    out = numbers(1, outputs, tflite.SubGraphStartOutputsVector)
    tflite.SubGraphStart(builder)
    for add, offset in (
        (tflite.SubGraphAddTensors, tensors),
        (tflite.SubGraphAddInputs, into),
        (tflite.SubGraphAddOutputs, out),
        (tflite.SubGraphAddOperators, listed),
    ):
        add(builder, offset)
    graphs = tables(tflite.SubGraphEnd(builder), subgraphs, tflite.ModelStartSubgraphsVector)
    tflite.OperatorCodeStart(builder)
    tflite.OperatorCodeAddDeprecatedBuiltinCode(builder, tflite.BuiltinOperator.RELU)
    tflite.OperatorCodeAddBuiltinCode(builder, tflite.BuiltinOperator.RELU)
    codes = tables(tflite.OperatorCodeEnd(builder), 1, tflite.ModelStartOperatorCodesVector)
    data = builder.CreateByteVector(b"\0" * (metadata * 4))
    tflite.BufferStart(builder)
    buffers = tables(tflite.BufferEnd(builder), 1, tflite.ModelStartBuffersVector)
    tflite.BufferStart(builder)
    tflite.BufferAddData(builder, data)
    described = tflite.BufferEnd(builder)
    buffers = tables(described, 1, tflite.ModelStartBuffersVector) if metadata else buffers
    label = builder.CreateString("TFLITE_METADATA")
    tflite.MetadataStart(builder)
    tflite.MetadataAddName(builder, label)
    entries = tables(tflite.MetadataEnd(builder), metadata, tflite.ModelStartMetadataVector)
    tflite.ModelStart(builder)
    for add, offset in (
        (tflite.ModelAddOperatorCodes, codes),
        (tflite.ModelAddSubgraphs, graphs),
        (tflite.ModelAddBuffers, buffers),
        (tflite.ModelAddMetadata, entries),
    ):
        add(builder, offset)
    builder.Finish(tflite.ModelEnd(builder), b"TFL3")
    return bytes(builder.Output())


def with_texts(texts: dict[str, str]) -> bytes:
    content = io.BytesIO(lite())
    with zipfile.ZipFile(content, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return content.getvalue()


MODELS: dict[str, Callable[[], bytes]] = {
    "loops_3_deep.onnx": lambda: nested(3, 100),
    "function_2_to_30.onnx": lambda: functions(30, 2),
    "operators_on_each_other.tflite": lambda: lite(operators=50_000, reads=50_000),
    "twenty_texts.tflite": lambda: with_texts({f"m{k}.txt": "{" + "1," * 499_000 + "}" for k in range(20)}),
    "imgsz_6_mb.onnx": lambda: stating(imgsz="[" + "1," * 3_000_000 + "]"),
    # Those above are quick tests.
    "loop_100.onnx": lambda: nested(1, 100),
    "loops_8_deep.onnx": lambda: nested(8, 10),
    "loop_of_300_nodes.onnx": lambda: long_body(300),
    "loop_of_18_nodes.onnx": lambda: long_body(18),
    "loops_in_a_row.onnx": lambda: loops_in_a_row(200),
    "loop_with_a_constant.onnx": lambda: heavy_body(1 << 18),
    "loops_with_long_names.onnx": lambda: long_names(100_000),
    "endless_loop.onnx": endless,
    "loop_until_a_count.onnx": lambda: until_a_count(10**15),
    "loop_of_ifs.onnx": lambda: loop_of_ifs(100),
    "scans_3_deep.onnx": lambda: scans(3),
    "ifs_1500_differing.onnx": lambda: ifs(1500, differing=True),
    "ifs_10_deep.onnx": lambda: nested_ifs(10, both=True),
    "ifs_24_deep.onnx": lambda: nested_ifs(24, both=False),
    "settings_of_ifs.onnx": lambda: settings_of_ifs(1500),
    "reshapes_4000.onnx": lambda: reshapes(4000),
    "doublings_40.onnx": lambda: doublings(40),
    "concat_of_300000.onnx": lambda: wide_concat(300_000),
    "outer_products.onnx": lambda: outer_products(7),
    "expand.onnx": lambda: huge("Expand", np.float32(1), np.array([100_000, 100_000])),
    "constant_of_shape.onnx": lambda: huge("ConstantOfShape", np.array([2**20, 2**20])),
    "range.onnx": lambda: huge("Range", np.array(0), np.array(2**40), np.array(1)),
    "dropouts_5000.onnx": lambda: dropouts(5000),
    "nodes_40000.onnx": lambda: plain(40_000),
    "function_of_itself.onnx": function_of_itself,
    "functions_5000_deep.onnx": lambda: functions(5000, 1),
    "imgsz_of_signs.onnx": lambda: stating(imgsz="-" * 100_000 + "1"),
    "imgsz_of_a_huge_picture.onnx": lambda: stating(imgsz="[999999999,999999999]"),
    "names_900_kb.onnx": lambda: stating(names="{" + "".join(f"{k}:'a'," for k in range(90_000)) + "}"),
    "names_on_each_other.tflite": lambda: lite(outputs=50_000, name="x" * 60_000),
    "subgraphs_on_each_other.tflite": lambda: lite(operators=5000, subgraphs=5000),
    "operators_in_one.tflite": lambda: lite(operators=20_000),
    "metadata_on_each_other.tflite": lambda: lite(metadata=100_000),
    "key_superscript.tflite": lambda: with_texts({"metadata.json": json.dumps({"names": {"\u00b2": "x"}})}),
    "key_of_6000_digits.tflite": lambda: with_texts({"metadata.json": json.dumps({"names": {"9" * 6000: "x"}})}),
    "json_500000_deep.tflite": lambda: with_texts({"metadata.json": '{"a":' + "[" * 500_000}),
    "texts_5000.tflite": lambda: with_texts({f"m{k}.txt": "x" for k in range(5000)}),
    "texts_of_zeros.tflite": lambda: with_texts({f"m{k}.txt": "\n" * (1 << 20) for k in range(90)}),
}

# This program imports all readers once. For each path that it is given, a fork of it reads the model and ends.
READER = """
import os, resource, sys, time
import onnx, tflite
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.frontends import load

for path in map(str.strip, sys.stdin):
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    try:
        model = load(path)
        line = f"read, {len(model.content)} bytes; " + "; ".join((*model.notes, *model.obstacles))
    except PipelineError as error:
        line = f"refused: {error}"
    peak = next(row.split()[1] for row in open("/proc/self/status") if row.startswith("VmHWM"))
    print(int(peak) >> 10, line, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def reader() -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, "-c", READER], text=True, **pipes) as process:
        yield process


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_small_file_takes_neither_all_time_nor_all_memory(
    reader: subprocess.Popen[str], tmp_path: Path, name: str
) -> None:
    """The process is killed after 20 seconds of processor time."""
    path = tmp_path / name
    path.write_bytes(MODELS[name]())
    assert reader.stdin
    assert reader.stdout
    print(path, file=reader.stdin, flush=True)
    megabytes, _, line = reader.stdout.readline().partition(" ")
    assert line.startswith(("read, ", "refused: ")), f"ended: {megabytes}"
    assert int(megabytes) < 1000
    assert reader.stdout.readline() == "0\n"  # how the process ended
