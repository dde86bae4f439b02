"""A process that makes one stage and runs it, as its parent has it (`IsolatedStage`) and as it is itself (`serve`).

A device that one process at a time may open has a process of its own, in which each of its stages has a thread
(`DeviceProcesses`, `serve_device`).

The child tells the ports, since to make a stage may open the device, which the parent must then leave alone. Then a
message stands for a frame, and the tensors go through memory that both map. That memory has no name (memfd), so nothing
is left behind whichever side dies, and in what way.

The parent waits for nothing without a limit but for a frame:

    start          nothing is waited for, however long the order is
    load, make     `making_s` from the start on, whether the child never runs, dies, hangs or stops
    tie, a frame   `making_s`; without a limit, until the pipeline's watchdog closes the stage
    end            GRACE_S by itself, so that its backend may let go of the device, and `processes.GONE_S` after a kill;
                   a child that a driver holds even then is left behind
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.contract import Array, CompiledModel, Port, StageRunner
from tvm_pipeline.backends.ports import PAGE
from tvm_pipeline.backends.registry import compose
from tvm_pipeline.core.number_types import dtype_of
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import BundleError, ModelError, PlanError, PlatformError, RunError, StageError
from tvm_pipeline.processes import Child, Seat, receive, send

_log = logging.getLogger(__name__)

GRACE_S = 5.0  # for a child to end once nothing more can come
MOST_TEXT = 4096  # characters of an error
MOST_STAGES = 256  # that are open on a device, over all models and plans

DONE = b"done"
# Of a child's errors these keep their type; of others the name is passed on.
TYPES = {kind.__name__: kind for kind in (BundleError, ModelError, PlanError, PlatformError)}

Ports = tuple[tuple[Port, ...], tuple[Port, ...]]


@dataclass(frozen=True, slots=True)
class StageRequest:
    """What a child is to make: some operators of the model saved in `folder`, on a device.

    `backends` are those of the platform: together they load the model.
    """

    backends: tuple[str, ...]
    folder: str
    operators: tuple[str, ...]
    device: Device

    def __str__(self) -> str:
        first, *others = self.operators
        return f"{first} to {others[-1]} on {self.device.label}" if others else f"{first} on {self.device.label}"


def own_child(order: StageRequest) -> Child:
    return Child(f"{__name__}:serve", msgspec.json.encode(order))


class DeviceProcesses:
    """The processes of devices that one process at a time may open: all stages on such a device share one.

    Each stays until `end`, so that the device stays open while plans change; one that has died is replaced.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: dict[tuple[str, str], Child] = {}  # by the device's backend and target

    def seat(self, order: StageRequest) -> Seat:
        """Return a seat in the process of the order's device; raise OSError if that cannot be started."""
        device = order.device.backend, order.device.target
        with self._lock:
            if device in self._children and self._children[device].wait(0):
                self._children.pop(device).end()
            if device not in self._children:
                self._children[device] = Child(f"{__name__}:serve_device", " ".join(device).encode())
            return Seat(self._children[device], msgspec.json.encode(order))

    def end(self) -> None:
        """End every process; its stages are closed before."""
        with self._lock:
            for device, child in self._children.items():
                _end(child, " ".join(device))
            self._children.clear()


class StageProcess:
    """A child, seen by its parent.

    Args:
        order: what the child is to make.
        making_s: that it has for this.
        start: gives the child, or a seat in one.
    """

    def __init__(
        self, order: StageRequest, making_s: float, start: Callable[[StageRequest], Child] = own_child
    ) -> None:
        self._order, self.making_s = order, making_s
        self._until_s = time.monotonic() + making_s  # when the stage must be made
        self._waiting = threading.Lock()  # held by the thread that waits for an answer
        self._given_up = False  # `close` came while a thread waited for an answer
        try:
            self._child = start(order)
        except OSError as error:
            raise RunError(f"no process can be started for {order}: {error.strerror}; run without isolation") from error
        # What calls it first ends the child; a process must not outlive a stage that nobody closed.
        self._end = weakref.finalize(self, _end, self._child, str(order))

    @cached_property
    def ports(self) -> Ports:
        """Return what the stage takes and gives, once the child has made it."""
        try:
            return self._loaded[0]
        except RunError as error:
            raise StageError(-1, self._order.device.label, -1, error) from error

    @cached_property
    def _loaded(self) -> tuple[Ports, list[Array], list[Array]]:
        answer, descriptors = self._receive(self._until_s, "make its stage")
        if not descriptors:
            raise _child_error(answer, self._order)
        ports = msgspec.json.decode(answer, type=Ports)
        return ports, *shared_arrays(descriptors[0], *ports)

    @property
    def inputs(self) -> list[Array]:
        return self._loaded[1]

    @property
    def outputs(self) -> list[Array]:
        return self._loaded[2]

    def ask(self, what: bytes, limit_s: float | None = None) -> None:
        """Have the child do something, and wait until it is done; raise RunError where that takes more than `limit_s`.

        Without a limit, wait as long as the child lives.
        """
        _ = self._loaded
        with suppress(BrokenPipeError, ConnectionResetError):
            self._child.send(what)
        answer, _ = self._receive(None if limit_s is None else time.monotonic() + limit_s, what.decode())
        if answer != DONE:
            raise _child_error(answer, self._order)

    def close(self) -> None:
        """End the child, by force where a thread still waits for it; that thread closes again when it hears of it.

        Return in GRACE_S and `processes.GONE_S` at most, whatever the child does.
        """
        if self._waiting.acquire(blocking=False):
            try:
                if "_loaded" not in vars(self):  # nobody waits for what it makes
                    self._child.give_up()
                self._end()
            finally:
                self._waiting.release()
        else:
            self._given_up = True
            self._child.kill()

    def _receive(self, until_s: float | None, what: str) -> tuple[bytes, list[int]]:
        """Return the child's next message, and the descriptors that came with it.

        A child that has not done `what` by the time `until_s` is killed, and RunError is raised.
        """
        with self._waiting:
            try:
                answer, descriptors = self._child.receive(until_s)
            except TimeoutError:
                self._child.kill()
                raise RunError(
                    f"the process of {self._order} did not {what} within {self.making_s:g} s, and was ended; "
                    "where this device needs longer, give a longer time as `watchdog`"
                ) from None
            except OSError as error:
                raise RunError(f"what the process of {self._order} shares cannot be opened: {error}") from error
            if answer:
                return answer, descriptors
            if self._given_up:  # and not even a kill may have ended it yet
                raise RunError(f"the process of {self._order} was ended, since its stage was")
            raise RunError(f"the process of {self._order} {self._child.how()}; its standard error may say why")


class IsolatedStage(StageRunner):
    """A stage in a child: the StageRunner. The child begins to load at once, so several do so at the same time."""

    def __init__(
        self, order: StageRequest, making_s: float, start: Callable[[StageRequest], Child] = own_child
    ) -> None:
        self._process = StageProcess(order, making_s, start)

    @property
    def inputs(self) -> tuple[Port, ...]:  # type: ignore[override]  # nobody sets it
        """Raises what the child met while it made the stage; a StageError where it died of it."""
        return self._process.ports[0]

    @property
    def outputs(self) -> tuple[Port, ...]:  # type: ignore[override]
        return self._process.ports[1]

    def bind(self) -> None:
        """Tie the child to the device; raise RunError where it is not in the time for that."""
        self._process.ask(b"bind", self._process.making_s)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Raise RunError where the child raised, with the error's name and text, and where it died, with how."""
        process = self._process
        for shared, array in zip(process.inputs, inputs, strict=True):
            np.copyto(shared, array)
        process.ask(b"run")
        for shared, array in zip(process.outputs, outputs, strict=True):
            np.copyto(array, shared)

    def close(self) -> None:
        """End the child; one that is at a frame is killed, and `run` raises."""
        self._process.close()


def _end(child: Child, what: str) -> None:
    """End a child: by itself, so that its backend may let go of the device, or by force if it does not."""
    if not child.leave(GRACE_S):
        _log.warning(
            "the process of %s did not end within %g s after its stage was closed, and was killed", what, GRACE_S
        )
    if not child.end():
        _log.warning(
            "the process of %s (%d) cannot be killed: a driver may hold it. It is left behind with its device; the log "
            "of the kernel (dmesg) may say why",
            what,
            child.pid,
        )


def _child_error(answer: bytes, order: StageRequest) -> Exception:
    """Return the error that a child has met."""
    name, text = msgspec.json.decode(answer, type=tuple[str, str])
    return TYPES[name](text) if name in TYPES else RunError(f"{name}: {text} (in the process of {order})")


def shared_arrays(descriptor: int, inputs: Sequence[Port], outputs: Sequence[Port]) -> tuple[list[Array], list[Array]]:
    """Return the ports' tensors one after the other in a file of memory, which is made as long as that takes.

    The descriptor is closed; the arrays keep the memory. Each begins at a page, as `aligned_empty` makes them.
    """
    ports = [*inputs, *outputs]
    sizes = [int(np.prod(port.shape, dtype=np.int64)) * dtype_of(port.dtype).itemsize for port in ports]
    starts = np.cumsum([0, *(size + -size % PAGE for size in sizes)]).tolist()
    os.ftruncate(descriptor, starts[-1])
    block = mmap.mmap(descriptor, starts[-1])
    os.close(descriptor)
    arrays: list[npt.NDArray[np.generic]] = [
        np.ndarray(port.shape, port.dtype, block, start) for port, start in zip(ports, starts, strict=False)
    ]
    return arrays[: len(inputs)], arrays[len(inputs) :]


# The child


def serve(request: bytes, channel: socket.socket) -> None:
    """Make the stage that is ordered, then do what each message says until no more can come."""
    faulthandler.enable(all_threads=False)  # the other threads go on: to read their frames may crash, too
    order = msgspec.json.decode(request, type=StageRequest)
    for task in os.listdir("/proc/self/task") if order.device.cores else ():
        os.sched_setaffinity(int(task), order.device.cores)  # the threads that these start stay there, too
    with ExitStack() as opened:

        def make() -> StageRunner:
            compiled = _load(order, opened)
            runner = opened.enter_context(closing(compiled.stage(order.operators, order.device)))
            compiled.forget_source()  # no other stage is made here
            return runner

        _serve(make, channel)


def serve_device(_: bytes, channel: socket.socket) -> None:
    """Serve each order that comes with a channel of its own, in a thread, until no more can come.

    The stage that ended last stays until another one ends, so that the device stays open. After a failure the process
    ends with its last stage, and the next process opens the device anew.
    """
    faulthandler.enable(all_threads=False)
    models: dict[tuple[tuple[str, ...], str], CompiledModel] = {}
    kept = ExitStack()  # the stage that ended last
    lock, running, failed = threading.Lock(), 0, False

    def sit(order: StageRequest, link: socket.socket) -> None:
        nonlocal kept, running, failed
        stage = ExitStack()

        def make() -> StageRunner:
            model = order.backends, order.folder
            with lock:
                if model not in models:
                    models[model] = _load(order, opened)
            return stage.enter_context(closing(models[model].stage(order.operators, order.device)))

        with link:
            try:
                went_well = _serve(make, link)
            except OSError:  # the parent has hung up in the middle of a frame
                went_well = True
            with lock:
                stage, kept = kept, stage
                running, failed = running - 1, failed or not went_well
                if failed and not running:
                    channel.shutdown(socket.SHUT_RDWR)
            stage.close()

    with ExitStack() as opened, ThreadPoolExecutor(MOST_STAGES) as pool:
        while True:
            told, descriptors = receive(channel)
            if not descriptors:
                break
            with lock:
                running += 1
            pool.submit(sit, msgspec.json.decode(told, type=StageRequest), socket.socket(fileno=descriptors[0]))
        pool.shutdown()
        kept.close()


def _load(order: StageRequest, opened: ExitStack) -> CompiledModel:
    backend = opened.enter_context(closing(compose(order.backends)))
    return opened.enter_context(closing(backend.load(Path(order.folder), [order.device])))


def _serve(make: Callable[[], StageRunner], channel: socket.socket) -> bool:
    """Make a stage, and do what each message says until no more can come; return whether nothing failed."""
    try:
        runner = make()
        _return_freed_memory()
        memory = os.memfd_create("tvm-pipeline")
        kept = os.dup(memory)
        inputs, outputs = shared_arrays(memory, runner.inputs, runner.outputs)
        send(channel, msgspec.json.encode((runner.inputs, runner.outputs)), kept)
        os.close(kept)
    except Exception as error:  # whatever it is, the parent must hear of it
        channel.send(_encoded_error(error))
        return False
    went_well = True
    while what := channel.recv(16):
        try:
            if what == b"bind":
                runner.bind()
            else:
                runner.run(inputs, outputs)
            channel.send(DONE)
        except Exception as error:
            went_well = False
            channel.send(_encoded_error(error))
    return went_well


def _return_freed_memory() -> None:
    """Give the system back what loading took and freed again; of C libraries, glibc keeps that."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _encoded_error(error: Exception) -> bytes:
    return msgspec.json.encode((type(error).__name__, str(error)[:MOST_TEXT]))
