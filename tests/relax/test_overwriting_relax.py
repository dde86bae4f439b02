"""The result of a kernel of Relax overwrites an input where that is proven, and has the bits that it has apart."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import from_source
from tvm.script import tirx as T  # noqa: N812

from tests.relax.fused import MCPU, target_of
from tests.support.overwriting_cases import CASES, aligned, check
from tvm_pipeline_tvm import overwriting
from tvm_pipeline_tvm.overwriting import overwritable
from tvm_pipeline_tvm.relax.build import Library, compile_module, load_library
from tvm_pipeline_tvm.slice_plan import entry_shape


@pytest.mark.parametrize("name", CASES)
def test_a_function_of_tir(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    function = from_source(case.text('"tirx.noalias": True'), {"T": T})
    assert overwritable(function) == case.allowed
    monkeypatch.setattr(overwriting, "AT_ONCE", 8)
    assert overwritable(function) == case.allowed, "counted in parts"
    run = tvm.compile(tvm.IRModule({"main": function}), target="llvm").jit()["main"]
    check(case, lambda arrays: run(*map(tvm.runtime.from_dlpack, arrays)))


def network() -> tvm.IRModule:
    """Return a network of kernels that read an input element by element, and of such as do not."""
    draw = np.random.default_rng(0)

    def weights(*shape: int) -> relax.Expr:
        return relax.const(draw.standard_normal(shape).astype("float32") / np.sqrt(shape[-1]))

    x = relax.Var("x", relax.TensorType((1, 32, 6, 7), "float32"))
    builder, op = relax.BlockBuilder(), relax.op
    with builder.function("main", [x]):
        with builder.dataflow():
            a = builder.emit(op.nn.relu(op.nn.conv2d(x, weights(32, 32, 1, 1))))
            b = op.add(op.nn.conv2d(a, weights(32, 32, 3, 3), padding=1), weights(1, 32, 1, 1))
            b = builder.emit(op.nn.relu(op.add(b, a)))
            c = builder.emit(op.nn.max_pool2d(b, (3, 3), (1, 1), (1, 1)))
            d = op.nn.conv2d(c, weights(32, 1, 3, 3), padding=1, groups=32)
            d = builder.emit(op.nn.silu(op.add(d, b)))
            e = builder.emit(op.add(op.nn.conv2d(d, weights(32, 32, 1, 1)), c))
            f = builder.emit(op.nn.softmax(e, 1))
            g = builder.emit(op.nn.relu(op.add(f, e)))
            h = builder.emit(op.concat([g, e], 1))
            i = builder.emit(op.mean(h, [2, 3]))
            j = builder.emit(op.exp(op.multiply(i, i)))
            k = builder.emit(op.nn.relu(op.add(op.matmul(j, weights(64, 64)), i)))
            result = builder.emit_output(builder.emit(op.nn.softmax(k)))
        builder.emit_func_output(result)
    return builder.finalize()


KERNELS = [  # the operators of each kernel, and which of the tensors that it reads its result may overwrite
    ("", []),  # to the blocked layout
    ("conv2d relu", []),
    ("conv2d add add relu", []),  # reads for the sum what it has in its windows
    ("max_pool2d", []),
    ("conv2d add silu", [1]),
    ("conv2d add", [1]),
    ("", []),
    ("softmax", []),
    ("add relu", [1]),  # of tensors in two layouts
    ("concatenate", []),  # which a slice writes in place
    ("mean", []),
    ("", []),  # a view
    ("multiply exp", [0]),
    ("matmul", []),
    ("add relu", [0, 1]),
    ("softmax", []),
]


@pytest.fixture(scope="module", params=[16, 8])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    target_of(request.param)
    folder = tmp_path_factory.mktemp("library")
    compile_module("network", network(), f"llvm -mcpu={MCPU[request.param]}", folder)
    return load_library(folder)


@pytest.mark.needs("kernels")
def test_what_kernels_may_overwrite(library: Library) -> None:
    found = [
        (" ".join(name for name, _ in kernel.operators), sorted(map(kernel.reads.index, library.overwrites(index))))
        for index, kernel in enumerate(library.kernels)
    ]
    assert found == KERNELS


def test_kernels_that_overwrite_have_the_same_bits(library: Library) -> None:
    draw = np.random.default_rng(0)
    for index, kernel in enumerate(library.kernels):
        given = {entry: draw.standard_normal(entry_shape(library, entry)).astype("float32") for entry in kernel.reads}
        (made,) = kernel.outputs
        for entry in library.overwrites(index):
            expected, inside = aligned(np.ones(made.shape, made.dtype)), aligned(given[entry])
            for result, tensors in ((expected, given), (inside, {**given, entry: inside})):
                held = {
                    each: tvm.runtime.from_dlpack(aligned(a) if a is not inside else a) for each, a in tensors.items()
                }
                held[index, 0] = tvm.runtime.from_dlpack(result.reshape(made.shape))
                ((function, arguments),) = library.bound([index], held, library.tensors.__getitem__)
                function(*arguments)
            np.testing.assert_array_equal(inside.reshape(made.shape), expected)
            assert np.std(expected) > 0, "results all alike would prove nothing"
