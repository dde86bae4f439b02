"""Free memory of a device in a thread of its own.

A driver that hangs keeps every thread that frees memory on its device, and Python frees garbage in whatever thread
happens to collect it: a stage on the CPU would hang with the GPU. So what holds memory of a device is handed to that
device's own thread when nobody needs it any more. A device that hangs then keeps this thread alone.

After a failed kernel CUDA refuses every call until the process ends: the device is lost. TVM 0.27 raises what CUDA says
out of destructors, which ends the process with the memory that is freed next, so that a run could not go on without the
device. So that memory is never freed, not even when the process ends. The CUDA runtime that `addons.py` builds for TVM
0.19 has no such fault.

TVM calls Python back for what it frees. Python ends such a thread at the end of the process, and C++ takes that for an
exception in a destructor and aborts. So these threads end before.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from queue import SimpleQueue
from typing import Any

import tvm

from tvm_pipeline_tvm.devices.cuda_toolkit import loaded_runtime
from tvm_pipeline_tvm.devices.targets import DEVICE_TYPES
from tvm_pipeline_tvm.devices.tvm_arrays import HAS_ND, numbers_of

END_S = 3.0  # for what was let go before the end of the process; a device that hangs does not delay it for longer

_queues: dict[tuple[int, int], SimpleQueue[Any]] = {}
_threads: list[threading.Thread] = []
_lock = threading.Lock()
_live: dict[int, tuple[tuple[int, int], object]] = {}  # what has an owner, with its device

_refer_to = ctypes.pythonapi.Py_IncRef
_refer_to.argtypes = (ctypes.py_object,)
_refer_to.restype = None


def release_with(owner: object, device: tvm.runtime.Device, held: object) -> None:
    """Let go of what holds memory of a device some time after its owner is gone.

    Args:
        held: a container of it, which may change. It must not lead to the owner, and is not garbage before the owner:
            of objects in a cycle of garbage, Python would call TVM's `__del__` at once.
    """
    _live[id(held)] = numbers_of(device), held
    weakref.finalize(owner, _queue_of(device).put, held).atexit = False


def keep_where_lost(device: tvm.runtime.Device) -> None:
    """Have nothing that holds memory of a device be destroyed if the device is lost, not even with the process."""
    key = numbers_of(device)
    if is_lost(*key):
        for where, held in list(_live.values()):
            if where == key:
                _keep_for_ever(held)


def wait_until_released(device: tvm.runtime.Device, timeout_s: float = 10.0) -> bool:
    """Wait until all that lost its owner is freed, and what it alone held; return whether it is."""
    queue, is_free = _queue_of(device), False
    while not is_free:
        is_free, all_before = queue.empty(), threading.Event()
        queue.put(all_before)
        if not all_before.wait(timeout_s):
            return False
        is_free = is_free and queue.empty()
    return True


def _queue_of(device: tvm.runtime.Device) -> SimpleQueue[Any]:
    """Return what the device's thread takes from, whose `put` never waits; the thread is started at first."""
    key = numbers_of(device)
    with _lock:
        if key not in _queues:
            _queues[key] = SimpleQueue()
            name = f"release memory of device {key}"
            thread = threading.Thread(target=_release_all, args=(_queues[key], key), name=name, daemon=True)
            thread.start()
            _threads.append(thread)
        return _queues[key]


def _release_all(queue: SimpleQueue[Any], key: tuple[int, int]) -> None:
    while (held := queue.get()) is not None:
        if isinstance(held, threading.Event):
            held.set()
        else:
            if is_lost(*key):
                _keep_for_ever(held)
            _live.pop(id(held), None)
        del held


def is_lost(kind: int, index: int) -> bool:
    """Return whether memory of a device can no longer be freed; it waits until the device has done its work.

    Args:
        kind, index: of the device, as DLPack numbers them.
    """
    runtime = None if HAS_ND or kind != DEVICE_TYPES["cuda"] else loaded_runtime()
    if runtime is None:
        return False
    refused = runtime.cudaSetDevice(index) or runtime.cudaDeviceSynchronize()
    runtime.cudaGetLastError()  # else TVM's next check would find an error of another call
    return bool(refused)


def _keep_for_ever(held: object) -> None:
    """Have an object never be destroyed."""
    _refer_to(held)


@atexit.register
def _end() -> None:
    until_s = time.monotonic() + END_S
    for queue in _queues.values():
        queue.put(None)
    for thread in _threads:
        thread.join(max(0.0, until_s - time.monotonic()))
