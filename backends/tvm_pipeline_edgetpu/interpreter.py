"""Run a slice: a TFLite interpreter as the runtime's StageRunner, on an Edge TPU, another NPU, or TFLite's kernels.

Next: `delegate.py`, which reaches the Edge TPU, and `external.py`, which reaches others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tvm_pipeline.backends.contract import Array, Port
from tvm_pipeline.backends.cores import made_on
from tvm_pipeline.backends.engine import EngineStage
from tvm_pipeline.errors import ModelError
from tvm_pipeline_edgetpu.delegate import check_library, load, tflite
from tvm_pipeline_edgetpu.external import ENGINE, check_taken, is_external, load_external

# This address and ENGINE are of no device: TFLite's own kernels, as a stand-in for an Edge TPU, and in their own right.
CPU = "cpu"


def is_edge_tpu(target: str) -> bool:
    """Return whether the target of a device is the address of an Edge TPU."""
    return target not in (CPU, ENGINE) and not is_external(target)


def make_interpreter(content: bytes, address: str = CPU, threads: int = 1) -> Any:
    """Return an interpreter of a .tflite file with its tensors allocated.

    Args:
        content: the file; for an Edge TPU the file that edgetpu_compiler made of it.
        address: `usb:0`, `pci:1` or whatever libedgetpu calls the device; `cpu` is TFLite's CPU kernels; or the target
            of an external delegate.
        threads: the number of threads of the CPU kernels.

    Raises:
        ModelError: TFLite cannot run the file, with its reason, or an external delegate takes nothing of it.
        PlatformError: the Edge TPU or the delegate cannot be used, or libedgetpu does not fit the installed TFLite.
    """
    if is_edge_tpu(address):
        check_library(lambda: _make(content, address, threads).invoke(), address)
    return _make(content, address, threads)


def _make(content: bytes, address: str, threads: int) -> Any:
    interpreter_of = tflite().Interpreter
    external = is_external(address)
    delegates = [] if address == CPU else [load_external(address) if external else load(address)]
    try:
        interpreter = interpreter_of(model_content=content, num_threads=threads, experimental_delegates=delegates)
        if external:
            check_taken(interpreter, address)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"TFLite cannot run a stage on {address}: {error}") from error
    return interpreter


def every_tensor(content: bytes, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return every tensor, by name, that TFLite's CPU kernels compute from the inputs of a .tflite."""
    module = tflite()
    plain = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        interpreter = module.Interpreter(
            model_content=content, experimental_preserve_all_tensors=True, experimental_op_resolver_type=plain
        )
        interpreter.allocate_tensors()
        for detail in interpreter.get_input_details():
            interpreter.set_tensor(detail["index"], inputs[detail["name"]])
        interpreter.invoke()
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"TFLite cannot run it: {error}; convert or download the model again") from error
    found = {}
    for detail in interpreter.get_tensor_details():
        with suppress(ValueError):  # kernels have tensors of their own, which are empty
            found[detail["name"]] = interpreter.get_tensor(detail["index"])
    return found


def _matched(ports: Sequence[Port], details: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the interpreter's index of each port's tensor, by its name; edgetpu_compiler may change the order."""
    found = {detail["name"]: detail for detail in details}
    for port in ports:
        if port.name not in found:
            raise ModelError(
                f"TFLite finds {', '.join(found)} in a stage, and not its tensor {port.name}; compile it again"
            )
        detail = found[port.name]
        shape, dtype = tuple(map(int, detail["shape"])), np.dtype(detail["dtype"]).name
        if (shape, dtype) != (port.shape, port.dtype):
            raise ModelError(
                f"tensor {port.name} has the type {port.dtype} and the shape {port.shape} in the file, and TFLite "
                f"computes it as {dtype} {shape}; convert the model again"
            )
    return [found[port.name]["index"] for port in ports]


class InterpreterStage(EngineStage):
    """A slice on a device.

    Args:
        content: the sub-model's file.
        inputs, outputs: its tensors, in the file's order.
        address: as in `make_interpreter`.
        cores: the CPU cores to which the stage is bound, with one thread of the CPU kernels for each; without any, the
            stage is not bound.
    """

    def __init__(
        self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], address: str, cores: Sequence[int]
    ) -> None:
        # The threads of the kernels keep to the cores of the thread that makes them.
        made = made_on(cores, lambda: make_interpreter(content, address, max(len(cores), 1)))
        super().__init__(made, inputs, outputs, cores)
        self._reads = _matched(self.inputs, made.get_input_details())
        self._writes = _matched(self.outputs, made.get_output_details())

    def compute(self, interpreter: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        # A view of the interpreter's memory must be gone before it is invoked, so none is kept.
        tensor = interpreter.tensor
        for index, array in zip(self._reads, inputs, strict=True):
            if array.ndim:
                np.copyto(tensor(index)(), array)
            else:  # a view of a scalar is its value
                interpreter.set_tensor(index, array)
        interpreter.invoke()
        for index, array in zip(self._writes, outputs, strict=True):
            np.copyto(array, tensor(index)())
