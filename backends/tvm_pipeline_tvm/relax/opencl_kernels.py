"""Compile scheduled functions for OpenCL devices on any machine, and build their programs where the device is.

TVM writes OpenCL C, each kernel by itself, so that a driver which refuses one compiles the others. What its code of the
host would do is read from the lowered functions and kept as data: which kernels a function launches, on which of its
arguments, by how many threads. `devices/opencl_device.py` runs that, and TVM's runtime has no part in it.

`kernels.opencl` in the folder of a library is JSON. Compiled programs are kept beside it (`devices/programs.py`).
"""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.build import split_host_device_mods

from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.compiled_model import RefusedKernelError
from tvm_pipeline_tvm.devices import programs
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.target_text import tvm_target
from tvm_pipeline_tvm.tir_numbers import name_of

if TYPE_CHECKING:
    import pyopencl as cl

    from tvm_pipeline_tvm.devices.opencl_device import OpenCLDevice

_log = logging.getLogger(__name__)

FILE = "kernels.opencl"
_AXES = "xyz"
# OpenCL has no arguments of `bool`, and the bytes of TVM's are 0 and 1.
_NO_ARGUMENT, _AS_BYTES = "__global bool*", "__global uchar*"


class Launch(msgspec.Struct, frozen=True):
    """One launch of a kernel.

    Attributes:
        arguments: positions among the arguments of the function; behind the last come its scratch arrays.
        blocks: work-groups in x, y and z.
        threads: of a work-group.
    """

    kernel: str
    arguments: tuple[int, ...]
    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]


class Launches(msgspec.Struct, frozen=True):
    """What a function does: its launches in their order.

    Attributes:
        scratch_bytes: of arrays that it needs meanwhile.
    """

    scratch_bytes: tuple[int, ...]
    launches: tuple[Launch, ...]


class _File(msgspec.Struct, frozen=True):
    """What is in the file.

    Attributes:
        functions: by the name of the function.
        sources: OpenCL C by the name of the kernel.
    """

    functions: dict[str, Launches]
    sources: dict[str, str]


def opencl_target(text: str, host: tvm.target.Target) -> tvm.target.Target:
    """Return TVM's target of an OpenCL device: all that counts is how many threads a work-group may have.

    Args:
        text: such as `opencl -device=mali -max_num_threads=128`; the device would choose schedules of Relay's.
    """
    threads = int(tvm_target(text).attrs["max_num_threads"])
    limits = {"max_num_threads": threads, "max_threads_per_block": threads, "max_shared_memory_per_block": 32 * 1024}
    # With wider warps TVM leaves out barriers that devices without such warps need.
    return tvm.target.Target({"kind": "opencl", "thread_warp_size": 1, **limits}, host=host)


def write_opencl_kernels(functions: tvm.IRModule, target: tvm.target.Target, folder: Path) -> None:
    """Compile scheduled functions and write them into an existing folder.

    Args:
        functions: functions of TIR, each with its `global_symbol`.
        target: of `opencl_target`.

    Raises:
        ModelError: a function does on the host what is no launch of a kernel.
    """
    found: dict[str, Launches] = {}
    with tvm.transform.PassContext(instruments=[_NoteLaunches(found)]):
        pipeline, _, finalize = tirx.get_default_tir_pipeline(target)
        lowered = pipeline(tirx.transform.BindTarget(target)(functions))
        _, on_device = split_host_device_mods(lowered)
        kernels = {symbol: kernel for mod in on_device.values() for symbol, kernel in finalize()(mod).functions.items()}
    if not kernels:
        raise ModelError("the model has no kernel for a GPU: nothing in it is computed; leave the GPU out")
    write = tvm_ffi.get_global_func("target.build.opencl")
    sources = {
        str(symbol.name_hint): str(write(tvm.IRModule({symbol: kernel}), target).inspect_source())
        for symbol, kernel in kernels.items()
    }
    clean = {name: source.replace(_NO_ARGUMENT, _AS_BYTES) for name, source in sources.items()}
    (folder / FILE).write_bytes(msgspec.json.encode(_File(found, clean)))


@tvm.instrument.pass_instrument
class _NoteLaunches:
    """Notes what functions launch, when TVM has taken their kernels out and before it makes code of the host.

    Args:
        found: is filled, by the name of the function.
    """

    def __init__(self, found: dict[str, Launches]) -> None:
        self._found = found

    def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        if info.name == "tirx.MakePackedAPI":
            kernel = int(tvm.ir.CallingConv.DEVICE_KERNEL_LAUNCH)
            for symbol, function in mod.functions.items():
                if int(function.attrs.get("calling_conv", 0)) != kernel:
                    self._found[str(symbol.name_hint)] = launches_of(function)


def launches_of(function: tirx.PrimFunc) -> Launches:
    """Return what a function launches whose kernels were taken out (`SplitHostDevice`).

    Raises:
        ModelError: it does something else than to launch kernels on its arguments and on arrays of its own.
    """
    place = {param: index for index, param in enumerate(function.params)}  # of what stands for an array
    scratch: list[int] = []
    launches: list[Launch] = []
    for statement in _statements(function.body):
        kind = type(statement).__name__
        if kind == "DeclBuffer":
            place[statement.buffer] = place[_shown(statement.data)]
        elif kind == "AllocBuffer":
            place[statement.buffer] = len(function.params) + len(scratch)
            scratch.append(tensor_bytes(statement.buffer.shape, str(statement.buffer.dtype)))
        elif kind == "Evaluate" and name_of(statement.value) == "call_ffi_kernel":
            launches.append(_launch(statement.value, place))
        else:
            raise ModelError(f"it does on the host what is no launch of a kernel ({kind}); leave the GPU out")
    return Launches(tuple(scratch), tuple(launches))


def _statements(node: Any) -> list[Any]:
    """Return the statements of a body, one after the other."""
    if type(node).__name__ != "SeqStmt":
        return [node]
    return [each for statement in node.seq for each in _statements(statement)]


def _shown(data: Any) -> Any:
    """Return the array whose memory `data` is."""
    return data.args[0] if name_of(data) == "buffer_data" else data


def _launch(call: Any, place: dict[Any, int]) -> Launch:
    tags = [str(tag) for tag in call.attrs.launch_params]
    kernel, *arguments = call.args
    arrays, extents = arguments[: len(arguments) - len(tags)], arguments[len(arguments) - len(tags) :]
    sizes = {"blockIdx": [1, 1, 1], "threadIdx": [1, 1, 1]}
    for tag, extent in zip(tags, extents, strict=True):
        level, _, axis = tag.partition(".")
        if level not in sizes or axis not in _AXES or not isinstance(extent, tirx.IntImm):
            raise ModelError(f"its kernel {kernel.value} is launched by {tag} = {extent}; leave the GPU out")
        sizes[level][_AXES.index(axis)] = int(extent)
    return Launch(
        str(kernel.value),
        tuple(place[_shown(array)] for array in arrays),
        tuple(sizes["blockIdx"]),  # type: ignore[arg-type]
        tuple(sizes["threadIdx"]),  # type: ignore[arg-type]
    )


class OpenCLFunctions:
    """The functions of a library as what they launch, and their programs on devices."""

    def __init__(self, folder: Path) -> None:
        """Read what `write_opencl_kernels` wrote; raise OSError or msgspec.DecodeError where it is damaged."""
        saved = msgspec.json.decode((folder / FILE).read_bytes(), type=_File)
        self._folder, self._functions, self._sources = folder, saved.functions, saved.sources
        self._lock = threading.Lock()
        self._programs: dict[int, Programs] = {}

    def __getitem__(self, name: str) -> Launches:
        return self._functions[name]

    def programs(self, device: OpenCLDevice) -> Programs:
        """Return the programs on a device, the same for all slices."""
        with self._lock:
            if device.index not in self._programs:
                self._programs[device.index] = Programs(self._sources, device, self._folder)
            return self._programs[device.index]


class Programs:
    """The programs of a library on one device, each compiled when its kernel is first asked for, or kept from before.

    Args:
        sources: by the name of the kernel.
        folder: of the library.

    Attributes:
        were_kept: whether there are some of before.
    """

    def __init__(self, sources: dict[str, str], device: OpenCLDevice, folder: Path) -> None:
        self._sources, self._device, self._folder = sources, device, folder
        self._lock = threading.Lock()
        self._built: dict[str, cl.Program] = {}
        found = programs.kept(folder, device)
        self._kept: dict[str, bytes] = msgspec.msgpack.decode(found, type=dict[str, bytes]) if found else {}
        self.were_kept = bool(self._kept)

    def kernel(self, name: str) -> cl.Kernel:
        """Return a kernel, whose arguments are the caller's alone.

        Raises:
            RefusedKernelError: the driver does not compile it.
        """
        import pyopencl as cl

        with self._lock:
            program = self._built.get(name) or self._from_kept(name) or self._compiled(name)
            self._built[name] = program
        return cl.Kernel(program, name)

    def keep(self) -> bool:
        """Keep what is compiled now for processes to come; return whether it could be kept."""
        with self._lock:
            binaries = {name: program.binaries[0] for name, program in self._built.items()}
        return programs.keep(msgspec.msgpack.encode(binaries), self._folder, self._device)

    def _from_kept(self, name: str) -> cl.Program | None:
        import pyopencl as cl

        binary = self._kept.pop(name, None)
        if binary is None:
            return None
        try:
            context = self._device.context
            return cl.Program(context, context.devices, [binary]).build()
        except cl.Error as error:
            _log.warning(
                "OpenCL's driver refuses the compiled programs that were kept in %s (%s); they are removed, and the "
                "kernels are compiled again",
                self._folder,
                error,
            )
            programs.forget(self._folder, self._device)
            self._kept.clear()
            return None

    def _compiled(self, name: str) -> cl.Program:
        import pyopencl as cl

        try:
            return cl.Program(self._device.context, self._sources[name]).build()
        except cl.Error as error:
            why = why_refused(str(error))
            raise RefusedKernelError(
                f"the OpenCL driver of {self._device.device_name} does not compile the kernel {name}: {why}; leave "
                "this device out of the platform, or update its driver",
                f"its driver does not compile the kernel {name}: {why}",
            ) from error


def why_refused(message: str) -> str:
    """Return the first error of the driver's log in a message of pyopencl, or else its first line.

    >>> why_refused("clBuildProgram failed: BUILD_PROGRAM_FAILURE\\n\\nerror: a.cl:1:9: unknown type name 'half4'")
    "unknown type name 'half4'"
    """
    told = re.search(r"error: *(?:\S+:\d+:\d+: *)?(.+)", message, re.IGNORECASE)
    return (told[1] if told else message.partition("\n")[0]).strip()[:200]
