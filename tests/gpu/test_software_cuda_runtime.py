"""What the software CUDA device has of CUDA's runtime API: memory of the host that it reads, streams and events."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from tests.gpu.test_software_cuda import SOURCE, CudaError, Driver
from tests.support.software_cuda import SoftwareCuda

INVALID_VALUE, INVALID_HANDLE, ILLEGAL_ADDRESS, LAUNCH_FAILED = 1, 400, 700, 719
ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 712, 713, 801
MAPPED, DISABLE_TIMING = 2, 2
TO_DEVICE, TO_HOST = 1, 2
INTEGRATED, CAN_MAP, ENGINES, UNIFIED, MAJOR, MINOR, CAN_REGISTER = 18, 19, 40, 41, 75, 76, 99


class Runtime:
    """CUDA's runtime API, as a program calls it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcudart.so.12")

    def call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._library, name)(*arguments):
            raise CudaError(error)

    def register(self, array: np.ndarray, flags: int = MAPPED) -> None:
        self.call("cudaHostRegister", pointer(array), ctypes.c_size_t(array.nbytes), flags)

    def unregister(self, array: np.ndarray) -> None:
        self.call("cudaHostUnregister", pointer(array))

    def on_device(self, array: np.ndarray) -> int | None:
        """Return where kernels find the array."""
        at = ctypes.c_void_p()
        self.call("cudaHostGetDevicePointer", ctypes.byref(at), pointer(array), 0)
        return at.value

    def attribute(self, number: int) -> int:
        value = ctypes.c_int(-1)
        self.call("cudaDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def event(self, flags: int = 0) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.call("cudaEventCreateWithFlags", ctypes.byref(event), flags)
        return event

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), 1)
        return stream

    def elapsed_ms(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        milliseconds = ctypes.c_float(-1)
        self.call("cudaEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@contextmanager
def raises(number: int) -> Iterator[None]:
    with pytest.raises(CudaError) as error:
        yield
    assert error.value.args == (number,)


@pytest.fixture
def runtime(software_cuda: SoftwareCuda) -> Runtime:
    runtime = Runtime()
    runtime.call("cudaSetDevice", 0)
    return runtime


@pytest.fixture
def driver(software_cuda: SoftwareCuda) -> Driver:
    return Driver()


def test_kernels_use_registered_memory_and_copy_nothing(
    runtime: Runtime, driver: Driver, software_cuda: SoftwareCuda
) -> None:
    """A kernel reads and writes arrays of the host where they are, from any place within them, while registered."""
    before, copied = software_cuda.registered(), software_cuda.copied()
    array, module = np.zeros(8, "float32"), driver.load(SOURCE.encode())

    def write(at: int | None) -> None:
        driver.launch(module, "write_at", 1, (1, 1), ctypes.c_uint64(at or 0), ctypes.c_int(1))

    runtime.register(array)
    assert np.subtract(software_cuda.registered(), before).tolist() == [1, 32]
    base = runtime.on_device(array)
    assert base
    assert runtime.on_device(array[3:]) == base + 12
    write(base)
    write(runtime.on_device(array[3:]))
    assert array.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]
    runtime.unregister(array)
    assert (software_cuda.registered(), software_cuda.copied()) == (before, copied)
    with raises(INVALID_VALUE):
        runtime.on_device(array)
    with raises(ILLEGAL_ADDRESS):
        write(base)
    assert array.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]


def test_ranges_are_registered_once(runtime: Runtime, driver: Driver, software_cuda: SoftwareCuda) -> None:
    """A range that overlaps another one, one that is none, and one that is not registered are errors."""
    gc.collect()  # else what earlier tests left may be unregistered meanwhile
    before = software_cuda.registered()
    array = np.zeros(100, "uint8")
    runtime.register(array[20:40])
    for first, last in ((20, 40), (0, 21), (39, 60), (25, 30), (0, 100)):
        with raises(ALREADY_REGISTERED):
            runtime.register(array[first:last])
    runtime.register(array[0:20])
    runtime.register(array[40:60], flags=0)
    for wrong in (array[30:31], array[60:]):
        with raises(NOT_REGISTERED):
            runtime.unregister(wrong)
    with raises(INVALID_VALUE):
        runtime.register(array[60:60])
    with raises(INVALID_VALUE):
        runtime.call("cudaHostRegister", None, ctypes.c_size_t(4), MAPPED)
    with raises(INVALID_VALUE):
        runtime.on_device(array[60:])
    assert np.subtract(software_cuda.registered(), before).tolist() == [3, 60]
    # What is not mapped is faster to copy, and no kernel sees it.
    with raises(INVALID_VALUE):
        runtime.on_device(array[40:60])
    with raises(ILLEGAL_ADDRESS):
        at = ctypes.c_uint64(array[40:].ctypes.data)
        driver.launch(driver.load(SOURCE.encode()), "write_at", 1, (1, 1), at, ctypes.c_int(0))
    software_cuda.reset()
    for first in (0, 20, 40):
        runtime.unregister(array[first:])
    assert software_cuda.registered() == before


def test_copies_take_registered_memory(
    runtime: Runtime, driver: Driver, software_cuda: SoftwareCuda, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is the host's memory; a range that is registered in part is refused, as CUDA documents."""
    array, there, stream = np.arange(10, dtype="float32"), driver.allocate(40), runtime.stream()
    before = software_cuda.copied()

    def copy(to: object, source: object, n_bytes: int, kind: int) -> None:
        runtime.call("cudaMemcpyAsync", to, source, ctypes.c_size_t(n_bytes), kind, stream)
        runtime.call("cudaStreamSynchronize", stream)

    device = ctypes.c_void_p(there.value)
    runtime.register(array[:8])
    copy(device, pointer(array), 32, TO_DEVICE)
    array[:8] = 0
    copy(pointer(array), device, 32, TO_HOST)
    assert array.tolist() == list(range(10))
    for first, n_bytes in ((0, 40), (4, 24)):
        with raises(INVALID_VALUE):
            copy(device, pointer(array[first:]), n_bytes, TO_DEVICE)
        with raises(INVALID_VALUE):
            copy(pointer(array[first:]), device, n_bytes, TO_HOST)
    assert capfd.readouterr().err.count("of which only a part is registered") == 4
    assert np.subtract(software_cuda.copied(), before).tolist() == [32, 32]
    runtime.unregister(array)
    copy(device, pointer(array), 40, TO_DEVICE)
    driver.free(there)
    runtime.call("cudaStreamDestroy", stream)


def test_attributes_say_what_the_device_can(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A discrete device, an integrated one, and one that registers nothing."""
    said = {number: runtime.attribute(number) for number in (CAN_MAP, ENGINES, UNIFIED, MAJOR, MINOR)}
    assert said == {CAN_MAP: 1, ENGINES: 2, UNIFIED: 1, MAJOR: 7, MINOR: 2}
    assert (runtime.attribute(INTEGRATED), runtime.attribute(CAN_REGISTER)) == (0, 1)
    monkeypatch.setenv("SOFTWARE_CUDA_INTEGRATED", "1")
    monkeypatch.setenv("SOFTWARE_CUDA_HOST_REGISTER", "0")
    assert (runtime.attribute(INTEGRATED), runtime.attribute(CAN_REGISTER)) == (1, 0)
    with raises(NOT_SUPPORTED):
        runtime.register(np.zeros(4))


def test_events_tell_the_time_between_them(runtime: Runtime, software_cuda: SoftwareCuda) -> None:
    """Milliseconds of the host's clock, on any stream; an event that was not recorded has none."""
    handles, recorded = software_cuda.handles(), software_cuda.recorded()
    begin, end, stream = runtime.event(), runtime.event(), runtime.stream()
    with raises(INVALID_HANDLE):
        runtime.elapsed_ms(begin, end)
    runtime.call("cudaEventRecord", begin, None)
    with raises(INVALID_HANDLE):
        runtime.elapsed_ms(begin, end)
    sum(range(1000))
    runtime.call("cudaEventRecord", end, stream)
    runtime.call("cudaStreamWaitEvent", None, end, 0)
    runtime.call("cudaEventSynchronize", end)
    assert runtime.elapsed_ms(begin, end) == -runtime.elapsed_ms(end, begin) > 0
    assert software_cuda.recorded() == recorded + 2
    without_time = runtime.event(DISABLE_TIMING)
    runtime.call("cudaEventRecord", without_time, None)
    with raises(INVALID_HANDLE):
        runtime.elapsed_ms(begin, without_time)
    assert software_cuda.handles() == handles + 4
    for event in (begin, end, without_time):
        runtime.call("cudaEventDestroy", event)
    runtime.call("cudaStreamDestroy", stream)
    assert software_cuda.handles() == handles
    for name, handle in (
        ("EventRecord", begin), ("EventSynchronize", begin), ("EventDestroy", begin), ("EventDestroy", None),
        ("StreamSynchronize", stream), ("StreamDestroy", stream),
    ):  # fmt: skip
        with raises(INVALID_HANDLE):
            runtime.call(f"cuda{name}", handle, None)


def test_an_event_belongs_to_its_device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of one device is not recorded in a stream of another one."""
    monkeypatch.setenv("SOFTWARE_CUDA_DEVICES", "2")
    event = runtime.event()
    runtime.call("cudaEventRecord", event, None)

    def elsewhere() -> None:  # a thread of its own, whose device is its own matter
        runtime.call("cudaSetDevice", 1)
        with raises(INVALID_HANDLE):
            runtime.call("cudaEventRecord", event, None)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(elsewhere).result()
    runtime.call("cudaEventDestroy", event)


def test_a_lost_device_has_no_events(runtime: Runtime, driver: Driver, software_cuda: SoftwareCuda) -> None:
    """The error of a kernel is that of the events behind it, and of what is registered behind it."""
    event, module = runtime.event(), driver.load(SOURCE.encode())
    software_cuda.fail_launch()
    with raises(LAUNCH_FAILED):
        driver.launch(module, "write_at", 1, (1, 1), driver.allocate(4), ctypes.c_int(0))
    for call in (
        lambda: runtime.call("cudaEventRecord", event, None),
        lambda: runtime.call("cudaEventSynchronize", event),
        lambda: runtime.register(np.zeros(4)),
    ):
        with raises(LAUNCH_FAILED):
            call()
    software_cuda.reset()
    runtime.call("cudaEventDestroy", event)
