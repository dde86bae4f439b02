"""Stages in processes of their own, for backends that crash: one that dies or hangs takes no other with it.

    with open_bundle(path) as bundle, isolated(bundle.compiled, bundle.platform, bundle.plan.stages) as compiled:
        with LivePipeline(compiled, problem, bundle.plan, watchdog_s=5.0) as pipeline:
            ...

Each stage is a child process that loads the saved model, makes the stage and runs a frame for each message; tensors go
through memory that both map. That memory has no name (memfd), so nothing is left behind whichever side dies, and in
what way. The child is started anew, never forked, because threads run here. It tells the ports, since to make a stage
may open the device, which the parent must then leave alone.

A child has a time limit for making its stage and for tying it to the device; how long it is at a frame is for the
pipeline's watchdog. A child ends when its stage is closed: by itself, so that its backend may let go of the device, or
killed where it is at a frame that was given up. It also ends when its parent is gone, even in the middle of a kernel.

Next: `worker.py`, whose thread waits here.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.carried import with_carry, without_carry
from tvm_pipeline.backends.contract import Array, CompiledModel, Port, StageRunner
from tvm_pipeline.backends.ports import PAGE
from tvm_pipeline.backends.registry import compose
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.state_loops import carry_of
from tvm_pipeline.errors import BundleError, ModelError, PlanError, PlatformError, RunError, StageError

TICK_S = 0.1  # between two looks at whether a child still runs
GRACE_S = 5.0  # for a child to end once nothing more can come
MAKING_S = 60.0  # for a child to make its stage; also to tie it to the device
MOST_BYTES = 1 << 17  # of a message
MOST_TEXT = 4096  # characters of an error

# The child finds modules where its parent does, as one of `multiprocessing` would. SIGINT and SIGTERM are for the
# parent, which may want to drain.
CHILD = (
    "import sys; sys.path[:] = sys.argv[2:]; import signal; "
    "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]; "
    "from tvm_pipeline.runtime import isolation; isolation.serve()"
)
DONE = b"done"
# Of a child's errors these keep their type; of others the name is passed on.
TYPES = {kind.__name__: kind for kind in (BundleError, ModelError, PlanError, PlatformError)}

Ports = tuple[tuple[Port, ...], tuple[Port, ...]]


@dataclass(frozen=True, slots=True)
class Order:
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


@contextmanager
def isolated(
    compiled: CompiledModel, platform: Platform, stages: Sequence[Stage], making_s: float = MAKING_S
) -> Iterator[CompiledModel]:
    """Yield the model with every stage in a process of its own; pipelines of it must end before the block does.

    Args:
        compiled: the model; it is saved into a temporary folder, for the children to load.
        platform: the devices, settled on this machine.
        stages: those of the first plan, so that they are saved ready to run.
        making_s: seconds that a process has for making its stage, and again for tying it to the device.

    Yields:
        A model whose `stage` starts a process. To read the stage's ports raises what the process could not make.
        Timing operators and saving stay in this process. When the block ends, so does every process.
    """
    with tempfile.TemporaryDirectory(prefix="tvm-pipeline-") as folder:
        compiled.save(Path(folder), stages, platform)
        carry, (own, _) = carry_of(compiled.graph), without_carry(compiled, ())
        backends = tuple(sorted({device.backend for device in platform.devices}))
        model = IsolatedModel(own, backends, folder, making_s)
        try:
            yield with_carry(cast(CompiledModel, model), carry)
        finally:
            model.end()


class IsolatedModel:
    """The model that it was given, but for its stages."""

    def __init__(self, compiled: CompiledModel, backends: tuple[str, ...], folder: str, making_s: float) -> None:
        self._compiled, self._backends, self._folder, self._making_s = compiled, backends, folder, making_s
        self._stages: weakref.WeakSet[IsolatedStage] = weakref.WeakSet()
        self._over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        stage = IsolatedStage(Order(self._backends, self._folder, tuple(operators), device), self._making_s)
        self._stages.add(stage)
        if self._over:  # `end` came meanwhile, and may not have seen it
            stage.close()
        return cast(StageRunner, stage)  # whose ports are properties: nobody sets them

    def end(self) -> None:
        """End the processes of all stages, also of those that another thread still makes."""
        self._over = True
        for stage in list(self._stages):
            stage.close()


class IsolatedStage:
    """A stage in a child: the StageRunner. The child begins to load at once, so several do so at the same time."""

    def __init__(self, order: Order, making_s: float = MAKING_S) -> None:
        self._process = StageProcess(order, making_s)

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Raises what the child met while it made the stage; a StageError where it died of it."""
        return self._process.ports[0]

    @property
    def outputs(self) -> tuple[Port, ...]:
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


class StageProcess:
    """A child, seen by its parent."""

    def __init__(self, order: Order, making_s: float) -> None:
        self._order, self.making_s = order, making_s
        self._until_s = time.monotonic() + making_s  # when the stage must be made
        self._waiting = threading.Lock()  # held by the thread that waits for an answer
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(TICK_S)
        command = [sys.executable, "-c", CHILD, str(theirs.fileno()), *sys.path]
        try:
            # Standard output is the caller's own, for results; the child's goes where errors go.
            # A session of its own: Ctrl-C comes to the parent alone.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True
            )
        except OSError as error:
            self._channel.close()
            raise RunError(f"no process can be started for {order}: {error.strerror}; run without isolation") from error
        finally:
            theirs.close()
        # What calls it first ends the child; a process must not outlive a stage that nobody closed.
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        with suppress(BrokenPipeError):  # how it died is told to who waits for it
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()  # and stays open: the child ends when it is closed

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
            raise _told(answer, self._order)
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
            self._channel.send(what)
        answer, _ = self._receive(None if limit_s is None else time.monotonic() + limit_s, what.decode())
        if answer != DONE:
            raise _told(answer, self._order)

    def close(self) -> None:
        """End the child, by force where a thread still waits for it; that thread closes again when it hears of it."""
        if self._waiting.acquire(blocking=False):
            try:
                if "_loaded" not in vars(self):  # nobody waits for what it makes
                    self._process.kill()
                self._end()
            finally:
                self._waiting.release()
        else:
            self._process.kill()

    def _receive(self, until_s: float | None, what: str) -> tuple[bytes, list[int]]:
        """Return the child's next message, and the descriptors that came with it.

        A child that has not done `what` by the time `until_s` is killed, and RunError is raised.
        """
        with self._waiting:
            answer: bytes = b""
            while True:
                try:
                    answer, descriptors, _, _ = socket.recv_fds(self._channel, MOST_BYTES, 1)
                except TimeoutError:
                    if self._process.poll() is None:
                        if until_s is None or time.monotonic() < until_s:
                            continue
                        self._process.kill()
                        raise RunError(
                            f"the process of {self._order} did not {what} within {self.making_s:g} s, and was ended; "
                            "where this device needs longer, give a longer time as `watchdog`"
                        ) from None
                except ConnectionResetError:
                    pass
                if answer:
                    return answer, descriptors
                raise RunError(f"the process of {self._order} {_death(self._process)}; its standard error may say why")


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    """End a child: by itself, so that its backend may let go of the device, or by force if it does not."""
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin:
        process.stdin.close()


def _death(process: subprocess.Popen[bytes]) -> str:
    """Say how a child that has hung up ended."""
    try:
        code = process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "hung up"
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'no name')})"


def _told(answer: bytes, order: Order) -> Exception:
    """Return the error that a child has met."""
    name, text = msgspec.json.decode(answer, type=tuple[str, str])
    return TYPES[name](text) if name in TYPES else RunError(f"{name}: {text} (in the process of {order})")


def shared_arrays(descriptor: int, inputs: Sequence[Port], outputs: Sequence[Port]) -> tuple[list[Array], list[Array]]:
    """Return the ports' tensors one after the other in a file of memory, which is made as long as that takes.

    The descriptor is closed; the arrays keep the memory. Each begins at a page, as `aligned_empty` makes them.
    """
    ports = [*inputs, *outputs]
    sizes = [int(np.prod(port.shape, dtype=np.int64)) * np.dtype(port.dtype).itemsize for port in ports]
    starts = np.cumsum([0, *(size + -size % PAGE for size in sizes)]).tolist()
    os.ftruncate(descriptor, starts[-1])
    block = mmap.mmap(descriptor, starts[-1])
    os.close(descriptor)
    arrays: list[npt.NDArray[np.generic]] = [
        np.ndarray(port.shape, port.dtype, block, start) for port, start in zip(ports, starts, strict=False)
    ]
    return arrays[: len(inputs)], arrays[len(inputs) :]


# The child


def serve() -> None:
    """Run a child: make the stage that is ordered, then do what each message says until no more can come.

    A parent that has hung up, because it gave the stage up or is gone, wants to hear of nothing.
    """
    faulthandler.enable()
    with suppress(BrokenPipeError, ConnectionResetError):
        _serve()


def _serve() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    if not (line := sys.stdin.buffer.readline()):  # the parent is gone
        return
    order = msgspec.json.decode(line, type=Order)
    _end_with_parent()
    with ExitStack() as opened:
        try:
            backend = opened.enter_context(closing(compose(order.backends)))
            compiled = opened.enter_context(closing(backend.load(Path(order.folder))))
            runner = opened.enter_context(closing(compiled.stage(order.operators, order.device)))
            memory = os.memfd_create("tvm-pipeline")
            kept = os.dup(memory)
            inputs, outputs = shared_arrays(memory, runner.inputs, runner.outputs)
            socket.send_fds(channel, [msgspec.json.encode((runner.inputs, runner.outputs))], [kept])
            os.close(kept)
        except Exception as error:  # whatever it is, the parent must hear of it
            channel.send(_telling(error))
            return
        while what := channel.recv(16):
            try:
                if what == b"bind":
                    runner.bind()
                else:
                    runner.run(inputs, outputs)
                channel.send(DONE)
            except Exception as error:
                channel.send(_telling(error))


def _end_with_parent() -> None:
    """Have the kernel end this process (SIGIO) when the other end of standard input is closed, whatever it is doing."""
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def _telling(error: Exception) -> bytes:
    return msgspec.json.encode((type(error).__name__, str(error)[:MOST_TEXT]))
