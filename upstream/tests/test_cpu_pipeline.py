"""Tests of cpu_pipeline and its passes, against the default pipeline, numpy and written modules."""

import logging
import math
import re

import numpy as np
import pytest
import tvm
import tvm.testing
from tvm import relax, te, tirx, topi
from tvm.relax.backend.cpu import TIR_PIPELINE, cpu_pipeline
from tvm.relax.backend.cpu.blocked import BlockedLayout
from tvm.relax.backend.cpu.cpu_pipeline import FastKernels
from tvm.relax.backend.cpu.dataflow import constant_of
from tvm.relax.backend.cpu.kernel_passes import IS_SCHEDULED, FuseKernels
from tvm.relax.backend.cpu.pad_channels import pad_channels
from tvm.relax.backend.cpu.simplify import simplified
from tvm.relax.frontend import nn
from tvm.s_tir.dlight.cpu.fused import RULE, scheduled
from tvm.s_tir.dlight.cpu.fused.cores import Cores, cores_of
from tvm.s_tir.dlight.cpu.fused.tiles import Tile, channel_block, register_tile
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm.testing import env

pytestmark = pytest.mark.skipif(not env.has_llvm(), reason="need llvm")
HOST = tvm.target.codegen.llvm_get_system_cpu() if env.has_llvm() else "generic"
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": HOST})


def _random(*shape):
    draw = np.random.default_rng(sum(shape))
    return draw.standard_normal(shape).astype("float32")


def _module(build, *shapes):
    """Return a module whose `main` is what `build` makes of a builder and tensors of float32."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            output = builder.emit_output(build(builder, *inputs))
        builder.emit_func_output(output)
    return builder.finalize()


def _arrays(value):
    if isinstance(value, tvm.runtime.Tensor):
        return [value.numpy()]
    return [array for field in value for array in _arrays(field)]


def _outputs(mod, inputs, **options):
    vm = relax.VirtualMachine(tvm.compile(mod, TARGET, **options), tvm.cpu())
    return _arrays(vm["main"](*map(tvm.runtime.tensor, inputs)))


def _bindings(mod):
    """Return what `main` binds, without second names of tensors."""
    return relax.transform.CanonicalizeBindings()(mod)["main"].body.blocks[0].bindings


def _shapes(mod):
    return [tuple(map(int, binding.var.ty.shape)) for binding in _bindings(mod)]


def _kernels(mod):
    """Return the names of the TIR functions of a module, each with the mark that it is scheduled."""
    return {
        symbol.name_hint: bool(function.attrs and function.attrs.get(IS_SCHEDULED))
        for symbol, function in mod.functions.items()
        if isinstance(function, tirx.PrimFunc)
    }


def _check(build, *shapes, rules=()):
    """Compare with the default pipeline; all kernels are scheduled, and some by the rules of these names."""
    mod, inputs = _module(build, *shapes), [_random(*shape) for shape in shapes]
    made = FastKernels(TARGET)(mod)
    assert all(_kernels(made).values())
    fused = relax.transform.FuseTIR()(FuseKernels(TARGET)(mod))
    found = {
        scheduled(function, cores_of(TARGET))[1]
        for function in fused.functions.values()
        if isinstance(function, tirx.PrimFunc)
    }
    assert set(rules) <= found
    expected = _outputs(mod, inputs)
    for options in ({}, {"tir_pipeline": TIR_PIPELINE}):
        outputs = _outputs(mod, inputs, relax_pipeline=cpu_pipeline(TARGET), **options)
        for output, wanted in zip(outputs, expected):
            tvm.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


# ------------------------------------------------------------------ whole pipeline


def test_small_network():
    def network(builder, x):
        def conv(data, *shape, **attrs):
            weights = relax.const(_random(*shape) / np.sqrt(np.prod(shape[1:])).astype("float32"))
            out = builder.emit(relax.op.nn.conv2d(data, weights, **attrs))
            statistics = [relax.const(np.abs(_random(shape[0])) + np.float32(0.5)) for _ in range(4)]
            out = builder.emit(relax.op.nn.batch_norm(out, *statistics, axis=1, training=False))
            return builder.emit(relax.op.nn.relu(relax.TupleGetItem(out, 0)))

        first = conv(x, 16, 3, 3, 3, strides=2, padding=1)
        wide = conv(first, 32, 16, 1, 1)
        deep = conv(wide, 32, 1, 3, 3, padding=1, groups=32)
        added = builder.emit(relax.op.add(conv(deep, 16, 32, 1, 1), first))
        joined = builder.emit(relax.op.concat([added, first], axis=1))
        pooled = builder.emit(relax.op.nn.max_pool2d(joined, (2, 2), strides=(2, 2)))
        mean = builder.emit(relax.op.nn.adaptive_avg_pool2d(pooled, (1, 1)))
        flat = builder.emit(relax.op.reshape(mean, (1, 32)))
        return relax.op.nn.softmax(relax.op.matmul(flat, relax.const(_random(32, 10))))

    _check(network, (1, 3, 20, 20), rules=("conv2d", "depthwise", "concatenate", "pooling", "dense", "softmax"))


@pytest.mark.parametrize(
    "channels,outputs,groups,window,attrs,rule",
    [
        (3, 16, 1, 3, {"padding": 1}, "conv2d"),
        (24, 40, 1, 1, {"strides": 2}, "conv2d"),
        (16, 32, 1, 5, {"padding": [0, 1, 2, 3], "dilation": 2}, "conv2d"),
        (24, 24, 24, 3, {"padding": 1, "strides": 2}, "depthwise"),
        (64, 64, 2, 3, {"padding": 1}, "group_conv2d"),
        (32, 32, 8, 3, {"padding": 1}, "group_conv2d"),
        (20, 10, 5, 1, {}, "group_conv2d"),
    ],
)
def test_conv2d(channels, outputs, groups, window, attrs, rule):
    weights = relax.const(_random(outputs, channels // groups, window, window))
    bias = relax.const(_random(1, outputs, 1, 1))

    def conv(builder, x):
        out = builder.emit(relax.op.nn.conv2d(x, weights, groups=groups, **attrs))
        return relax.op.nn.relu(relax.op.add(out, bias))

    _check(conv, (2, channels, 13, 15), rules=[rule])


@pytest.mark.parametrize("strides,padding,output_padding", [(2, 1, 1), (3, 0, 0), (1, 1, 0)])
def test_conv2d_transpose(strides, padding, output_padding):
    weights = relax.const(_random(16, 24, 3, 3))

    def conv(builder, x):
        attrs = {"strides": strides, "padding": padding, "output_padding": output_padding}
        return relax.op.nn.conv2d_transpose(x, weights, **attrs)

    _check(conv, (1, 16, 7, 9), rules=["conv2d_transpose"])


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("pool", ["max_pool2d", "avg_pool2d"])
def test_pool2d(pool, ceil_mode):
    weights = relax.const(_random(32, 16, 1, 1))

    def pooled(builder, x):
        image = builder.emit(relax.op.nn.conv2d(x, weights))
        attrs = {"strides": 2, "padding": 1, "ceil_mode": ceil_mode}
        return getattr(relax.op.nn, pool)(image, (3, 3), **attrs)

    _check(pooled, (1, 16, 12, 15), rules=["pooling"])


@pytest.mark.parametrize("left,right", [((1, 48), (48, 30)), ((5, 7, 48), (48, 33)), ((2, 3, 9, 20), (2, 3, 20, 21))])
def test_matmul(left, right):
    if len(right) == 2:  # weights
        weights = relax.const(_random(*right))
        _check(lambda _, x: relax.op.nn.relu(relax.op.matmul(x, weights)), left, rules=["dense"])
    else:
        _check(lambda _, x, y: relax.op.nn.relu(relax.op.matmul(x, y)), left, right, rules=["dense"])


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name, axis):
    _check(lambda _, x: getattr(relax.op.nn, name)(x, axis), (2, 37, 19), rules=["softmax"])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concat(axis):
    shapes = [[3, 4, 5], [3, 4, 5]]
    shapes[1][axis] = 7
    _check(lambda _, x, y: relax.op.tanh(relax.op.concat([x, y], axis)), *shapes, rules=["concatenate"])


@pytest.mark.parametrize("name", ["max", "min"])
def test_reduction_of_infinite_numbers(name):
    mod = _module(lambda _, x: getattr(relax.op, name)(x, [1]), (3, 40))
    infinite = np.full((3, 40), -np.inf if name == "max" else np.inf, "float32")
    (output,) = _outputs(mod, [infinite], relax_pipeline=cpu_pipeline(TARGET))
    np.testing.assert_array_equal(output, infinite[:, 0])


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "erf"])
def test_elementary_functions(name):
    mod = _module(lambda _, x: getattr(relax.op, name)(x), (1 << 16,))
    values = np.linspace(-20, 20, 1 << 16, dtype="float32")
    options = {"relax_pipeline": cpu_pipeline(TARGET), "tir_pipeline": TIR_PIPELINE}
    (output,) = _outputs(mod, [values], **options)
    functions = {"exp": np.exp, "tanh": np.tanh, "erf": np.vectorize(math.erf)}
    functions["sigmoid"] = lambda x: 1 / (1 + np.exp(-x))
    exact = functions[name](values.astype("float64"))
    assert np.all(np.abs(output - exact) <= 3 * np.spacing(np.abs(exact).astype("float32")))

    x = te.placeholder((64, 16), "float32")
    y = te.compute(x.shape, lambda *at: getattr(tirx, name)(x(*at)), name="y")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    schedule.vectorize(schedule.get_loops("y")[1])
    built = tvm.compile(schedule.mod, TARGET, tir_pipeline=TIR_PIPELINE)
    assert not re.search(r"\b(exp|tanh|erf)f?\b", built.mod.inspect_source("asm")), "a call for each number"


# ------------------------------------------------------------------ what is left to the default


def test_other_functions_stay(caplog):
    @I.ir_module
    class Module:
        @R.function
        def dynamic(x: R.Tensor(("n", 16), "float32")) -> R.Tensor(("n", 16), "float32"):
            return R.nn.softmax(R.exp(x))

        @R.function
        def branch(x: R.Tensor((4, 16), "float32"), c: R.Tensor((), "bool")):
            if c:
                y = R.exp(x)
            else:
                y = R.tanh(x)
            return y

        @R.function
        def fast(x: R.Tensor((4, 16), "float32")):
            return R.exp(R.add(x, x))

    with caplog.at_level(logging.WARNING):
        made = FastKernels(TARGET)(Module)
    tvm.ir.assert_structural_equal(made["dynamic"], Module["dynamic"])
    tvm.ir.assert_structural_equal(made["branch"], Module["branch"])
    assert _kernels(made) == {"fused_add_tir_exp": True}
    assert [message.split()[0] for message in caplog.messages] == ["dynamic", "branch"]
    vm = relax.VirtualMachine(tvm.compile(Module, TARGET, relax_pipeline=cpu_pipeline(TARGET)), tvm.cpu())
    x = _random(4, 16)
    (output,) = _arrays(vm["dynamic"](tvm.runtime.tensor(x)))
    powers = np.exp(np.exp(x) - np.exp(x).max(-1, keepdims=True))
    tvm.testing.assert_allclose(output, powers / powers.sum(-1, keepdims=True), rtol=1e-5)


def test_weights_that_are_parameters(caplog):
    class Head(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(16, 10)

        def forward(self, x):
            return self.linear(x)

    mod, params = Head().export_tvm(spec={"forward": {"x": nn.spec.Tensor((1, 16), "float32")}})
    with caplog.at_level(logging.WARNING):
        FastKernels(TARGET)(mod)
    assert "relax.transform.BindParams('forward', params)" in caplog.text
    caplog.clear()
    weights = {name: _random(*map(int, parameter.shape)) for name, parameter in params}
    made = FastKernels(TARGET)(relax.transform.BindParams("forward", weights)(mod))
    assert caplog.messages == []
    assert all(_kernels(made).values())


def test_scheduled_functions_stay():
    mod = _module(lambda _, x: relax.op.tanh(relax.op.add(x, x)), (4, 16))
    once = FastKernels(TARGET)(mod)
    tvm.ir.assert_structural_equal(FastKernels(TARGET)(once), once)


def test_other_targets():
    with pytest.raises(ValueError, match="not for cuda"):
        cpu_pipeline({"kind": "cuda", "arch": "sm_80"})


# ------------------------------------------------------------------ passes


def test_simplified():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((3, 2), "float32"):
            with R.dataflow():
                a = R.subtract(x, R.const(0.5))
                b = R.add(a, R.multiply(R.const(2.0), R.const(4.0)))
                c = R.power(R.reshape(b, (3, 2)), R.const(2.0))
                gv = R.reshape(R.permute_dims(c, [0, 1]), (3, 2))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((3, 2), "float32"):
            with R.dataflow():
                a = R.add(x, R.const(7.5))
                b = R.reshape(a, (3, 2))
                gv = R.multiply(b, b)
                R.output(gv)
            return gv

    before = relax.transform.Normalize()(Before)
    made = relax.transform.CanonicalizeBindings()(simplified(before))
    tvm.ir.assert_structural_equal(made, Expected, map_free_vars=True)


def test_batch_norm_becomes_part_of_conv2d():
    weights, gamma, beta, mean = _random(8, 4, 3, 3), _random(8), _random(8) + 1, _random(8) - 1
    variance = np.abs(gamma) + np.float32(0.5)
    statistics = [relax.const(array) for array in (gamma, beta, mean, variance)]

    def before(builder, x):
        y = builder.emit(relax.op.nn.conv2d(x, relax.const(weights)))
        y = builder.emit(relax.op.nn.batch_norm(y, *statistics, axis=1, epsilon=1e-5, training=False))
        return relax.op.nn.relu(relax.TupleGetItem(y, 0))

    scale = gamma.astype("float64") / np.sqrt(variance.astype("float64") + 1e-5)
    shift = (beta - mean * scale).astype("float32").reshape(1, 8, 1, 1)
    scaled = weights * scale.astype("float32").reshape(8, 1, 1, 1)

    bindings = _bindings(simplified(_module(before, (1, 4, 6, 6))))
    operators = [binding.value.op.name for binding in bindings]
    assert operators == ["relax.nn.conv2d", "relax.add", "relax.nn.relu"]
    for binding, wanted in zip(bindings, (scaled, shift)):
        tvm.testing.assert_allclose(constant_of(binding.value.args[1]), wanted, rtol=1e-6)


def test_pad_channels():
    weights = relax.const(_random(1000, 16, 1, 1))

    def classifier(builder, x):
        y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.nn.conv2d(x, weights))))
        return relax.op.mean(y, [2, 3], keepdims=True)

    assert _shapes(pad_channels(_module(classifier, (1, 16, 4, 4)))) == [
        (1, 1008, 4, 4),
        (1, 1008, 4, 4),
        (1, 1008, 1, 1),
        (1, 1000, 1, 1),
    ]


def test_blocked_layout():
    weights = relax.const(_random(32, 16, 3, 3))

    def network(builder, x):
        y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.nn.conv2d(x, weights, padding=1))))
        return relax.op.nn.max_pool2d(y, (2, 2), strides=(2, 2))

    made = BlockedLayout(Cores(lanes=8, registers=16))(_module(network, (1, 16, 8, 8)))
    layouts = [
        (symbol.name_hint, str(function.attrs["cpu_pipeline.layout"]))
        for symbol, function in made.functions.items()
        if isinstance(function, tirx.PrimFunc)
    ]
    assert sorted(layouts) == [
        ("conv2d", "NCHW8c"),
        ("layout_transform", "NCHW8c"),
        ("layout_transform1", ""),
        ("max_pool2d", "NCHW8c"),
    ]
    assert _shapes(made) == [(1, 2, 8, 8, 8), (1, 4, 8, 8, 8), (1, 4, 8, 8, 8), (1, 4, 4, 4, 8), (1, 32, 4, 4)]


# ------------------------------------------------------------------ schedules


def test_plain_rule():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((64, 512), "float32"), B: T.Buffer((64, 512), "float32")):
        C = T.sblock_alloc_buffer((64, 512))
        for i, j in T.grid(64, 512):
            with T.sblock("twice"):
                v, w = T.axis.remap("SS", [i, j])
                C[v, w] = A[v, w] + A[v, w]
        for i, j in T.grid(64, 512):
            with T.sblock("thrice"):
                v, w = T.axis.remap("SS", [i, j])
                B[v, w] = C[v, w] * T.float32(3)

    @T.prim_func(s_tir=True)
    def expected(A: T.Buffer((64, 512), "float32"), B: T.Buffer((64, 512), "float32")):
        for outer in T.parallel(2048):
            for lane in T.vectorized(16):
                with T.sblock("thrice"):
                    v = T.axis.spatial(64, (outer * 16 + lane) // 512)
                    w = T.axis.spatial(512, (outer * 16 + lane) % 512)
                    B[v, w] = (A[v, w] + A[v, w]) * T.float32(3)

    made, rule = scheduled(before, Cores(lanes=16, registers=32))
    assert rule == "plain"
    made, expected = (f.without_attr("global_symbol") if f.attrs else f for f in (made, expected))
    tvm.ir.assert_structural_equal(made, expected)


def test_rule_is_found_by_its_annotation():
    x, y = (te.placeholder((8, 8), "float32", name=name) for name in "xy")
    named = te.compute((8, 8), lambda i, j: x[i, j] + y[i, j], name="named", attrs={RULE: "pooling"})
    _, rule = scheduled(te.create_prim_func([x, y, topi.nn.relu(named)]), Cores(8, 16))
    assert rule.startswith("plain (pooling failed: ")


@pytest.mark.parametrize("lanes,registers", [(16, 32), (8, 16), (4, 16)])
@pytest.mark.parametrize("chunks,height,width", [(4, 56, 56), (1, 7, 7), (8, 71, 71), (2, 1, 1)])
def test_register_tile_fits(lanes, registers, chunks, height, width):
    tile = register_tile(chunks, 1, height, width, registers, block_bytes=4 * 9 * 64 * lanes)
    assert chunks % tile.chunks == 0
    assert tile.chunks * (tile.rows * tile.columns + 1) < registers


def test_register_tile_and_channel_block():
    assert register_tile(4, 1, 56, 56, 32, 4 * 9 * 64 * 16) == Tile(2, 1, 14)
    assert [channel_block(channels, 16) for channels in (64, 24, 3, 20)] == [16, 8, 3, 10]


@pytest.mark.parametrize("mcpu,cores", [("x86-64-v4", (16, 32, 2)), ("x86-64-v3", (8, 16, 2)), ("x86-64", (4, 16, 2))])
def test_cores(mcpu, cores):
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu})
    assert cores_of(target) == (*cores, False)


if __name__ == "__main__":
    tvm.testing.main()
