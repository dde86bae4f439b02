"""Execution providers of onnxruntime, which run operators on other processors, and the child that tries them first.

Some come built into a package that replaces onnxruntime, others as plug-ins of packages beside it. A provider may claim
operators that it cannot compute, or compute something else, so the child runs what it claims (`serve`).
Next: `sessions.py`.
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import msgspec
import onnxruntime

from tvm_pipeline.backends.closeness import difference
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.backends.ports import Array, Port, noise
from tvm_pipeline.backends.trial import answer
from tvm_pipeline.core.number_types import NARROW, number_type
from tvm_pipeline.errors import ModelError
from tvm_pipeline_onnxruntime.onnxruntime import provider_precision
from tvm_pipeline_onnxruntime.sessions import CPU, error_reason, plugins, session


def serve(order: bytes, channel: socket.socket) -> None:
    """Be the child that loads providers first: list them, or try what one claims of a file.

    Of a file it tells which nodes onnxruntime leaves on the CPU, by their names, which are numbers.
    """

    def answered(question: list[str], content: bytes) -> object:
        if question:
            name, target = question
            return _tried(name, target, content)
        return sorted({*onnxruntime.get_available_providers(), *plugins()} - {CPU, "AzureExecutionProvider"})

    answer(channel, answered)


def _tried(name: str, target: str, content: bytes) -> list[int]:
    """Run a file on noise by a provider and by the CPU; return the nodes that the provider leaves to the CPU.

    Raises:
        ModelError: it fails, or its results are others.
    """
    provider, _ = parsed_target(target)
    with tempfile.TemporaryDirectory() as folder:
        made = session(name, content, (), target, Path(folder) / "profile", strict=False)
        for one in (*made.get_inputs(), *made.get_outputs()):
            if _dtype(one.type) in NARROW or number_type(_dtype(one.type)) is None:
                raise ModelError(
                    f"{provider} is given no {one.type}, as {one.name} is; name a device of the target cpu"
                )
        ports = [Port(one.name, tuple(one.shape), _dtype(one.type)) for one in made.get_inputs()]
        frame = {port.name: noise(port) for port in ports}
        for port in ports:
            if not port.dtype.startswith("float"):
                frame[port.name].fill(0)  # it may be indices
        names = [one.name for one in made.get_outputs()]
        try:
            found = made.run(names, frame)
        except Exception as error:  # its errors have no common root
            raise ModelError(f"{provider} claims it and fails: {error_reason(error)}") from error
        events = msgspec.json.decode(Path(made.end_profiling()).read_bytes())
    expected: list[Array] = session(name, content, ()).run(names, frame)
    for output, one, other in zip(names, expected, found, strict=True):
        port = Port(output, one.shape, str(one.dtype))
        apart = difference((port, one), (port, other), provider_precision(target))
        if not apart.is_close_behind_a_cut(0):
            raise ModelError(f"{provider} computes something else than the CPU: {output} is {apart}")
    left = (e["name"].removesuffix("_kernel_time") for e in events if e.get("args", {}).get("provider") == CPU)
    return sorted({int(label) for label in left if label.isdecimal()})


def _dtype(kind: str) -> str:
    """Return numpy's name of onnxruntime's `tensor(float)`."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)
