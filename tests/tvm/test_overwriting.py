"""The result of a kernel overwrites an input where that is proven, and has the bits that it has apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import Weights, module_of
from tests.support.overwriting_cases import CASES, aligned, check
from tests.tvm.targets import LEVELS, runs_here
from tests.tvm.test_slice_plan import Kernels
from tvm_pipeline.backends.contract import Array
from tvm_pipeline_tvm import overwriting
from tvm_pipeline_tvm.kernels import Entry, Kernel, Output, Source
from tvm_pipeline_tvm.overwriting import overwritable, overwritten
from tvm_pipeline_tvm.relay.build import compile_module
from tvm_pipeline_tvm.relay.library import Library, load_library
from tvm_pipeline_tvm.relay.overwriting_record import OVERWRITING
from tvm_pipeline_tvm.slice_plan import entry_dtype, entry_shape

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.script import from_source  # isort: skip
from tvm.script import tir as T  # noqa: N812 isort: skip


@pytest.mark.quick_cases(19)
@pytest.mark.parametrize("name", CASES)
def test_a_function_of_tir(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    function = from_source(case.text('"tir.noalias": T.bool(True)'), {"T": T})
    assert overwritable(function) == case.allowed
    monkeypatch.setattr(overwriting, "AT_ONCE", 8)
    assert overwritable(function) == case.allowed, "counted in parts"
    run = tvm.build(tvm.IRModule({"main": function}), target="llvm")
    check(case, lambda arrays: run["main"](*map(tvm.nd.from_dlpack, arrays)))


def test_nothing_is_said_of_the_threads_of_a_gpu() -> None:
    text = CASES["each element for itself"].text('"tir.noalias": T.bool(True)')
    on_device = text.replace("T.parallel(4)", 'T.thread_binding(4, thread="threadIdx.x")')
    assert overwritable(from_source(on_device, {"T": T})) == ()


def residuals(w: Weights) -> relay.Expr:
    """Return a network of kernels that read an input element by element, and of such as do not."""
    x = relay.var("data", shape=(1, 32, 6, 7))
    a = w.conv(x, 32, 1)
    b = relay.nn.relu(relay.add(convolution(w, a, 3), a))
    c = relay.nn.max_pool2d(b, (3, 3), (1, 1), padding=(1, 1))
    d = relay.nn.relu(relay.add(convolution(w, c, 3, groups=32), b))
    e = relay.add(relay.nn.bias_add(convolution(w, d, 1), w(32)), c)
    f = apart(relay.nn.softmax(e, axis=1))
    g = apart(relay.nn.relu(relay.add(relay.multiply(f, w(32, 1, 1)), w(32, 1, 1))))
    h = relay.concatenate([apart(relay.add(g, f)), g], axis=1)
    i = relay.nn.batch_flatten(relay.nn.global_avg_pool2d(h))
    j = relay.nn.relu(w.dense(i, 64))
    return relay.nn.relu(relay.add(w.dense(j, 64), i))


RESIDUALS = [  # the operators of each kernel, and which of the tensors that it reads its result may overwrite
    ("", []),  # to the blocked layout
    ("conv2d add relu", []),
    ("conv2d add relu", []),  # reads for the sum what it has in its windows
    ("max_pool2d", []),
    ("conv2d add relu", [1]),
    ("conv2d add add", [1]),
    ("", []),
    ("softmax", []),
    ("multiply add relu", [0]),
    ("add", [0, 1]),
    ("concatenate", []),
    ("global_avg_pool2d", []),
    ("", []),  # a view
    ("dense relu", []),
    ("dense add relu", [1]),
]


def bytes_chain(w: Weights) -> relay.Expr:
    """Return a quantised network in which a convolution is added to another."""
    a = quantised(w, relay.var("data", shape=(1, 32, 5, 6), dtype="uint8"), 1)
    b = relay.nn.max_pool2d(a, (3, 3), (1, 1), padding=(1, 1))
    scales = [relay.const(value, dtype) for value, dtype in SCALES * 3]
    return relay.qnn.add(quantised(w, b, 3), a, *scales)


def a_residual(w: Weights) -> relay.Expr:
    """Return a network with a residual that its last kernel adds."""
    a = w.conv(relay.var("data", shape=(1, 32, 6, 7)), 32, 1)
    return relay.nn.relu(relay.add(convolution(w, w.conv(a, 32, 1), 3), a))


SCALES = ((0.05, "float32"), (3, "int32"))


def convolution(w: Weights, x: relay.Expr, kernel: int, **options: Any) -> relay.Expr:
    """Return a convolution of 32 channels that keeps the extent."""
    read = 32 // options.get("groups", 1)
    around = {"kernel_size": (kernel, kernel), "padding": (kernel // 2, kernel // 2)}
    return relay.nn.conv2d(x, w(32, read, kernel, kernel), channels=32, **around, **options)


def quantised(w: Weights, x: relay.Expr, kernel: int) -> relay.Expr:
    """Return the same in bytes, between scales."""
    (scale, zero), extents = SCALES, {"kernel_size": (kernel, kernel), "padding": (kernel // 2, kernel // 2)}
    weights = w(32, 32, kernel, kernel, dtype="int8")
    sums = relay.qnn.conv2d(
        *(x, weights, relay.const(zero[0]), relay.const(0), relay.const(scale[0]), relay.const(0.01)),
        channels=32,
        **extents,
    )
    bias = relay.nn.bias_add(sums, w(32, dtype="int32"))
    scales = (relay.const(scale[0] * 0.01), relay.const(0), relay.const(scale[0]), relay.const(zero[0]))
    return relay.qnn.requantize(bias, *scales, out_dtype="uint8")


def apart(x: relay.Expr) -> relay.Expr:
    """Return a value with which nothing is fused that follows."""
    return relay.annotation.stop_fusion(x)


def library_of(body: relay.Expr, weights: Weights, target: str, folder: Path) -> Library:
    module = module_of(body)
    compile_module("network", module, weights.params, target, folder)
    return load_library(folder)


def allowed(library: Library) -> list[tuple[str, list[int]]]:
    """Return the operators of each kernel, and which of its reads its result may overwrite."""
    return [
        (" ".join(name for name, _ in kernel.operators), sorted(map(kernel.reads.index, library.overwrites(index))))
        for index, kernel in enumerate(library.kernels)
    ]


def check_kernels(library: Library) -> None:
    """Run each kernel that may overwrite an input, with its result there and apart; compare bit for bit."""
    draw = np.random.default_rng(0)
    for index, kernel in enumerate(library.kernels):
        given: dict[Entry, Array] = {}
        for entry in kernel.reads:
            shape, dtype = entry_shape(library, entry), entry_dtype(library, entry)
            values = draw.standard_normal(shape) if dtype == "float32" else draw.integers(0, 100, shape)
            given[entry] = values.astype(dtype)
        (made,) = kernel.outputs
        for entry in library.overwrites(index):
            expected, inside = aligned(np.ones(made.shape, made.dtype)), aligned(given[entry])
            run(library, index, given, expected)
            run(library, index, {**given, entry: inside}, inside.view(made.dtype).reshape(made.shape))
            np.testing.assert_array_equal(inside.view(made.dtype).reshape(made.shape), expected)
            assert np.std(expected.astype("float64")) > 0, "results all alike would prove nothing"


def run(library: Library, kernel: int, tensors: Mapping[Entry, Array], result: Array) -> None:
    """Run a kernel, which writes `result`."""
    node = library.graph["nodes"][library.kernels[kernel].node]
    arguments = []
    for producer, field, _ in node["inputs"]:
        entry = library.entry_of_node.get((producer, field))
        name = library.graph["nodes"][producer]["name"]
        arguments.append(library.params[name] if entry is None else array_of(tensors[entry]))
    library.module.get_function(node["attrs"]["func_name"], query_imports=True)(*arguments, array_of(result))


def array_of(array: Array) -> Any:
    """Return an array as TVM takes it: without a copy where it is aligned."""
    return tvm.nd.from_dlpack(array if array.ctypes.data % 64 == 0 else aligned(array))


@pytest.mark.thorough
def test_kernels_of_relay(tmp_path: Path) -> None:
    weights = Weights()
    library = library_of(residuals(weights), weights, here()[-1], tmp_path)
    assert allowed(library) == RESIDUALS
    check_kernels(library)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", list(filter(runs_here, LEVELS)))
def test_a_residual_is_overwritten_whatever_the_vectors(target: str, tmp_path: Path) -> None:
    weights = Weights()
    library = library_of(a_residual(weights), weights, target, tmp_path)
    assert ("conv2d add relu", [1]) in allowed(library)
    check_kernels(library)


@pytest.mark.thorough
def test_kernels_of_bytes(tmp_path: Path) -> None:
    weights = Weights()
    library = library_of(bytes_chain(weights), weights, here()[-1], tmp_path)
    assert [reads for _, reads in allowed(library) if reads] == [[1]]  # the convolution that adds the other
    check_kernels(library)


def test_a_library_of_an_earlier_version_overwrites_nothing(tmp_path: Path) -> None:
    weights = Weights()
    x = relay.var("data", shape=(1, 8))
    library_of(relay.nn.relu(weights.dense(x, 8)), weights, here()[-1], tmp_path)
    described = json.loads((tmp_path / "kernels.json").read_bytes())
    del described[-1][OVERWRITING]
    (tmp_path / "kernels.json").write_text(json.dumps(described))
    (tmp_path / OVERWRITING).unlink()
    assert allowed(load_library(tmp_path)) == [("dense relu", [])]


def test_a_tensor_that_is_given_twice_must_be_allowed_twice() -> None:
    made = Output((4, 16), "float32", "", Source(0, 0))
    first = Kernel((("relu", 64),), ((),), ((-1, 0),), (made,), 0, 0)
    view = Kernel((), (), ((0, 0),), (made,), 0, 0)
    library = Kernels([first, view], [[0], []], [(1, 0)], {1}, {})
    arguments: list[Entry | None] = [(0, 0), None, (1, 0), (-1, 1), (0, 0)]
    assert overwritten(library, arguments, (0, 2, 3, 4)) == ((0, 0), (1, 0), (-1, 1))
    assert overwritten(library, arguments, (0, 3, 4)) == ((-1, 1),)  # the view shows the same bytes
    assert overwritten(library, arguments, (0, 2)) == ()
    assert overwritten(library, arguments, (1,)) == ()


def here() -> list[str]:
    """Return the levels of vectors that this machine has, the widest last."""
    return list(filter(runs_here, LEVELS))
