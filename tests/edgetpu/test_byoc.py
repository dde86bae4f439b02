"""Regions of a Relay module on Edge TPUs, against TFLite's own kernels on the whole file, bit for bit.

TVM computes exactly what it keeps of these networks, so the two are equal. Against TVM's own build of the
whole the kernels may round otherwise, by 1 an operator.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")
needs("tvm")
needs("tflite")

from tests.edgetpu.networks import (
    MOBILENET,
    Op,
    Options,
    Type,
    Writer,
    changed,
    random_feeds,
    random_network,
    run,
    schema,
)
from tvm_pipeline.errors import ModelError, PlatformError, RunError
from tvm_pipeline_edgetpu.byoc import load_executor, partition_for_edgetpu
from tvm_pipeline_edgetpu.model import TfliteModel, parse_model
from tvm_pipeline_edgetpu.support import unsupported
from tvm_pipeline_tvm.relay.fold import fast_build, fast_context

import tflite  # isort: skip
import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip
from tvm.relay.op.contrib import get_pattern_table  # isort: skip


def read(content: bytes) -> TfliteModel:
    return parse_model(Path("net.tflite"), content)


def imported(content: bytes):
    return relay.frontend.from_tflite(tflite.Model.GetRootAsModel(content, 0))


def partitioned(content: bytes, **options):
    return partition_for_edgetpu(*imported(content), read(content), **options)


def regions(mod) -> list:
    return [function for _, function in mod.functions_items() if function.attrs.get("Compiler") == "edgetpu"]


def operators(mod) -> list[str]:
    return [str(name) for function in regions(mod) for name in function.attrs["edgetpu_operators"]]


def kept(mod) -> list[str]:
    """Return the Relay operators that TVM computes."""
    found = []
    relay.analysis.post_order_visit(mod["main"], lambda e: found.append(e) if isinstance(e, relay.Call) else None)
    return [call.op.name for call in found if isinstance(call.op, tvm.ir.Op)]


def executed(executor, feeds) -> list[np.ndarray]:
    # TVM drops an input that no output needs, and counts its own parameters as inputs.
    for name in feeds.keys() & executor.get_input_info()[0].keys():
        executor.set_input(name, feeds[name])
    executor.run()
    return [executor.get_output(index).numpy() for index in range(executor.get_num_outputs())]


def built(mod, params=None):
    return graph_executor.GraphModule(fast_build(mod, "llvm", params)["default"](tvm.cpu()))


def expected(content: bytes, feeds) -> list[np.ndarray]:
    whole = run(content, feeds, xnnpack=True)
    return [whole[name] for name in read(content).graph.outputs]


def assert_equal(found, correct, tolerance: int = 0) -> None:
    for one, other in zip(found, correct, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(int), other.astype(int), rtol=0, atol=tolerance)


def refuse_pools(model) -> None:
    """Give every second pool a fused activation, which an Edge TPU does not take."""
    pools = [
        o.builtinOptions for o in model.subgraphs[0].operators if isinstance(o.builtinOptions, schema.Pool2DOptionsT)
    ]
    for pool in pools[::2]:
        pool.fusedActivationFunction = schema.ActivationFunctionType.RELU


@pytest.mark.thorough
def test_a_network_with_operators_that_tvm_keeps():
    """It has several regions, which hand several tensors to one another."""
    content = changed(random_network(6, operators=6), refuse_pools)
    model, feeds = read(content), random_feeds(read(content).graph)
    mod = partitioned(content)
    found, taken = regions(mod), operators(mod)
    assert len(found) > 1
    assert any(len(region.attrs["edgetpu_inputs"]) > 1 for region in found)
    assert any(len(region.attrs["edgetpu_outputs"]) > 1 for region in found)
    made = {str(name) for region in found for name in region.attrs["edgetpu_outputs"]}
    assert any(str(name) in made for region in found for name in region.attrs["edgetpu_inputs"])
    assert len(taken) == len(set(taken))
    assert set(taken) == set(model.graph.operator_names) - set(unsupported(model))
    assert_equal(executed(built(mod), feeds), expected(content, feeds))


def test_as_tvm_computes_the_whole():
    content = random_network(1)
    feeds = random_feeds(read(content).graph)
    mod, params = imported(content)
    found = executed(built(partition_for_edgetpu(mod, params, read(content))), feeds)
    assert_equal(found, executed(built(mod, params), feeds), tolerance=1)


def every_kind() -> bytes:
    """Return one operator of each kind in the pattern table, all of them reading the input."""
    writer, draw = Writer(), np.random.default_rng(0)
    image, outputs = (1, 8, 8, 4), []
    data = writer.tensor(image)

    def constant(values, type_=Type.INT32, scale=0.0):
        values = np.asarray(values, np.int8 if type_ == Type.INT8 else np.int32)
        return writer.tensor(values.shape, type_, scale=scale, data=values)

    def weights(*shape):
        return constant(draw.integers(-60, 61, shape), Type.INT8, 0.01)

    def add(code, shape, reads=(), kind="", scale=0.05, zero=0, version=2, parts=1, data=data, before=(), **options):
        made = [writer.tensor(shape, scale=scale) for _ in range(parts)]
        for index in made:
            writer.tensors[index].quantization.zeroPoint = [zero]
        of = (getattr(Options, f"{kind}Options"), getattr(schema, f"{kind}OptionsT")(**options)) if kind else ()
        outputs.extend(writer.operator(code, [*before, data, *reads], made, *of, version=version))
        return made[0]

    window = {"kind": "Pool2D", "strideW": 1, "strideH": 1, "filterWidth": 2, "filterHeight": 2}
    conv = {"strideW": 1, "strideH": 1, "dilationWFactor": 1, "dilationHFactor": 1}
    bias = constant(draw.integers(-999, 999, 4), scale=0.0005)
    relu = schema.ActivationFunctionType.RELU
    add(Op.ADD, image, [data], "Add", scale=0.1)
    add(Op.SUB, image, [weights(*image)], "Sub", fusedActivationFunction=relu)
    add(Op.MUL, image, [data], "Mul", scale=0.2)
    add(Op.MAXIMUM, image, [constant(draw.integers(-60, 61, image), Type.INT8, 0.05)], "MaximumMinimum")
    add(Op.MINIMUM, image, [constant(draw.integers(-60, 61, image), Type.INT8, 0.05)], "MaximumMinimum")
    add(Op.AVERAGE_POOL_2D, image, **window)
    add(Op.MAX_POOL_2D, image, **window)
    add(Op.CONCATENATION, (1, 8, 8, 8), [data], "Concatenation", axis=3)
    add(Op.CONV_2D, image, [weights(4, 3, 3, 4), bias], "Conv2D", version=3, fusedActivationFunction=relu, **conv)
    depth = {"kind": "DepthwiseConv2D", "version": 3, "depthMultiplier": 1}
    add(Op.DEPTHWISE_CONV_2D, image, [weights(1, 3, 3, 4), bias], **depth, **conv)
    flat = add(Op.RESHAPE, (1, 256), [constant([1, 256])], "Reshape", version=1, newShape=[1, 256])
    add(Op.FULLY_CONNECTED, (1, 4), [weights(4, 256), bias], "FullyConnected", data=flat)
    add(Op.SOFTMAX, (1, 256), (), "Softmax", 1 / 256, -128, data=flat, beta=1.0)
    add(Op.SQUEEZE, (8, 8, 4), (), "Squeeze", squeezeDims=[0])
    add(Op.EXPAND_DIMS, (1, 1, 256), [constant(0)], "ExpandDims", version=1, data=flat)
    add(Op.LOGISTIC, image, scale=1 / 256, zero=-128)
    add(Op.TANH, image, scale=1 / 128)
    add(Op.QUANTIZE, image, (), "Quantize", 0.07, 3)
    for code in (Op.RELU, Op.RELU6, Op.RELU_N1_TO_1):
        add(code, image, version=1 if code == Op.RELU_N1_TO_1 else 2)
    for code in (Op.MEAN, Op.SUM, Op.REDUCE_MAX, Op.REDUCE_MIN):
        add(code, (1, 4), [constant([1, 2])], "Reducer")
    edges = constant([[0, 0], [1, 1], [1, 1], [0, 0]])
    add(Op.PAD, (1, 10, 10, 4), [edges], "Pad")
    add(Op.RESIZE_BILINEAR, (1, 16, 16, 4), [constant([16, 16])], "ResizeBilinear")
    add(Op.RESIZE_NEAREST_NEIGHBOR, (1, 16, 16, 4), [constant([16, 16])], "ResizeNearestNeighbor")
    add(Op.SLICE, (1, 4, 4, 4), [constant([0, 1, 2, 0]), constant([1, 4, 4, 4])], "Slice")
    bounds = [constant([0, 1, 2, 0]), constant([1, 5, 6, 4]), constant([1, 1, 1, 1])]
    add(Op.STRIDED_SLICE, (1, 4, 4, 4), bounds, "StridedSlice")
    add(Op.SPACE_TO_DEPTH, (1, 4, 4, 16), (), "SpaceToDepth", blockSize=2)
    add(Op.SPLIT, (1, 8, 8, 2), (), "Split", parts=2, before=[constant(3)], numSplits=2)
    add(Op.TRANSPOSE, (1, 4, 8, 8), [constant([0, 3, 1, 2])], "Transpose")
    shape = [constant([1, 16, 16, 4]), weights(4, 2, 2, 4)]
    add(Op.TRANSPOSE_CONV, (1, 16, 16, 4), (), "TransposeConv", before=shape, strideW=2, strideH=2)
    return writer.content([data], outputs)


@pytest.mark.thorough
def test_every_kind_of_operator_in_the_table():
    content = every_kind()
    model, feeds = read(content), random_feeds(read(content).graph)
    table = {name.removeprefix("edgetpu.") for name, _, _ in get_pattern_table("edgetpu")}
    assert {operator.kind for operator in model.graph.operators} == table
    mod = partitioned(content)
    assert set(operators(mod)) == set(model.graph.operator_names) - set(unsupported(model))
    assert unsupported(model) == {}
    assert kept(mod) == []
    assert_equal(executed(built(mod), feeds), expected(content, feeds))


def test_an_output_that_nobody_reads():
    writer = Writer()
    data, unread = writer.tensor((1, 4)), writer.tensor((1, 2))
    halves = [writer.tensor((1, 2)), writer.tensor((1, 2))]
    axis = writer.tensor((), Type.INT32, scale=0, data=np.int32(1))
    writer.operator(Op.SPLIT, [axis, data], halves, Options.SplitOptions, schema.SplitOptionsT(2))
    writer.operator(Op.LEAKY_RELU, halves[:1], [unread], Options.LeakyReluOptions, schema.LeakyReluOptionsT(alpha=0.5))
    content = writer.content([data], halves[1:])
    feeds = random_feeds(read(content).graph)
    assert_equal(executed(built(partitioned(content)), feeds), expected(content, feeds))


@pytest.mark.thorough
def test_executors_in_two_threads_share_a_region_of_a_module_that_was_saved():
    content = random_network(5, operators=4)
    library = fast_build(tvm.ir.load_json(tvm.ir.save_json(partitioned(content))), "llvm")
    both = [random_feeds(read(content).graph, seed) for seed in range(2)]

    def run_often(feeds):
        executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
        return [executed(executor, feeds) for _ in range(30)]

    with ThreadPoolExecutor(2) as pool:
        for feeds, made in zip(both, pool.map(run_often, both), strict=True):
            correct = expected(content, feeds)
            for found in made:
                assert_equal(found, correct)


def test_a_tensor_that_tvm_adds_to_itself():
    """The module's limit about SimplifyExpr: the region's call is copied, and relay.build then cannot inline it."""
    writer = Writer()
    data, made = writer.tensor((1, 2, 4, 4)), writer.tensor((1, 2, 4, 4))
    turned, doubled = writer.tensor((2, 1, 4, 4)), writer.tensor((2, 1, 4, 4), scale=0.1)
    order = writer.tensor((4,), Type.INT32, scale=0, data=np.array([1, 0, 2, 3], np.int32))
    writer.operator(Op.RELU, [data], [made])
    writer.operator(Op.TRANSPOSE, [made, order], [turned])
    writer.operator(Op.ADD, [turned, turned], [doubled], Options.AddOptions, schema.AddOptionsT())
    content = writer.content([data], [doubled, made])
    feeds, mod = random_feeds(read(content).graph), partitioned(content)
    assert operators(mod) == ["relu_0"]
    with pytest.raises(tvm.TVMError, match="Cannot find global function"):
        fast_build(mod, "llvm")
    with fast_context(disabled_pass=["SimplifyExpr"]):
        library = relay.build(mod, "llvm")
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    assert_equal(executed(executor, feeds), expected(content, feeds), tolerance=1)


OTHER_PROCESS = """
import sys
import tarfile
import numpy as np
import tvm_pipeline_edgetpu.byoc as byoc

library, feeds, outputs = sys.argv[1:]
executor = byoc.load_executor(library)
for name, value in np.load(feeds).items():
    executor.set_input(name, value)
executor.run()
np.save(outputs, executor.get_output(0).numpy())
"""


def wide() -> bytes:
    """Return a layer of two megabytes of weights."""
    writer, draw = Writer(), np.random.default_rng(0)
    data, made = writer.tensor((1, 1024)), writer.tensor((1, 2048), scale=0.5)
    weights, bias = draw.integers(-60, 61, (2048, 1024)).astype(np.int8), draw.integers(-999, 999, 2048)
    reads = [
        writer.tensor(weights.shape, Type.INT8, scale=0.01, data=weights),
        writer.tensor(bias.shape, Type.INT32, scale=0.0005, data=bias.astype(np.int32)),
    ]
    options = Options.FullyConnectedOptions, schema.FullyConnectedOptionsT()
    writer.operator(Op.FULLY_CONNECTED, [data, *reads], [made], *options, version=2)
    return writer.content([data], [made])


@pytest.mark.thorough
def test_an_exported_library_runs_in_another_process(tmp_path):
    content = wide()
    feeds = random_feeds(read(content).graph)
    mod = partitioned(content)
    assert (len(regions(mod)), kept(mod)) == (1, [])
    library = fast_build(mod, "llvm")
    library.export_library(str(tmp_path / "net.so"))
    # The weights are in it once, as the file has them.
    assert (tmp_path / "net.so").stat().st_size < 1.02 * len(content)
    np.savez(tmp_path / "feeds.npz", **feeds)
    command = [sys.executable, "-c", OTHER_PROCESS, "net.so", "feeds.npz", "made.npy"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    assert_equal([np.load(tmp_path / "made.npy")], expected(content, feeds))


@pytest.mark.thorough
def test_the_processor_that_calls_is_the_one_asked_for(tmp_path):
    board = "llvm -mtriple=aarch64-linux-gnu"
    library = fast_build(partitioned(random_network(2, operators=3), target=board), board)
    library.export_library(str(tmp_path / "net.tar"))
    with tarfile.open(tmp_path / "net.tar") as archive:
        heads = [archive.extractfile(member).read(20) for member in archive.getmembers() if member.isfile()]
    assert {int.from_bytes(head[18:20], "little") for head in heads} == {0xB7}  # ELF's EM_AARCH64


@pytest.mark.thorough
def test_an_edge_tpu_goes_through_the_compiler_and_the_delegate(nothing_installed, install_compiler, plug, tmp_path):
    content = random_network(6, operators=6)
    feeds = random_feeds(read(content).graph)
    mod = partitioned(content, device="usb:0")
    assert {str(region.attrs["edgetpu_device"]) for region in regions(mod)} == {"usb:0"}
    with pytest.raises(PlatformError, match="edgetpu_compiler is not on the PATH"):
        fast_build(mod, "llvm")
    calls = install_compiler()
    library = fast_build(mod, "llvm")
    assert calls() == len(regions(mod)) > 1
    library.export_library(str(tmp_path / "net.so"))
    plug("")
    with pytest.raises(RunError, match=r"net\.so: its first run failed: Edge TPU usb:0: .*no such device"):
        load_executor(tmp_path / "net.so")
    plug("usb:0")
    # The fakes change nothing: the file as it was, on TFLite's kernels.
    assert_equal(executed(load_executor(tmp_path / "net.so"), feeds), expected(content, feeds))


@pytest.mark.thorough
def test_a_file_that_is_not_the_modules():
    mod, params = imported(random_network(3))
    with pytest.raises(ModelError, match=r"^net: "):
        partition_for_edgetpu(mod, params, read(random_network(4)))
    with pytest.raises(ModelError, match=r"^mobilenet.*: no call of the Relay module bears the span"):
        partition_for_edgetpu(mod, params, parse_model(MOBILENET, MOBILENET.read_bytes()))

    def other_weights(model):
        for buffer in model.buffers:
            buffer.data = None if buffer.data is None else buffer.data ^ 1

    with pytest.raises(ModelError, match=r"^net: the Relay module has weights of shape \(3, 3, ., 4\) that the file"):
        partition_for_edgetpu(mod, params, read(changed(random_network(3), other_weights)))


def test_other_shapes_than_the_files():
    content = random_network(3)
    larger = {tensor.name: (2, *tensor.shape[1:]) for tensor in read(content).graph.inputs}
    mod, params = relay.frontend.from_tflite(tflite.Model.GetRootAsModel(content, 0), larger)
    with pytest.raises(ModelError, match="reads or writes other tensors"):
        partition_for_edgetpu(mod, params, read(content))


def test_spans_that_were_dropped():
    content = random_network(3)
    with tvm.transform.PassContext(config={"relay.frontend.fill_span": False}):
        mod, params = imported(content)
    with pytest.raises(ModelError, match="no call of the Relay module bears the span"):
        partition_for_edgetpu(mod, params, read(content))


def test_an_operator_that_a_pass_took_out_from_between_others():
    writer = Writer()
    tensors = [writer.tensor((1, 4, 4, 4)) for _ in range(4)]
    writer.operator(Op.RELU, tensors[:1], tensors[1:2])
    same = writer.tensor((4,), Type.INT32, scale=0, data=np.arange(4, dtype=np.int32))
    writer.operator(Op.TRANSPOSE, [tensors[1], same], tensors[2:3])
    writer.operator(Op.RELU, tensors[2:3], tensors[3:])
    content = writer.content(tensors[:1], tensors[3:])
    mod, params = imported(content)
    assert operators(partition_for_edgetpu(mod, params, read(content))) == ["relu_0", "transpose_1", "relu_2"]
    mod = relay.transform.SimplifyExpr()(relay.transform.InferType()(mod))
    with pytest.raises(ModelError, match="operator transpose_1 of the file lies between operators of one region"):
        partition_for_edgetpu(mod, params, read(content))


def test_nothing_for_an_edge_tpu():
    def to_float(model):
        for tensor in model.subgraphs[0].tensors:
            tensor.type, tensor.quantization = (
                (Type.FLOAT32, None) if tensor.type == Type.INT8 else (tensor.type, tensor.quantization)
            )

    mod, params = imported(random_network(3))
    with pytest.raises(ModelError, match="float32, and an Edge TPU only in int8"):
        partition_for_edgetpu(mod, params, read(changed(random_network(3), to_float)))
    writer = Writer()
    data, made = writer.tensor((2, 4, 4, 4)), writer.tensor((2, 4, 4, 4))
    writer.operator(Op.RELU, [data], [made])
    with pytest.raises(ModelError, match=r"TVM keeps all its operators.*\(relu_0: .*three innermost"):
        partitioned(writer.content([data], [made]))


@pytest.mark.thorough
def test_a_region_of_which_no_file_is_known():
    mod, params = imported(random_network(3))
    mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
    steps = [
        relay.transform.MergeComposite(get_pattern_table("edgetpu")),
        relay.transform.AnnotateTarget("edgetpu"),
        relay.transform.MergeCompilerRegions(),
        relay.transform.PartitionGraph(),
    ]
    mod = tvm.transform.Sequential(steps)(relay.transform.InferType()(mod))
    assert kept(mod) == []
    with pytest.raises(ModelError, match=r"no \.tflite is known for this region; partition with partition_for_edgetpu"):
        fast_build(mod, "llvm")
