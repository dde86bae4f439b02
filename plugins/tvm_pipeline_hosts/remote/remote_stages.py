"""What a host does for a pipeline of another one: it makes a stage, runs frames of it, and times operators.

A session makes one stage, which its main thread runs. Next: `remote_backend.py`, which asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
import numpy as np

from tvm_pipeline.backends.contract import Array, Port, StageRunner
from tvm_pipeline.errors import RunError
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline_hosts.remote.session import Session

MOST_GIVEN_BYTES = 1 << 28

Answer = tuple[Any, list[Array]]


class _Stage(msgspec.Struct, frozen=True):
    bundle: str
    device: str
    operators: tuple[str, ...]


class _Timing(msgspec.Struct, frozen=True):
    bundle: str
    device: str
    repeats: int


class _DataSize(msgspec.Struct, frozen=True):
    size_bytes: int


def make_stage(session: Session, arguments: dict[str, Any], _: list[Array]) -> Answer:
    """Make the stage of the session, bind the thread that runs it, and return its ports."""
    asked = msgspec.convert(arguments, _Stage)
    if session.stage:
        raise RunError("this session has a stage already; another stage takes a session of its own")
    bundle = session.opened(asked.bundle)
    runner = bundle.compiled.stage(asked.operators, bundle.platform.device(asked.device))
    runner.bind()
    session.stage = runner, [port.buffer() for port in runner.outputs]
    return (runner.inputs, runner.outputs), []


def run_stage(session: Session, _: dict[str, Any], arrays: list[Array]) -> Answer:
    """Run the stage of the session on tensors as its ports require them; return what it computes."""
    receive_frame(session, {}, arrays)
    compute_frame(session, {}, [])
    return send_frame(session, {}, [])


def receive_frame(session: Session, _: dict[str, Any], arrays: list[Array]) -> Answer:
    """Keep tensors as the ports of the session's stage require them."""
    runner, _outputs = _stage_of(session)
    _check(runner.inputs, arrays)
    session.received = arrays
    return None, []


def compute_frame(session: Session, _: dict[str, Any], __: list[Array]) -> Answer:
    """Run the stage of the session on the tensors that it received last."""
    runner, outputs = _stage_of(session)
    _check(runner.inputs, session.received)
    runner.run(session.received, outputs)
    return None, []


def send_frame(session: Session, _: dict[str, Any], __: list[Array]) -> Answer:
    """Return what the stage of the session computed last."""
    return None, _stage_of(session)[1]


def time_operators(session: Session, arguments: dict[str, Any], _: list[Array]) -> Answer:
    """Return seconds of every operator on a device (repeats x operators), as `CompiledModel.time_operators` does."""
    asked = msgspec.convert(arguments, _Timing)
    bundle = session.opened(asked.bundle)
    device = bundle.platform.device(asked.device)
    operators = bundle.compiled.graph.operator_names
    with closing(bundle.compiled.stage(operators, device)) as whole:
        timed = partial(bundle.compiled.time_operators, device, asked.repeats)
        return None, [in_bound_thread(whole, timed)]


def swallow(_: Session, __: dict[str, Any], ___: list[Array]) -> Answer:
    """Return nothing of what came, so that the way there is timed."""
    return None, []


def give(_: Session, arguments: dict[str, Any], __: list[Array]) -> Answer:
    """Return a tensor of so many bytes, so that the way back is timed."""
    size_bytes = msgspec.convert(arguments, _DataSize).size_bytes
    if not 0 <= size_bytes <= MOST_GIVEN_BYTES:
        raise RunError(f"a tensor of {size_bytes} bytes is not given; at most {MOST_GIVEN_BYTES} are")
    return None, [np.zeros(size_bytes, np.uint8)]


def _stage_of(session: Session) -> tuple[StageRunner, list[Array]]:
    if session.stage is None:
        raise RunError("this session has no stage; call make_stage first")
    return session.stage


def _check(ports: tuple[Port, ...], arrays: list[Array]) -> None:
    """Raise RunError where arrays are not what the ports require: a kernel would read beyond them."""
    if [(port.shape, port.dtype) for port in ports] != [(array.shape, str(array.dtype)) for array in arrays]:
        came = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        wanted = ", ".join(f"{port.name} {port.dtype}{list(port.shape)}" for port in ports)
        raise RunError(f"the stage takes {wanted}, and {came or 'nothing'} came")


STAGES: Mapping[str, Any] = {
    "compute_frame": compute_frame,
    "give": give,
    "make_stage": make_stage,
    "receive_frame": receive_frame,
    "run_stage": run_stage,
    "send_frame": send_frame,
    "swallow": swallow,
    "time_operators": time_operators,
}
