"""Dense convolutions of Relax, by our schedule, have numpy's values whatever their shape and what follows them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te, tirx, topi
from tvm.s_tir import Schedule
from tvm_ffi import structural_map, structural_walk

from tests.plugins.kernels.relax.layers import EPILOGUES, blocked, convolution, plain, with_epilogue
from tests.relax.fused import target_of
from tests.support.examples import examples
from tvm_pipeline_kernels.relax.schedules import conv2d, lowering
from tvm_pipeline_kernels.relax.schedules.cores import Cores, cores_of
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, blocks_of
from tvm_pipeline_kernels.tiles import register_tile

LANES = (16, 8, 4)


def kernel_in_blocks(kernel: np.ndarray, in_block: int, block: int) -> np.ndarray:
    """Return weights (outputs, channels, rows, columns) as `conv2d.compute` reads them."""
    outputs, channels, *extents = kernel.shape
    parts = kernel.reshape(outputs // block, block, channels // in_block, in_block, *extents)
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 5, 3, 1))


def function_of(shapes: list[tuple[int, ...]], epilogue: str = "bias, relu6", **options: Any) -> tirx.PrimFunc:
    """Return a convolution and an epilogue in one function; shapes of data, kernel, bias and residual, in blocks."""
    options = {"strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), **options}
    data, kernel, bias, residual = (te.placeholder(shape) for shape in shapes)
    output = with_epilogue(epilogue, conv2d.compute(data, kernel, **options), bias, residual)
    return te.create_prim_func([data, kernel, bias, residual, output])


def scheduled(function: tirx.PrimFunc, cores: Cores) -> tirx.PrimFunc:
    s = Schedule(function)
    (anchor,) = (found for found in blocks_of(s) if s.get(found).annotations.get(RULE) == conv2d.NAME)
    conv2d.schedule(s, anchor, cores)
    return s.mod["main"]


def built(function: tirx.PrimFunc, target: Any, pipeline: str = lowering.PIPELINE) -> Any:
    module = tvm.IRModule({"main": scheduled(function, cores_of(target)).with_attr("global_symbol", "main")})
    return tvm.compile(module, target=target, tir_pipeline=pipeline)


def run(library: Any, arrays: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    held = [tvm.runtime.tensor(array) for array in (*arrays, np.full(shape, np.nan, "float32"))]
    library.jit()["main"](*held)
    return held[-1].numpy()


def random_arrays(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype("float32") for shape in shapes]


@st.composite
def layers(draw: Any) -> dict[str, Any]:
    """Return a convolution: extents that no tile divides, blocks that fill no vector, images without blocks."""
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (1, 7), (5, 2)]))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 3)]))
    least = [(extent - 1) * step + 1 for extent, step in zip(kernel, dilation, strict=True)]
    return {
        "n": draw(st.sampled_from([1, 1, 2])),
        "extents": [extent + draw(st.integers(0, 17)) for extent in least],
        "in_block": draw(st.sampled_from([0, 3, 4, 8, 16])),
        "in_blocks": draw(st.integers(1, 3)),
        "block": draw(st.sampled_from([16, 16, 8, 10, 4, 3])),
        "blocks": draw(st.integers(1, 6)),
        "kernel": kernel,
        "epilogue": draw(st.sampled_from(EPILOGUES)),
        "options": {
            "strides": draw(st.sampled_from([(1, 1), (2, 2), (1, 3)])),
            "padding": draw(st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 3)])),
            "dilation": dilation,
        },
    }


@pytest.mark.parametrize("lanes", LANES)
@examples(12)
@given(layer=layers())
def test_convolutions_of_any_shape(lanes: int, layer: dict[str, Any]) -> None:
    target = target_of(lanes)
    block, in_block = layer["block"], layer["in_block"] or 1
    channels, outputs = in_block * layer["in_blocks"], block * layer["blocks"]
    data, kernel = random_arrays([(layer["n"], channels, *layer["extents"]), (outputs, channels, *layer["kernel"])])
    sums = convolution(data, kernel, **layer["options"])
    bias, residual = random_arrays([(1, outputs, 1, 1), sums.shape])
    arrays = [
        blocked(data, in_block) if layer["in_block"] else data,
        kernel_in_blocks(kernel, in_block, block),
        blocked(bias, block),
        blocked(residual, block),
    ]
    function = function_of([array.shape for array in arrays], layer["epilogue"], **layer["options"])
    result = plain(run(built(function, target), arrays, arrays[-1].shape))
    np.testing.assert_allclose(result, with_epilogue(layer["epilogue"], sums, bias, residual), rtol=1e-4, atol=1e-4)


def test_what_follows_may_have_another_shape() -> None:
    target, shapes = target_of(4), [(1, 1, 1, 1, 8), (2, 1, 1, 1, 8, 8), (1, 2, 5, 7, 8)]
    data, kernel, image = map(te.placeholder, shapes)
    gate = topi.sigmoid(conv2d.compute(data, kernel, (1, 1), (0, 0, 0, 0), (1, 1)))
    function = te.create_prim_func([data, kernel, image, topi.multiply(image, gate)])
    arrays = random_arrays(shapes)
    sums = np.einsum("ni,oic->noc", arrays[0][:, 0, 0, 0], arrays[1][:, 0, 0, 0])[:, :, None, None]
    result = run(built(function, target), arrays, arrays[-1].shape)
    np.testing.assert_allclose(result, arrays[-1] / (1 + np.exp(-sums)), rtol=1e-5)


def test_relax_fuses_what_follows_and_keeps_the_mark_of_the_rule() -> None:
    target, shapes = target_of(4), [(1, 8, 5, 9, 8), (16, 8, 3, 3, 8, 8), (1, 16, 1, 1, 8), (1, 16, 5, 9, 8)]
    builder = relax.BlockBuilder()
    variables = [relax.Var(f"x{index}", relax.TensorType(shape, "float32")) for index, shape in enumerate(shapes)]
    data, kernel, bias, residual = variables
    with builder.function("main", variables):
        with builder.dataflow():
            sums = builder.emit_te(conv2d.compute, data, kernel, (1, 1), (1, 1, 1, 1), (1, 1))
            added = builder.emit(relax.op.add(builder.emit(relax.op.add(sums, bias)), residual))
            result = builder.emit_output(builder.emit(relax.op.nn.relu(added)))
        builder.emit_func_output(result)
    transform = relax.transform
    passes = [transform.LegalizeOps(), transform.AnnotateTIROpPattern(), transform.FuseOps(), transform.FuseTIR()]
    with target:
        module = tvm.transform.Sequential([*passes, transform.DeadCodeElimination()])(builder.finalize())
    (fused,) = (function for function in module.functions.values() if isinstance(function, tirx.PrimFunc))
    arrays = random_arrays(shapes)
    expected = run(built(function_of(shapes, "residual", padding=(1, 1, 1, 1)), target), arrays, shapes[-1])
    np.testing.assert_array_equal(run(built(fused, target), arrays, shapes[-1]), expected)


def loops_of(assembly: str) -> list[str]:
    """Return the code of each loop without an inner one, from its label to the jump back."""
    lines = assembly.splitlines()
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.startswith(".LBB") and line.endswith(":")}
    jumps = [(number, re.match(r"\t[jb]\S+\t(\.LBB\w+)", line)) for number, line in enumerate(lines)]
    back = [(labels[found[1]], number) for number, found in jumps if found and labels.get(found[1], number) < number]
    inner = [one for one in back if not any(one[0] <= begin and end < one[1] for begin, end in back)]
    return ["\n".join(lines[begin:end]) for begin, end in inner]


ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a78"}


@pytest.mark.parametrize(
    ("target", "fetch", "multiply", "store"),
    [  # without a multiply-add, as in x86-64-v2, LLVM needs one register more than there are
        ({"kind": "llvm", "mcpu": "x86-64-v4"}, r"prefetcht1", r"vfmadd.*%zmm\d+$", r"vmov\wps\t%zmm\d+, \S*\("),
        ({"kind": "llvm", "mcpu": "x86-64-v3"}, r"prefetcht1", r"vfmadd.*%ymm\d+$", r"vmov\wps\t%ymm\d+, \S*\("),
        (ARM, r"prfu?m\tpldl2keep", r"fmla\tv\d+\.4s", r"st\w+\tq"),
    ],
)
def test_sums_stay_in_registers_while_weights_are_fetched(
    target: dict[str, str], fetch: str, multiply: str, store: str
) -> None:
    """The last tile of this image is partial, and sums are more than TVM puts onto the stack by itself."""
    lanes = cores_of(tvm.target.Target(target)).lanes
    shapes = [(1, 8, 13, 15, lanes), (32, 8, 4, 4, lanes, lanes), (1, 32, 1, 1, lanes), (1, 32, 10, 12, lanes)]
    loops = loops_of(built(function_of(shapes), tvm.target.Target(target)).mod.inspect_source("asm"))
    fetching = [loop for loop in loops if re.search(fetch, loop)]
    assert fetching
    for loop in fetching:
        assert len(re.findall(multiply, loop, re.MULTILINE)) > 8
        assert not re.search(store, loop), f"sums are stored:\n{loop}"


@pytest.mark.parametrize("mcpu", ["cortex-a72", "neoverse-n1"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_arm_has_registers_for_the_largest_tile(kernel: int, mcpu: str) -> None:
    shapes = [(1, 16, 14, 14, 4), (16, 16, kernel, kernel, 4, 4), (1, 16, 1, 1, 4), (1, 16, 14, 14, 4)]
    function = function_of(shapes, padding=(kernel // 2,) * 4)
    loops = loops_of(built(function, tvm.target.Target({**ARM, "mcpu": mcpu})).mod.inspect_source("asm"))
    multiplies, sums = max((len(re.findall(r"fmla\tv\d+\.4s", loop)), loop) for loop in loops)
    assert multiplies > 8
    assert not re.search(r"st\w+\tq", sums), f"sums are stored:\n{sums}"


@pytest.mark.parametrize(("blocks", "height"), [(8, 5), (12, 1), (6, 9)])
def test_each_chunk_fetches_the_weights_of_the_next_once(blocks: int, height: int) -> None:
    images, width, cores = 2, 3, Cores(16, 32)
    rows, columns = 5, 8
    shapes = [(images, 2, height + 4, width + 7, 16), (blocks, 2, rows, columns, 16, 16)]
    shapes += [(1, blocks, 1, 1, 16), (images, blocks, height, width, 16)]
    tile = register_tile(blocks, 1, height, width, cores.registers, 4 * 2 * rows * columns * 16 * 16)
    chunks, row_tiles = blocks // tile.chunks, -(-height // tile.rows)
    assert chunks > 1

    lines: list[tirx.AttrStmt] = []
    loops: list[tirx.For] = []
    function = scheduled(function_of(shapes), cores)
    structural_walk(function.body, [(tirx.AttrStmt, lines.append), (tirx.For, loops.append)])
    (parallel,) = (loop for loop in loops if loop.kind == tirx.ForKind.PARALLEL)
    assert int(parallel.extent) == images * chunks * row_tiles
    for first in range(0, int(parallel.extent), row_tiles):  # the tasks that compute one chunk of one image
        chunk = first // row_tiles % chunks
        fetched = [
            block - chunk * tile.chunks
            for task in range(first, first + row_tiles)
            for line in lines
            if (block := _value(line.value.args[0].indices[0], parallel.loop_var, task))
        ]
        assert sorted(fetched) == list(range(tile.chunks, 2 * tile.chunks))


def _value(expression: Any, variable: tirx.Var, value: int) -> int:
    """Return what an expression of one variable is."""
    known = structural_map(
        expression, (tirx.Var, lambda var: tirx.const(value, "int32") if var.same_as(variable) else var)
    )
    return int(tvm.sym.Analyzer().simplify(known))


def test_no_value_depends_on_the_pipeline() -> None:
    target, shapes = target_of(4), [(1, 8, 9, 7, 8), (16, 8, 3, 3, 8, 8), (1, 16, 1, 1, 8), (1, 16, 7, 5, 8)]
    arrays, libraries = random_arrays(shapes), []
    for pipeline in ("default", lowering.PIPELINE):
        libraries.append(built(function_of(shapes, "residual"), target, pipeline))
    assert ["prefetch" in library.mod.inspect_source("asm") for library in libraries] == [False, True]
    plainly, fetching = (run(library, arrays, shapes[-1]) for library in libraries)
    np.testing.assert_array_equal(plainly, fetching)
