"""A model that is compiled here for a board: its targets, its bundle over there, and what the board computes by it.

Used by `remote_machine.py`, for which the board is the whole machine, and by `remote_backend.py`, for which its devices
are some of a pipeline's.
"""

from __future__ import annotations

import logging
import platform as python_platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tvm_pipeline import Bundle, Device, OperatorGraph, Plan, Platform, Prediction, Stage, write_bundle
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline_hosts.remote.board_check import frame_of_noise

_log = logging.getLogger(__name__)

T = TypeVar("T")
# What stands behind the kind of processor in a triple.
_SYSTEMS = {"armv7l": "linux-gnueabihf", "armv6l": "linux-gnueabihf"}


class BoardClient(Protocol):
    """What can be called as a board: a Board, or a host of a fleet.

    Attributes:
        name: for messages.
    """

    name: str

    def call(
        self, method: str, arguments: Mapping[str, Any], arrays: Sequence[Array] = (), kind: type[T] = ...
    ) -> tuple[T, list[Array]]:
        """Have something done there, as `Board.call` does."""

    def send(self, bundle: Path) -> str:
        """Have a bundle there, and return its id."""


def with_triple(device: Device, machine: str) -> Device:
    """Return a device whose target says for which kind of processor it is, where that is not this machine's.

    Args:
        machine: the kind of the device's processor, as `platform.machine()` says it there.
    """
    if machine == python_platform.machine() or not device.target.startswith("llvm") or "-mtriple" in device.target:
        return device
    keys = "" if "-keys" in device.target else " -keys=cpu"  # schedules of ours, as without a triple
    triple = f"llvm{keys} -mtriple={machine}-{_SYSTEMS.get(machine, 'linux-gnu')}"
    return replace(device, target=re.sub(r"^llvm\b", triple, device.target))


def send_model(board: BoardClient, compiled: CompiledModel, platform: Platform) -> str:
    """Have a model on a board, in a bundle with a plan that nobody runs; return the bundle's id.

    Args:
        platform: the devices of the board that are to run the model or stages of it.
    """
    graph = compiled.graph
    _log.info(f"sending {graph.name} to board {board.name}")
    whole = Stage((platform.devices[0].name,), tuple(graph.operator_names))
    nobody = Plan(graph.name, "nobody", "throughput", (whole,), Prediction())
    with tempfile.TemporaryDirectory(prefix="tvm-pipeline-") as folder:
        path = Path(folder) / f"{graph.name}.tar"
        write_bundle(path, Bundle(graph, platform, unmeasured(graph), nobody, compiled))
        return board.send(path)


def outputs_there(board: BoardClient, bundle: str, graph: OperatorGraph, device: str) -> list[Array]:
    """Return what a model that was sent computes of `frame_of_noise` on a device, as `board_check.outputs_on` does."""
    frame = frame_of_noise(graph)
    asked = {"bundle": bundle, "device": device, "inputs": list(frame)}
    return board.call("compute", asked, list(frame.values()))[1]
