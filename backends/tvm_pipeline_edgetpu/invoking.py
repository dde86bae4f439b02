"""Regions inside a library of TVM's: what code of Relay (`byoc.py`) and of Relax (`byoc_relax.py`) calls."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline_edgetpu.interpreter import make_interpreter


class _RegionInterpreter(NamedTuple):
    """A region's interpreter, which one thread at a time may use, and the indices of its inputs and outputs."""

    interpreter: Any
    lock: Lock
    reads: list[int]
    writes: list[int]


# The key is digest and device. A region stays loaded, with its parameters in the Edge TPU's cache, until the process
# ends.
_loaded: dict[tuple[str, str], _RegionInterpreter] = {}
_loading = Lock()


def invoke(digest: str, device: str, content: Any, *tensors: Any) -> None:
    """Run a region on its inputs and then its outputs; an output is None where no kernel reads it."""
    with _loading:
        if (digest, device) not in _loaded:
            _loaded[digest, device] = _load(content.numpy().tobytes(), device)
    interpreter, lock, reads, writes = _loaded[digest, device]
    with lock:
        # A view of the interpreter's memory must be gone before it is invoked, so none is kept.
        for index, tensor in zip(reads, tensors[: len(reads)], strict=True):
            np.copyto(interpreter.tensor(index)(), tensor.numpy())
        interpreter.invoke()
        for index, tensor in zip(writes, tensors[len(reads) :], strict=True):
            if tensor is not None:
                tensor.copyfrom(interpreter.tensor(index)())


def _load(content: bytes, device: str) -> _RegionInterpreter:
    interpreter = make_interpreter(content, device)
    reads, writes = interpreter.get_input_details(), interpreter.get_output_details()
    return _RegionInterpreter(
        interpreter, Lock(), [detail["index"] for detail in reads], [detail["index"] for detail in writes]
    )
