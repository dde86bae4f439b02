"""cpu_pipeline: modules of any frontend compile as by TVM's default pipeline, and run our kernels where they can."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import transform
from tvm.relax.frontend import nn

from tests.plugins.kernels.relax.layers import convolution
from tests.relax.scripts import TARGET, called, frame, lowered, machine, module, network, plan_of
from tvm_pipeline.errors import OptionError
from tvm_pipeline_kernels.relax.cpu_pipeline import FastKernels, cpu_pipeline
from tvm_pipeline_kernels.relax.schedules.lowering import PIPELINE
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relax.partition_pipeline import PartitionPipeline

OURS: dict[str, Any] = {"relax_pipeline": cpu_pipeline(TARGET), "tir_pipeline": PIPELINE}


def kernels(mod: tvm.IRModule) -> dict[str, bool]:
    """Return the functions of TIR, and whether each is scheduled."""
    return {
        symbol.name_hint: bool(function.attrs.get(kernel_passes.IS_SCHEDULED))
        for symbol, function in mod.functions.items()
        if isinstance(function, tirx.PrimFunc)
    }


def assert_near(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for output, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_a_network_computes_the_same_by_fused_kernels_of_ours() -> None:
    mod = network()
    made = FastKernels(TARGET)(mod)
    assert all(kernels(made).values())
    assert {"fused_conv2d_add_relu", "softmax"} <= set(kernels(made))
    assert not any(name.startswith("reshape") for name in kernels(made)), "a reshape shows bytes and copies none"
    assert_near(called(machine(mod, **OURS), "main", frame()), called(machine(mod), "main", frame()))


def test_text_and_mapping_are_targets() -> None:
    mod = module("@R.function\ndef main(x: R.Tensor((4, 16), 'float32')):\n    return R.tanh(x)\n")
    x = frame(4, 16)
    for target in ("llvm", {"kind": "llvm", "mcpu": "x86-64-v2"}):
        vm = relax.VirtualMachine(
            tvm.compile(mod, tvm.target.Target(target), relax_pipeline=cpu_pipeline(target)), tvm.cpu()
        )
        assert_near(called(vm, "main", x), [np.tanh(x)])
    with pytest.raises(OptionError, match="for CPU cores, of targets of the kind llvm, not for cuda"):
        cpu_pipeline({"kind": "cuda", "arch": "sm_80"})


class _Classifier(nn.Module):
    """What TVM's own frontend makes has its weights as parameters, as PyTorch's exported programs have."""

    def __init__(self) -> None:
        self.conv, self.head = nn.Conv2D(3, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.head(nn.op.sum(nn.op.relu(self.conv(x)), [2, 3]))


def test_weights_that_are_parameters_are_told_once_and_constants_are_laid_out(caplog: pytest.LogCaptureFixture) -> None:
    mod, names = _Classifier().export_tvm(spec={"forward": {"x": nn.spec.Tensor((1, 3, 8, 8), "float32")}})
    weights = {name: frame(*map(int, parameter.shape)) for name, parameter in names}
    given = called(machine(mod, **OURS), "forward", frame(), *weights.values())
    (told,) = caplog.messages
    assert "forward is given its weights as parameters (conv.weight, 2 in all)" in told
    assert "relax.transform.BindParams('forward', params)" in told
    caplog.clear()
    bound = transform.BindParams("forward", weights)(mod)
    assert_near(called(machine(bound, **OURS), "forward", frame()), given)
    assert caplog.messages == []
    assert any("conv2d" in name for name in kernels(FastKernels(TARGET)(bound)))


# What our passes leave to TVM, with the reason; each function takes (4, 16) and perhaps more.
LEFT = {
    "branch": (
        'def branch(x: R.Tensor((4, 16), "float32"), c: R.Tensor((), "bool")):\n'
        "    if c:\n        y = R.exp(x)\n    else:\n        y = R.tanh(x)\n    return y\n",
        "branch .* y is computed by control flow",
        (np.array(True),),
    ),
    "dynamic": (
        'def dynamic(x: R.Tensor(("n", 16), "float32")) -> R.Tensor(("n", 16), "float32"):\n'
        "    return R.nn.softmax(R.exp(x))\n",
        "dynamic .* parameter x is R.Tensor",
        (),
    ),
    "counted": (
        'def counted(x: R.Tensor((4, 16), "float32")):\n    y = R.nonzero(R.exp(x))\n    return y\n',
        "counted .* y is R.Tensor.* not a tensor of a fixed shape",
        (),
    ),
    "calling": (
        'def calling(x: R.Tensor((4, 16), "float32")) -> R.Tensor((4, 16), "float32"):\n'
        "    y = Module.fast(R.exp(x))\n    return R.multiply(y, y)\n",
        "calling .* it calls the function fast",
        (),
    ),
    "unread": (
        'def unread(x: R.Tensor((4, 16), "float32")):\n'
        '    y = R.call_pure_packed("vm.builtin.copy", x, ty_args=R.Tensor((4, 16), "float32"))\n'
        "    return R.exp(x)\n",
        "unread .* nothing reads y, so it is there for effects",
        (),
    ),
    "own_kernel": (
        'def own_kernel(x: R.Tensor((4, 16), "float32")):\n'
        '    y = R.call_tir(Module.thrice, (R.add(x, x),), out_ty=R.Tensor((4, 16), "float32"))\n'
        "    return R.exp(y)\n",
        # int32 extents, which TVM's own FuseTIR refuses
        "own_kernel .* our passes fail .*Inconsistent buffers",
        (),
    ),
}
# What goes our way beside them.
TAKEN = {
    "fast": 'def fast(x: R.Tensor((4, 16), "float32")) -> R.Tensor((4, 16), "float32"):\n'
    "    return R.multiply(R.tanh(x), R.const(2.0))\n",
    "fields": 'def fields(x: R.Tensor((4, 16), "float32")):\n'
    "    y = R.split(R.sort(x, axis=1), 2, axis=1)\n    return (y[0], R.add(y[0], y[1]), x)\n",
    "tuple_given": 'def tuple_given(t: R.Tuple(R.Tensor((4, 16), "float32"), R.Tensor((4, 16), "float32"))):\n'
    "    return R.add(t[0], t[1])\n",
    "integers": 'def integers(x: R.Tensor((4, 16), "float32")):\n'
    '    y = R.astype(R.multiply(x, R.const(9.0)), "int8")\n    return R.cumsum(R.add(y, y), axis=1, dtype="int32")\n',
    "read": 'def read(x: R.Tensor((4, 16), "float32")):\n'
    '    y = R.call_pure_packed("vm.builtin.copy", R.exp(x), ty_args=R.Tensor((4, 16), "float32"))\n'
    "    return R.exp(y)\n",
    "nothing": 'def nothing(x: R.Tensor((4, 16), "float32")):\n    return x\n',
}
THRICE = """
@T.prim_func(s_tir=True)
def thrice(A: T.Buffer((4, 16), "float32"), B: T.Buffer((4, 16), "float32")):
    for i, j in T.grid(4, 16):
        with T.sblock("b"):
            v, w = T.axis.remap("SS", [i, j])
            B[v, w] = A[v, w] * T.float32(3)
"""


def test_what_we_cannot_take_is_left_to_tvm_and_told(caplog: pytest.LogCaptureFixture) -> None:
    functions = [*(written for written, _, _ in LEFT.values()), *TAKEN.values()]
    mod = module(THRICE + "".join(f"@R.function\n{written}" for written in functions))
    vm, stock = machine(mod, **OURS), machine(mod)
    told = {message.split()[0]: message for message in caplog.messages}
    assert len(told) == len(caplog.messages)
    assert {name: bool(re.search(LEFT[name][1], message)) for name, message in told.items()} == dict.fromkeys(
        LEFT, True
    )
    x = frame(4, 16)
    for name in (*LEFT, *TAKEN):
        given = [[x, x]] if name == "tuple_given" else [x, *(LEFT[name][2] if name in LEFT else ())]
        assert_near(called(vm, name, *given), called(stock, name, *given))


def test_stages_of_a_partition_are_scheduled_and_equal_bit_for_bit() -> None:
    """Whether a module is cut before FuseTIR, behind it or not at all, and scheduled or not, kernels are the same."""
    fused = ExtractOperatorGraph("net")(kernel_passes.fused(network(), TARGET))
    wanted = called(machine(fused, **OURS), "main", frame())
    names = operator_graph(fused).operator_names
    cut = PartitionPipeline(plan_of([names[:2], names[2:]]))
    for mod in (cut(fused), cut(kernel_passes.kernels(fused, TARGET))):
        fast = FastKernels(TARGET)(mod)
        assert all(kernels(fast).values())
        for output, expected in zip(called(machine(mod, **OURS), "main", frame()), wanted, strict=True):
            np.testing.assert_array_equal(output, expected)
    assert kernels(FastKernels(TARGET)(cut(fused))) == kernels(FastKernels(TARGET)(cut(lowered(fused))))


def test_what_is_scheduled_stays() -> None:
    once = FastKernels(TARGET)(network())
    tvm.ir.assert_structural_equal(FastKernels(TARGET)(once), once)
    rules: dict[str, str] = {}
    again = kernel_passes.ScheduleKernels(TARGET, rules)(once)
    assert rules == {}
    tvm.ir.assert_structural_equal(again, once)


def test_norms_are_folded_though_no_block_of_dataflow_is_stated() -> None:
    mod = module(
        """
@R.function
def main(x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((16, 3, 3, 3), "float32"), g: R.Tensor((16,), "float32")):
    y = R.nn.conv2d(x, w)
    z = R.nn.batch_norm(y, g, g, g, g, axis=1, training=False)
    return R.nn.relu(z[0])
"""
    )
    bound = transform.BindParams("main", {"w": frame(16, 3, 3, 3), "g": np.abs(frame(16))})(mod)
    assert kernels(FastKernels(TARGET)(bound)) == {"fused_conv2d_add_relu": True, "layout_transform": True}


def test_functions_of_a_module_share_kernels_and_keep_their_own() -> None:
    """Two functions of one body call one kernel; what the user made public stays as it is beside one that is fast."""
    one = '@R.function\ndef first(x: R.Tensor((4, 16), "float32")):\n    return R.tanh(R.add(x, x))\n'
    calling = '@R.function\ndef third(x: R.Tensor((4, 16), "float32")):\n'
    calling += '    y = R.call_tir(Module.thrice, (x,), out_ty=R.Tensor((4, 16), "float32"))\n    return y\n'
    mod = module(THRICE + one + one.replace("first", "second") + calling)
    made = FastKernels(TARGET)(mod)
    assert kernels(made) == {"fused_add_tir_tanh": True, "thrice": False, "thrice1": True}
    assert {symbol.name_hint for symbol in made.get_global_vars()} == {*kernels(made), "first", "second", "third"}
    tvm.ir.assert_structural_equal(made["thrice"], mod["thrice"])


def test_a_large_kernel_that_no_schedule_takes_is_told_and_leaves_the_others_fast(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TVM's scatter is a function of loops without blocks, which schedules cannot read."""
    mod = module(
        'def f(x: R.Tensor((4, 4000), "float32"), i: R.Tensor((4, 2), "int64"), u: R.Tensor((4, 2), "float32")):\n'
        "    return R.tanh(R.scatter_elements(x, i, u, axis=1))\n".replace("def", "@R.function\ndef", 1)
    )
    given = (frame(4, 4000), np.array([[0, 3999]] * 4), frame(4, 2))
    found = called(machine(mod, **OURS), "f", *given)
    (told,) = caplog.messages
    assert told.startswith("kernel scatter_elements stays as TVM made it, which is slow: default (loops without blocks")
    assert_near(found, called(machine(mod), "f", *given))
    assert kernels(FastKernels(TARGET)(mod)).keys() == {"scatter_elements", "tir_tanh"}


@pytest.mark.parametrize(("outputs", "groups"), [(8, 1), (8, 8), (16, 8), (6, 1)])
def test_convolutions_of_bytes_have_numpys_sums(outputs: int, groups: int) -> None:
    """TVM computes two outputs for each channel, and outputs that 4 does not divide."""
    draw, builder = np.random.default_rng(2), relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType((1, 8, 6, 7), "uint8"))
    weights = draw.integers(-128, 128, (outputs, 8 // groups, 3, 3)).astype("int8")
    with builder.function("main", [data]):
        with builder.dataflow():
            sums = builder.emit(relax.op.nn.conv2d(data, relax.const(weights), groups=groups, out_dtype="int32"))
            output = builder.emit_output(relax.op.astype(sums, "float32"))
        builder.emit_func_output(output)
    image = draw.integers(0, 256, (1, 8, 6, 7)).astype("uint8")
    [found] = called(machine(builder.get(), **OURS), "main", image)
    np.testing.assert_array_equal(found, convolution(image, weights, groups))
