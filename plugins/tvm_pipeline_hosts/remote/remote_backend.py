"""Devices of other hosts in one pipeline: the backend `remote`, whose stages run behind `serve-rpc` of these hosts.

    [[device]]
    name = "barn"
    backend = "remote"
    target = "barn:9190/cpu0"          # the address of `serve-rpc`, and the name of a device over there

A stage is a session of its own on its host, and a frame of it is one call: its tensors go there and its outputs come
back, as to a device with memory of its own. So the planner needs nothing new: the profile measures the operators over
there, how long tensors travel (with the CPU that they take at both ends, and the network between), and how much the
devices here are slowed down meanwhile. A host that is lost is a device that failed: its frames run again on the others.

The model is compiled here, once for each distinct target. Code that this processor does not run, such as a board's, is
not loaded here, and what it computes over there is compared. Next: `remote_stages.py`, what a host does for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tvm_pipeline import Device, Model, Platform
from tvm_pipeline.backends.contract import (
    Array,
    Backend,
    CompiledModel,
    Delegating,
    Order,
    Port,
    Seconds,
    StageRunner,
)
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.errors import OptionError, PlatformError, RunError
from tvm_pipeline_hosts.remote.address import parse_address
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.board_check import check_board, frame_of_noise, outputs_on, whole_devices
from tvm_pipeline_hosts.remote.board_models import outputs_there, send_model, with_triple
from tvm_pipeline_hosts.remote.channel import SILENT_S

_log = logging.getLogger(__name__)

HOST = "host"
# Of a link that a stage uses: frames wait, so it is given up sooner than that of a command, or of a stage that a slow
# board still makes. What it held runs again.
STAGE_SILENT_S, STAGE_KEEP_S = 3.0, 0.5


class RemoteBackend(Backend):
    """Devices of hosts that `serve-rpc` serves, beside the CPU cores of this one."""

    name = "remote"
    serves = (HOST,)

    def __init__(self) -> None:
        self._boards: dict[str, Board] = {}
        self._found: dict[str, Device] = {}  # by the target here, the device over there
        self._opening = threading.Lock()

    def refuses(self, model: Model) -> str:
        return find_backend(HOST).refuses(model)

    def detect(self) -> Sequence[Device]:
        """Return none: a platform file names the hosts."""
        return ()

    def settle(self, device: Device) -> Device:
        if device.cores:
            raise PlatformError(f"device {device.name} is on another host, whose cores are named there; leave them out")
        self.there(device)
        return device

    def there(self, device: Device) -> Device:
        """Return a device as its own host knows it; raise PlatformError where the host or the device is not there."""
        if device.target not in self._found:  # plans ask this for each stage that they weigh
            self._found[device.target] = self._find(device)
        return self._found[device.target]

    def _find(self, device: Device) -> Device:
        """Ask the host of a device for it."""
        address, slash, name = device.target.rpartition("/")
        if not slash or not address or not name:
            raise PlatformError(
                f"device {device.name}: target {device.target!r} is not HOST:PORT/DEVICE, such as barn:9190/cpu0"
            )
        try:
            board = self.board(address)
            found = board.platform.device(name)
            if found.backend != HOST:
                raise PlatformError(
                    f"{name} of {address} is of the backend {found.backend}; only CPU cores of other hosts can take "
                    "part in a pipeline"
                )
            return find_backend(HOST).settle_elsewhere(with_triple(found, board.software["machine"]))
        except (RunError, OptionError, PlatformError) as error:
            raise PlatformError(f"device {device.name} cannot be used: {error}") from error

    def board(self, address: str) -> Board:
        """Return the connection to a host, which is kept until `close`."""
        with self._opening:
            if address not in self._boards:
                self._boards[address] = Board.connect(address)
            return self._boards[address]

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> CompiledModel:
        there = [self.there(device) if device.backend == self.name else device for device in devices]
        compiled = RemoteModel(find_backend(HOST).compile_elsewhere(model, there, order), self)
        compiled.check(devices)
        return compiled

    def load(self, folder: Path, devices: Sequence[Device]) -> CompiledModel:
        return RemoteModel(find_backend(HOST).load(folder, devices), self)

    def versions(self) -> Mapping[str, str]:
        return find_backend(HOST).versions()

    def close(self) -> None:
        """End the connections to all hosts."""
        with self._opening:
            self._found.clear()
            while self._boards:
                self._boards.popitem()[1].close()


class RemoteModel(Delegating):
    """A model compiled for CPU cores of several hosts: the CompiledModel of the backend `remote`.

    What is asked of a device that is not here is asked of its host, which gets the whole model once.
    """

    def __init__(self, inner: CompiledModel, backend: RemoteBackend) -> None:
        super().__init__(inner)
        self._backend = backend
        self._sent: dict[tuple[str, str], str] = {}  # (address, target) -> the id of the model over there
        self._sending = threading.Lock()

    def inner_device(self, device: Device) -> Device:
        """Return a device as its own host knows it."""
        return self._backend.there(device) if device.backend == self._backend.name else device

    def check(self, devices: Sequence[Device]) -> None:
        """Compare what other hosts compute with what this one does; nothing, where none of its devices takes part.

        Raises:
            ModelError: one computes something else.
        """
        whole = whole_devices(self, Platform("all", tuple(devices)))
        here = [device for device in whole if device.backend != self._backend.name]
        if not here:
            return
        others = {(_address(d), self.inner_device(d).target): d for d in whole if d.backend == self._backend.name}
        expected = outputs_on(self.inner, here[0], frame_of_noise(self.graph))
        for device in others.values():
            _log.info(f"comparing {device.label} with {here[0].label}")
            board, name = self._board(device), self.inner_device(device).name
            check_board(
                board.name, self.graph, name, expected, outputs_there(board, self._send(device), self.graph, name)
            )

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        if device.backend != self._backend.name:
            return super().stage(operators, device)
        return RemoteStage(_address(device), self._send(device), operators, self.inner_device(device), device.label)

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        if device.backend != self._backend.name:
            return super().time_operators(device, repeats)
        asked = {"bundle": self._send(device), "device": self.inner_device(device).name, "repeats": repeats}
        _, (seconds,) = self._board(device).call("time_operators", asked)
        return np.asarray(seconds, np.float64)

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[Seconds, Seconds] | None:
        """Time calls with tensors of these sizes as arguments, and as results; None for the cores of this host.

        A call without tensors takes its time, too: half of it is the way there, and half the way back.
        """
        if device.backend != self._backend.name:
            return super().time_transfers(device, sizes_bytes, repeats)
        board = self._board(device)
        there = [partial(board.call, "swallow", {}, [np.zeros(size, np.uint8)]) for size in sizes_bytes]
        back = [partial(board.call, "give", {"size_bytes": size}) for size in sizes_bytes]
        other_way_s = float(np.median(_timed([partial(board.call, "swallow", {})], repeats))) / 2
        received, sent = (np.maximum(_timed(calls, repeats) - other_way_s, other_way_s) for calls in (there, back))
        return received, sent

    def slicer(self) -> None:
        """Return None: compiled code is cut, not the model's file."""

    def _board(self, device: Device) -> Board:
        return self._backend.board(_address(device))

    def _send(self, device: Device) -> str:
        """Return the id of the model on the host of a device, which gets what it lacks of it."""
        board, there = self._board(device), self.inner_device(device)
        key = str(board.address), there.target
        with self._sending:
            if key not in self._sent:
                own = (with_triple(d, board.software["machine"]) for d in board.platform.devices if d.backend == HOST)
                alike = tuple(device for device in own if device.target == there.target)
                self._sent[key] = send_model(board, self.inner, replace(board.platform, devices=alike, links=()))
            return self._sent[key]


class RemoteStage(StageRunner):
    """A stage on another host, in a session of its own there: the StageRunner."""

    def __init__(self, address: str, bundle: str, operators: Sequence[str], device: Device, label: str) -> None:
        self._label = label
        self._turn: AbstractContextManager[object] | None = None
        self._board = Board(parse_address(address), SILENT_S, STAGE_KEEP_S)
        asked = {"bundle": bundle, "operators": operators, "device": device.name}
        try:
            ports, _ = self._board.call("make_stage", asked, kind=tuple[tuple[Port, ...], tuple[Port, ...]])
        except BaseException:
            self._board.close()
            raise
        self._board.expect_within(STAGE_SILENT_S)
        self.inputs, self.outputs = ports

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        if self._turn is None:
            _, made = self._board.call("run_stage", {}, inputs)
        else:
            self._board.call("receive_frame", {}, inputs)
            with self._turn:
                self._board.call("compute_frame", {})
            _, made = self._board.call("send_frame", {})
        for port, array, target in zip(self.outputs, made, outputs, strict=True):
            if (array.shape, array.dtype) != (target.shape, target.dtype):
                raise RunError(f"{self._label} made {port.name} as {array.dtype}{list(array.shape)}")
            np.copyto(target, array)

    def take_turns(self, turn: AbstractContextManager[object]) -> bool:
        self._turn = turn
        return True

    def close(self) -> None:
        self._board.close()


def _address(device: Device) -> str:
    return device.target.rpartition("/")[0]


def _timed(calls: Sequence[Callable[[], object]], repeats: int) -> Seconds:
    """Return the seconds of each call (repeats x calls)."""
    seconds = np.empty((repeats, len(calls)))
    for row in seconds:
        for column, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            row[column] = time.perf_counter() - begin
    return seconds


backend = RemoteBackend()
