"""The software CUDA device itself, driven through CUDA's driver API with CUDA source and without TVM."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.software_cuda import SoftwareCuda, environment

# Written as TVM writes kernels. `add` needs no fibers; the others do.
SOURCE = r"""
extern "C" __global__ void __launch_bounds__(64) add(float* __restrict__ c, float* __restrict__ a, float* b, int n);
extern "C" __global__ void __launch_bounds__(64) add(float* __restrict__ c, float* __restrict__ a, float* b, int n) {
  int i = (((int)blockIdx.x) * 64) + ((int)threadIdx.x);
  if (i < n) {
    c[i] = (a[i] + b[i]);
  }
}

extern "C" __global__ void sum_of_block(float* sums, float* values) {
  __shared__ float shared[96];
  int thread = (((int)threadIdx.y) * 32) + ((int)threadIdx.x);
  shared[thread] = values[(((int)blockIdx.x) * 96) + thread];
  __syncthreads();
  for (int width = 48; width > 2; width = width / 2) {
    if (thread < width) {
      shared[thread] = (shared[thread] + shared[(thread + width)]);
    }
    __syncthreads();
  }
  if (thread == 0) {
    sums[((int)blockIdx.x)] = ((shared[0] + shared[1]) + shared[2]);
  }
}

extern "C" __global__ void sum_of_warp(float* sums, float* values) {
  float sum[1];
  float other[1];
  unsigned int mask[1];
  sum[0] = values[((int)threadIdx.x)];
  mask[0] = __activemask();
  for (int by = 16; by > 0; by = by / 2) {
    other[0] = __shfl_down_sync(mask[0], sum[0], by, 32);
    sum[0] = (sum[0] + other[0]);
  }
  sum[0] = __shfl_sync(mask[0], sum[0], 0, 32);
  sums[((int)threadIdx.x)] = sum[0];
}

extern "C" __global__ void write_at(float* a, int i) {
  a[i] = 1.000000e+00f;
}
"""

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, NO_CONTEXT = 1, 2, 3, 100, 201
NO_BINARY, INVALID_PTX, ILLEGAL_ADDRESS, LAUNCH_FAILED = 209, 218, 700, 719


class CudaError(Exception):
    """A call of CUDA's failed; `args` holds the number of the error."""


class Driver:
    """CUDA's driver API, found by its name as a program finds it; the device is this thread's."""

    def __init__(self, device: int = 0) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()

    def enter(self) -> None:
        """Make the device that of the thread that calls this."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._library, name)(*arguments):
            raise CudaError(error)

    def allocate(self, n_bytes: int) -> ctypes.c_uint64:
        at = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(n_bytes))
        return at

    def free(self, at: ctypes.c_uint64) -> None:
        self.call("cuMemFree_v2", at)

    def upload(self, array: np.ndarray) -> ctypes.c_uint64:
        at = self.allocate(array.nbytes)
        self.call("cuMemcpyHtoD_v2", at, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return at

    def download(self, at: ctypes.c_uint64, count: int) -> np.ndarray:
        array = np.empty(count, "float32")
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), at, ctypes.c_size_t(array.nbytes))
        return array

    def load(self, image: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        return module

    def launch(
        self, module: ctypes.c_void_p, kernel: str, grid: int, block: tuple[int, int], *arguments: ctypes._SimpleCData
    ) -> None:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self.call("cuLaunchKernel", function, grid, 1, 1, *block, 1, 0, None, pointers, None)


@pytest.fixture
def driver(software_cuda: SoftwareCuda) -> Driver:
    return Driver()


@pytest.fixture
def module(driver: Driver) -> ctypes.c_void_p:
    return driver.load(SOURCE.encode())


def values(count: int) -> np.ndarray:
    """Return whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(count).integers(-9, 9, count).astype("float32")


def test_kernels_compute(driver: Driver, module: ctypes.c_void_p) -> None:
    """An addition, a sum of blocks of two dimensions through shared memory, and sums of warps by shuffles."""
    a, b = values(1000), values(1001)[:1000]
    c = driver.allocate(a.nbytes)
    driver.launch(module, "add", 16, (64, 1), c, driver.upload(a), driver.upload(b), ctypes.c_int(1000))
    np.testing.assert_array_equal(driver.download(c, 1000), a + b)

    blocks = values(480)
    sums = driver.allocate(20)
    driver.launch(module, "sum_of_block", 5, (32, 3), sums, driver.upload(blocks))
    np.testing.assert_array_equal(driver.download(sums, 5), blocks.reshape(5, 96).sum(axis=1))

    warps = values(128)
    sums = driver.allocate(512)
    driver.launch(module, "sum_of_warp", 1, (128, 1), sums, driver.upload(warps))
    np.testing.assert_array_equal(driver.download(sums, 128), warps.reshape(4, 32).sum(axis=1).repeat(32))


def test_threads_of_the_host_share_the_device(driver: Driver, module: ctypes.c_void_p) -> None:
    """Two threads that launch at the same time get what is theirs; one without a context gets an error."""

    def sums_are_right(seed: int) -> bool:
        driver.enter()
        blocks = values(960 + seed)[:960]
        sums, at = driver.allocate(40), driver.upload(blocks)
        for _ in range(50):
            driver.launch(module, "sum_of_block", 10, (32, 3), sums, at)
            if not np.array_equal(driver.download(sums, 10), blocks.reshape(10, 96).sum(axis=1)):
                return False
        return True

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(sums_are_right, range(2))) == [True, True]
    with ThreadPoolExecutor(1) as threads, pytest.raises(CudaError) as error:
        threads.submit(driver.allocate, 4).result()
    assert error.value.args == (NO_CONTEXT,)


@pytest.mark.usefixtures("nothing_to_free")
def test_memory_is_counted_and_limited(driver: Driver, software_cuda: SoftwareCuda, monkeypatch) -> None:
    """Memory ends where its size says; what nobody wrote is not a number."""
    before = software_cuda.allocated()
    monkeypatch.setenv("SOFTWARE_CUDA_MEMORY_BYTES", str(before + 1000))
    at = driver.allocate(600)
    assert software_cuda.allocated() == before + 600
    assert np.isnan(driver.download(at, 150)).all()
    with pytest.raises(CudaError) as error:
        driver.allocate(600)
    assert error.value.args == (OUT_OF_MEMORY,)
    driver.free(at)
    software_cuda.fail_allocation(2)
    driver.free(driver.allocate(600))
    with pytest.raises(CudaError) as error:
        driver.allocate(600)
    assert error.value.args == (OUT_OF_MEMORY,)
    driver.free(driver.allocate(600))
    assert software_cuda.allocated() == before


def test_copies_and_launches_are_counted(driver: Driver, module: ctypes.c_void_p, software_cuda: SoftwareCuda) -> None:
    """Tests can say how much went to the device and back, and how often a kernel ran."""
    before = software_cuda.copies("to device"), software_cuda.copies("to host"), software_cuda.launches("write_at")
    at = driver.upload(values(10))
    for i in range(3):
        driver.launch(module, "write_at", 1, (1, 1), at, ctypes.c_int(i))
    driver.download(at, 5)
    after = software_cuda.copies("to device"), software_cuda.copies("to host"), software_cuda.launches("write_at")
    assert np.subtract(after[0], before[0]).tolist() == [1, 40]
    assert np.subtract(after[1], before[1]).tolist() == [1, 20]
    assert after[2] - before[2] == 3


def test_misuse_of_memory_is_refused(driver: Driver, module: ctypes.c_void_p, software_cuda, capfd) -> None:
    """A second free, a copy beyond the end, an address of the host and a write behind the end are errors."""
    at = driver.allocate(40)
    with pytest.raises(CudaError) as error:
        driver.download(at, 11)
    assert error.value.args == (INVALID_VALUE,)
    assert "a copy reaches beyond an allocation: 44 bytes" in capfd.readouterr().err
    driver.launch(module, "write_at", 1, (1, 1), at, ctypes.c_int(10))
    with pytest.raises(CudaError) as error:
        driver.free(at)
    assert error.value.args == (ILLEGAL_ADDRESS,)
    software_cuda.reset()
    with pytest.raises(CudaError) as error:
        driver.free(at)
    assert error.value.args == (INVALID_VALUE,)
    of_the_host = np.zeros(10, "float32")
    with pytest.raises(CudaError) as error:
        driver.launch(module, "write_at", 1, (1, 1), ctypes.c_uint64(of_the_host.ctypes.data), ctypes.c_int(0))
    assert error.value.args == (ILLEGAL_ADDRESS,)
    assert not of_the_host.any()


def test_a_failed_kernel_loses_the_device(driver: Driver, module: ctypes.c_void_p, software_cuda) -> None:
    """Whatever reaches the device fails after that, and works again once the device is reset."""
    at = driver.upload(values(4))
    software_cuda.fail_launch(2)
    driver.launch(module, "write_at", 1, (1, 1), at, ctypes.c_int(0))
    for reach in (
        lambda: driver.launch(module, "write_at", 1, (1, 1), at, ctypes.c_int(1)),
        lambda: driver.launch(module, "write_at", 1, (1, 1), at, ctypes.c_int(1)),
        lambda: driver.download(at, 4),
        lambda: driver.free(at),
        lambda: driver.load(SOURCE.encode()),
    ):
        with pytest.raises(CudaError) as error:
            reach()
        assert error.value.args == (LAUNCH_FAILED,)
    software_cuda.reset()
    np.testing.assert_array_equal(driver.download(at, 4), [1, *values(4)[1:]])


def test_a_hanging_kernel_holds_the_device(driver: Driver, module: ctypes.c_void_p, software_cuda) -> None:
    """A launch that hangs, and a copy behind it, end when it is released."""
    at = driver.upload(values(4))
    software_cuda.hang_launch()

    def launch() -> None:
        driver.enter()
        driver.launch(module, "write_at", 1, (1, 1), at, ctypes.c_int(0))

    def download() -> np.ndarray:
        driver.enter()
        return driver.download(at, 4)

    with ThreadPoolExecutor(2) as threads:
        launched = threads.submit(launch)
        while not software_cuda.hangs():
            threading.Event().wait(0.001)
        downloaded = threads.submit(download)
        threading.Event().wait(0.02)
        assert not launched.done()
        assert not downloaded.done()
        software_cuda.release()
        launched.result()
        assert downloaded.result()[0] == 1


@pytest.mark.parametrize(("devices", "n_bytes"), [(1, 8 << 30), (2, 1 << 20)])
def test_devices_are_found(driver: Driver, monkeypatch, devices: int, n_bytes: int) -> None:
    """The driver says how many devices there are, and of each its name, capability and memory."""
    monkeypatch.setenv("SOFTWARE_CUDA_DEVICES", str(devices))
    monkeypatch.setenv("SOFTWARE_CUDA_MEMORY_BYTES", str(n_bytes))
    count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, total = ctypes.create_string_buffer(100), ctypes.c_size_t()
    driver.call("cuDeviceGetCount", ctypes.byref(count))
    assert count.value == devices
    for device in range(devices):
        driver.call("cuDeviceGetName", name, len(name), device)
        driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        driver.call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        driver.call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        assert (name.value, total.value) == (b"software CUDA", n_bytes)
        assert (major.value, minor.value) == (7, 2)


def compiled(source: str, architecture: str, what: str = "PTX") -> tuple[int, str]:
    """Return what nvrtc makes of the source: its result, and the PTX or the cubin, or the log where it fails."""
    nvrtc, program, size = ctypes.CDLL("libnvrtc.so.12"), ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    result = nvrtc.nvrtcCompileProgram(program, 1, options)
    what = "ProgramLog" if result else what
    nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc[f"nvrtcGet{what}"](program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return result, text.value.decode()


def test_nvrtc_compiles_for_an_architecture(driver: Driver) -> None:
    """What nvrtc gives can be loaded, unless it is for a later device; errors are in its log."""
    result, ptx = compiled(SOURCE, "compute_72")
    assert result == 0
    assert driver.load(ptx.encode())
    with pytest.raises(CudaError) as error:
        driver.load(compiled(SOURCE, "compute_87")[1].encode())
    assert error.value.args == (INVALID_PTX,)
    wrong, log = compiled('extern "C" __global__ void wrong(float* a) { a[0] = nothing; }', "compute_72")
    assert wrong
    assert "nothing" in log
    assert compiled(SOURCE, "compute_7")[0]


@pytest.mark.parametrize(("capability", "runs"), [("70", False), ("72", True), ("75", True), ("80", False)])
def test_a_cubin_is_for_its_generation(driver: Driver, monkeypatch, capability: str, runs: bool) -> None:
    """PTX is for all that is newer, and machine code for the same major version alone."""
    (_, ptx), (_, cubin) = compiled(SOURCE, "sm_70"), compiled(SOURCE, "sm_72", "CUBIN")
    assert cubin.startswith("\x7fELF")
    monkeypatch.setenv("SOFTWARE_CUDA_CAPABILITY", capability)
    assert driver.load(ptx.encode())
    if runs:
        assert driver.load(cubin.encode())
        return
    with pytest.raises(CudaError) as error:
        driver.load(cubin.encode())
    assert error.value.args == (NO_BINARY,)


PROGRAM = """
import ctypes
from tests.gpu.test_software_cuda import CudaError, Driver, SOURCE
count = ctypes.c_int()
print(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)), flush=True)
try:
    driver = Driver()
    driver.launch(driver.load(SOURCE.encode()), "write_at", 1, (1, 1), driver.allocate(4), ctypes.c_int(0))
except CudaError as error:
    print(*error.args)
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("setting", "value", "ends", "error"),
    [
        ("SOFTWARE_CUDA_FAULT", "crash_launch:1", -signal.SIGSEGV, []),
        ("SOFTWARE_CUDA_DEVICES", "0", 0, [NO_DEVICE]),
    ],
)
def test_a_process_of_its_own(
    software_cuda_folder: Path, setting: str, value: str, ends: int, error: list[int]
) -> None:
    """A process finds the device by its name; variables say what goes wrong there. Nothing works before cuInit."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment(software_cuda_folder), setting: value},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert process.returncode == ends, process.stderr
    assert process.stdout.split() == [str(number) for number in [NOT_INITIALIZED, *error]]


def test_another_cuda_is_not_joined(software_cuda_folder: Path, tmp_path: Path) -> None:
    """NVIDIA's nvrtc, once it is loaded, would take functions of the software device's for its own, and crash."""
    other = tmp_path / "libnvrtc.so.12"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{other.name}", "-o", other], check=True)
    code = (
        "import ctypes, pathlib, sys; from tests.support.software_cuda import load; ctypes.CDLL(sys.argv[1]); "
        "load(pathlib.Path(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, other, software_cuda_folder],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.stderr.endswith("libnvrtc.so.12 of another CUDA is loaded; use that one in a process of its own\n")
