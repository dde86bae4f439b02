"""A module as a TVM script has it, for tests of passes, and what TVM's virtual machine makes of a module."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from tests.relax.fused import TARGETS, Array
from tvm_pipeline.core.plan import Plan, Prediction, Stage

TARGET = TARGETS[0]
SHAPE = (1, 3, 8, 8)


def module(functions: str) -> tvm.IRModule:
    """Return the module of functions written in TVMScript."""
    written = textwrap.indent(functions, "    ")
    return tvm.script.from_source(f"@I.ir_module\nclass Module:\n{written}")


def network(*, image: int = 3) -> tvm.IRModule:
    """Return a simplified module: branches, an operator of two results, a reshape, weights that are read twice.

    Its outputs are ten numbers and what the convolution of number `image` makes, which is read inside as well.
    """
    draw = np.random.default_rng(0)
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(SHAPE, "float32"))

    def weights(*shape: int) -> Any:
        return relax.const((draw.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype("float32"))

    def conv(data: Any, kernel: Any, bias: Any) -> Any:
        padding = int(kernel.ty.shape[2]) // 2
        return builder.emit(op.nn.relu(op.add(op.nn.conv2d(data, kernel, padding=padding), bias)))

    with builder.function("main", [x]):
        with builder.dataflow():
            first = conv(x, weights(16, 3, 3, 3), weights(1, 16, 1, 1))
            kernel, bias = weights(16, 16, 3, 3), weights(1, 16, 1, 1)
            second, third = conv(first, kernel, bias), conv(first, weights(16, 16, 1, 1), bias)
            fourth = conv(op.add(second, third), kernel, bias)
            parts = builder.emit(op.split(fourth, 2, axis=1))
            joined = builder.emit(op.concat([op.tanh(parts[0]), parts[1], first], axis=1))
            numbers = op.reshape(op.mean(joined, [2, 3], keepdims=True), (1, 32))
            output = builder.emit_output(
                relax.Tuple([op.nn.softmax(op.matmul(numbers, weights(32, 10))), (first, second, third, fourth)[image]])
            )
        builder.emit_func_output(output)
    return builder.finalize()


def lowered(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module behind FuseTIR, not scheduled."""
    return tvm.transform.Sequential([relax.transform.FuseTIR(), relax.transform.DeadCodeElimination()])(mod)


def plan_of(stages: Sequence[Sequence[str]], devices: Sequence[tuple[str, ...]] = ()) -> Plan:
    named = devices or [(f"cpu{index}",) for index in range(len(stages))]
    made = tuple(Stage(device, tuple(part)) for device, part in zip(named, stages, strict=True))
    return Plan("net", "by-hand", "throughput", made, Prediction(1.0, 1.0))


def machine(mod: tvm.IRModule, **options: Any) -> relax.VirtualMachine:
    """Compile a module; `options` are those of tvm.compile."""
    return relax.VirtualMachine(tvm.compile(mod, target=TARGET, **options), tvm.cpu())


def called(vm: relax.VirtualMachine, function: str, *arguments: Any) -> list[Array]:
    """Return what a function gives, as a flat list of arrays."""
    return arrays(vm[function](*map(_given, arguments)))


def arrays(value: Any) -> list[Array]:
    return (
        [value.numpy()] if isinstance(value, tvm.runtime.Tensor) else [each for part in value for each in arrays(part)]
    )


def _given(argument: Any) -> Any:
    """Return arrays as tensors of TVM's: it ends the process over an array that is not aligned as it wants."""
    if isinstance(argument, list):
        return [_given(each) for each in argument]
    return tvm.runtime.tensor(argument) if isinstance(argument, np.ndarray) else argument


def frame(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape or SHAPE).astype("float32")
