"""A Relax module becomes a Library for one target, kept in the user's cache.

A library is what one compilation gives: kernels as a shared object, the list of their calls, the weights, and what each
kernel computes (`kernel_walkers.py`). It is saved as plain files; loading one runs no Relax at all, and the weights are
mapped from the file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_pipeline.backends.contract import StoredWeights
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import FLOAT32, Model
from tvm_pipeline.errors import BundleError, ModelError, PlatformError
from tvm_pipeline.files import SUMS, cache_folder, linked
from tvm_pipeline.signals import check_interrupted
from tvm_pipeline_tvm.devices.nvrtc import arch_of
from tvm_pipeline_tvm.devices.targets import has_own_memory, kind_of
from tvm_pipeline_tvm.float64 import measured_error, next_tolerance
from tvm_pipeline_tvm.kernel_sets import MISSING, OWN, Choices, choices_of, hashable, relax_kernels
from tvm_pipeline_tvm.kernels import Entry, Kernel, tensor_bytes
from tvm_pipeline_tvm.library_cache import tuned_or_made
from tvm_pipeline_tvm.linking import check_linker, export_library
from tvm_pipeline_tvm.machine_code import load_kernels
from tvm_pipeline_tvm.overwriting import overwritable, overwritten
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.cuda_kernels import CudaFunctions, cuda_target, write_cuda_kernels
from tvm_pipeline_tvm.relax.dataflow import Constant
from tvm_pipeline_tvm.relax.distinct_outputs import output_names
from tvm_pipeline_tvm.relax.gpu_schedules import gpu_fused, gpu_kernels
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.integer_layers import integer_layers
from tvm_pipeline_tvm.relax.kernel_walkers import Call, FlatModule, flat_module
from tvm_pipeline_tvm.relax.opencl_kernels import OpenCLFunctions, opencl_target, write_opencl_kernels
from tvm_pipeline_tvm.relax.pad_channels import pad_channels
from tvm_pipeline_tvm.relax.reference import error_of
from tvm_pipeline_tvm.relax.simplify import simplified
from tvm_pipeline_tvm.target_text import tvm_target
from tvm_pipeline_tvm.tvm_errors import reason
from tvm_pipeline_tvm.weights_file import WEIGHTS, Bytes, Weight, mapped, part_of, write_weights

_log = logging.getLogger(__name__)

INDEX = "kernels.json"  # of a library: its _LibraryFile
SLOW_RULES = ("plain", "default", "fallback")
SLOW_MACS = 100_000  # of a call: fewer are done before one would notice
FORMAT = 8  # raise it when a saved library must not be read any more, or when the engine compiles otherwise


BoundCalls = list[tuple[Any, tuple[Any, ...]]]  # functions, as the module of their target has them, and their tensors


class _LibraryFile(msgspec.Struct, frozen=True):
    """What a library's folder says of the rest."""

    target: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    kernels: list[Kernel]
    calls: list[Call]
    is_view: list[bool]
    heads: list[Entry]
    constants: list[Weight]
    rules: dict[str, str]
    sizes: dict[str, int]
    overwriting: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)  # earlier versions did not tell
    error: float | None = None
    workloads: dict[str, Any] = msgspec.field(default_factory=dict)  # as the two before
    choices: tuple[tuple[Any, Any], ...] = ()
    weights: StoredWeights | None = None


@dataclass(slots=True)
class Library:
    """One model compiled for one target.

    Attributes:
        calls: what runs each kernel.
        module: the compiled functions; None where they are for a processor that is not this one.
        constants: the weights; every slice shares these arrays, which are `tensors` to TVM.
        inputs: the model's inputs, in order.
        outputs: the names of the model's outputs, in order.
        heads: the model's outputs as (kernel, output).
        rules: of each function the rule of its schedule.
        overwriting: of each function the positions of the arguments that its result may overwrite.
        error: of the outputs against float64 (`reference.py`), where Winograd's algorithm is used; None where that was
            not measured.
        workloads: of each function that tuning can make faster.
        choices: of tuning, for workloads of this library.
        weights: what storing them in 16 bits saves and costs; None where they are float32.
    """

    target: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    kernels: list[Kernel]
    calls: list[Call]
    views: list[bool]
    heads: list[Entry]
    constants: list[np.ndarray]
    rules: dict[str, str]
    module: Any
    folder: Path
    overwriting: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    error: float | None = None
    workloads: Mapping[str, Any] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)
    weights: StoredWeights | None = None
    tensors: list[Any] = field(init=False)
    _functions: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = [tvm_ffi.from_dlpack(constant) for constant in self.constants]

    def function(self, name: str) -> Any:
        """Return a compiled function."""
        if name not in self._functions:
            self._functions[name] = self.module[name]
        return self._functions[name]

    def bound(self, kernels: Sequence[int], tensors: Mapping[Entry, Any], weight: Callable[[int], Any]) -> BoundCalls:
        """Return the calls of kernels, each with all that it reads and writes.

        Args:
            tensors: of each entry that the kernels read or write.
            weight: gives a constant where the kernels run.
        """
        calls: BoundCalls = []
        for kernel in kernels:
            call = self.calls[kernel]
            given = [weight(each) if isinstance(each, int) else tensors[each] for each in call.arguments]
            made = [tensors[kernel, index] for index in range(len(self.kernels[kernel].outputs))]
            calls.append((self.function(call.function), (*given, *made)))
        return calls

    def winograd(self) -> int:
        """Return how many distinct kernels Winograd's algorithm computes."""
        return sum(map(relax_kernels().is_winograd, self.rules.values()))

    def is_reshape(self, kernel: int) -> bool:
        """Whether the kernel only shows its input under another shape, and nothing runs."""
        return self.views[kernel]

    def overwrites(self, kernel: int) -> tuple[Entry, ...]:
        """Return the entries that the kernel reads and whose bytes its result may take."""
        if self.views[kernel]:
            return ()
        call = self.calls[kernel]
        arguments = [None if isinstance(each, int) else each for each in call.arguments]
        return overwritten(self, arguments, self.overwriting.get(call.function, ()))

    def slow_kernels(self) -> set[int]:
        """Return the kernels whose schedule failed, and those with much work that no fast one serves."""
        rules = [self.rules[call.function] for call in self.calls]
        return {
            index
            for index, (kernel, rule) in enumerate(zip(self.kernels, rules, strict=True))
            if "failed" in rule or (kernel.macs >= SLOW_MACS and rule.startswith(SLOW_RULES))
        }

    def save(self, folder: Path) -> None:
        """Write the library into an existing folder."""
        for file in self.folder.iterdir():
            if file.name != SUMS:  # a bundle has sums of its own
                (linked if file.name == WEIGHTS else shutil.copy2)(file, folder / file.name)


def in_integers(targets: Iterable[str]) -> bool:
    """Return whether quantised layers are computed in integers: on all targets or on none, so that they align."""
    return all(
        not has_own_memory(target) and relax_kernels().computes_integers(tvm_target(target)) for target in targets
    )


def build_library(
    model: Model,
    target: str,
    host: str = "",
    choices: Choices | None = None,
    *,
    elsewhere: bool = False,
    integers: bool | None = None,
) -> Library:
    """Compile `model` for `target`, or take it from the cache.

    Args:
        host: the target of the code that launches the kernels of a GPU.
        choices: of tuning, by workload; without them, those recorded here that the model allows. A GPU has its own
            records, and this target does not say which GPU it is, so that it has none without them.
        elsewhere: the code runs on another machine alone, so it is not loaded here.
        integers: whether quantised layers are computed in integers; where the target is the only one without it.

    Raises:
        ModelError: TVM cannot import or compile it.
        PlatformError: this machine cannot compile for the target.
    """
    integers = in_integers([target]) if integers is None else integers
    described = "|".join((model.digest, target, tvm.__version__, "relax", str(FORMAT)))
    if model.tolerance:  # what runs elsewhere is not measured here
        described += f"|{model.tolerance:g}{' elsewhere' if elsewhere else ''}"
    if has_own_memory(target):
        described += f"|{host}|workloads"  # which libraries of before GPUs were tuned do not tell
    if integers:
        described += "|integers"
    if relax_kernels().key:  # libraries of before there were guests have none
        described += f"|{relax_kernels().key}"
    plain = cache_folder() / "libraries" / hashlib.sha256(described.encode()).hexdigest()[:32]
    if choices is None:
        choices = {} if has_own_memory(target) else relax_kernels().recorded(target, tolerance=model.tolerance)

    def write(folder: Path, own: Choices) -> tuple[Iterable[Any], Choices]:
        saved = compile_module(
            *(model.name, import_model(model), target, folder, host, own),
            tolerance=model.tolerance,
            storage=model.weights,
            elsewhere=elsewhere,
            integers=integers,
        )
        return saved.workloads.values(), dict(saved.choices)

    load = partial(load_library, runs_here=lambda _: not elsewhere)
    what, digest_of = f"{model.name} for {target}", relax_kernels().digest_of
    library = tuned_or_made(plain, what, choices, digest_of, load, write)
    for line in slow_operators(library):
        _log.info(f"{model.name} for {target}: {line}")
    return library


def compile_module(
    name: str,
    mod: tvm.IRModule,
    target: str,
    folder: Path,
    host: str = "",
    choices: Choices | None = None,
    *,
    tolerance: float = 0.0,
    storage: str = "float32",
    elsewhere: bool = False,
    integers: bool = False,
) -> _LibraryFile:
    """Compile an imported module and write the library into `folder`; errors are those of `build_library`.

    Choices are taken as they are: none are read.

    Where kernels of other sums come into it (`Model.tolerance`), the error of its outputs is measured, unless it runs
    elsewhere. If they add more than the tolerance to the error of direct sums, it is compiled again: each layer may
    then have a tenth of the error, and at last none. Where the `storage` of weights has 16 bits (`Model.weights`),
    there are no such kernels, whose weights take more memory, and the error against float64 of the weights that were
    given is measured.
    """
    if kind_of(target) != "opencl":  # whose kernels are kept as source
        check_linker((host or "llvm") if has_own_memory(target) else target)
    _log.info(f"compiling {name} for {target}")
    if relax_kernels().key == OWN:
        _log.info(f"{name} for {target} gets TVM's own kernels, which are slower: {MISSING}")
    inputs = tuple(
        Tensor(str(param.name), tuple(map(int, param.ty.shape)), str(param.ty.dtype)) for param in mod["main"].params
    )
    plain = simplified(mod)
    padded = prepared(plain, integers)
    allowed = tolerance if storage == FLOAT32 else 0.0
    arguments = name, padded, target, host, inputs, output_names(mod), choices or {}, storage

    def error(where: Path) -> float:
        return error_of(load_library(where), prepared(plain, False))

    @cache
    def direct_error() -> float:
        with TemporaryDirectory() as apart:
            _written(Path(apart), 0.0, *arguments)
            return measured_error(name, target, partial(error, Path(apart)))

    while True:
        saved = _written(folder, allowed, *arguments)
        if saved.weights and not elsewhere:
            rounding = _error_of_rounding(name, target, partial(error, folder))
            saved = msgspec.structs.replace(saved, weights=replace(saved.weights, error=rounding))
            (folder / INDEX).write_bytes(msgspec.json.encode(saved))
        if elsewhere or not any(map(relax_kernels().is_winograd, saved.rules.values())):
            return saved
        found, next_allowed = next_tolerance(name, target, partial(error, folder), tolerance, allowed, direct_error)
        saved = msgspec.structs.replace(saved, error=found)
        (folder / INDEX).write_bytes(msgspec.json.encode(saved))
        if next_allowed is None:
            return saved
        allowed = next_allowed
        for file in folder.iterdir():
            file.unlink()


def prepared(plain: tvm.IRModule, integers: bool) -> tvm.IRModule:
    """Return a simplified module as every target compiles it, its quantised layers in integers or in float32."""
    return pad_channels(integer_layers(plain) if integers else plain)


def _error_of_rounding(name: str, target: str, error_of: Callable[[], float]) -> float | None:
    """Return the error of a library whose weights are rounded; None where float64 does not tell."""
    try:
        return measured_error(name, target, error_of)
    except ModelError as refusal:
        _log.warning(f"what rounded weights cost {name} for {target} is not measured: {refusal}")
        return None


def _written(
    folder: Path,
    tolerance: float,
    name: str,
    mod: tvm.IRModule,
    target: str,
    host: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[str, ...],
    choices: Choices,
    storage: str,
) -> _LibraryFile:
    """Compile a simplified module, write all of its library, and return what its index says."""
    rules: dict[str, str] = {}
    workloads: dict[str, Any] = {}
    try:
        if has_own_memory(target):
            flat, overwriting = _write_gpu(mod, target, host or "llvm", folder, rules, workloads, choices)
        else:
            flat, overwriting = _write_cpu(mod, target, folder, rules, workloads, tolerance, choices, storage)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except PlatformError:
        raise
    except Exception as error:  # TVM's passes raise whatever their author had at hand
        check_interrupted()
        raise ModelError(f"{name}: TVM cannot compile it for {target}: {reason(error)}") from error
    arrays = (np.asarray(each.numpy(), order="C") for each in flat.constants)
    constants = write_weights(folder / WEIGHTS, ((each.shape, str(each.dtype), each.data) for each in arrays))
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    saved = _LibraryFile(
        target,
        inputs,
        outputs,
        flat.kernels,
        flat.calls,
        flat.is_view,
        flat.heads,
        constants,
        rules,
        sizes,
        overwriting,
        workloads=workloads,
        choices=tuple((one, choices[one]) for one in sorted(set(workloads.values())) if one in choices),
        weights=None if storage == FLOAT32 else _stored_weights(target, storage, flat.constants, mod),
    )
    (folder / INDEX).write_bytes(msgspec.json.encode(saved))
    return saved


def _stored_weights(target: str, storage: str, constants: Sequence[Any], mod: tvm.IRModule) -> StoredWeights:
    """Return the bytes of a library's constants, and what they would be if weights that were rounded were float32."""
    given: list[Any] = []
    relax.analysis.post_order_visit(
        mod["main"], lambda expr: given.append(expr.value) if isinstance(expr, Constant) else None
    )

    def sizes(arrays: Iterable[Any]) -> list[tuple[int, bool]]:
        described = [(tuple(map(int, each.shape)), str(each.dtype)) for each in arrays]
        return [(tensor_bytes(shape, dtype), dtype.endswith("16")) for shape, dtype in described]

    made = sizes(constants)
    halved = sum(size for size, is_half in made if is_half) - sum(size for size, is_half in sizes(given) if is_half)
    total = sum(size for size, _ in made)
    return StoredWeights(target, storage, total, total + halved)


def _write_cpu(
    mod: tvm.IRModule,
    target: str,
    folder: Path,
    rules: dict[str, str],
    workloads: dict[str, Any],
    tolerance: float,
    choices: Choices,
    storage: str,
) -> tuple[FlatModule, dict[str, tuple[int, ...]]]:
    """Compile for CPU cores; return the kernels, and of each function what its result may overwrite."""
    compiler = tvm_target(target)
    fused = kernel_passes.fused(mod, compiler, apart=True, tolerance=tolerance, choices=choices, storage=storage)
    flat = flat_module(fused)
    functions = functions_of(kernel_passes.kernels(fused, compiler, rules, workloads))
    return flat, _write_in_parts(functions, compiler, folder / "kernels.so", target)


def _write_in_parts(
    functions: tvm.IRModule, compiler: tvm.target.Target, path: Path, target: str
) -> dict[str, tuple[int, ...]]:
    """Compile scheduled functions on all cores into a library; return of each what its result may overwrite.

    LLVM compiles a module on one core. No function calls another, so each may be in any module.
    """
    cores, every = len(os.sched_getaffinity(0)), [*functions.functions.items()]
    count = min(2 * cores, len(every))  # two for each core, since some take longer than others

    def write(index: int, compiled: Path) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        part = tvm.IRModule(dict(every[index::count]))
        with tvm.transform.PassContext(instruments=[NoteOverwriting(found)]):
            executable = tvm.compile(part, target=compiler, tir_pipeline=relax_kernels().tir_pipeline)
        executable.mod.write_to_file(str(compiled), "o")
        return found

    with TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        objects = [Path(folder) / f"part{index}.o" for index in range(count)]
        overwriting = [*pool.map(write, range(count), objects)]
        nothing = tvm.compile(tvm.IRModule({}), target=compiler)
        export_library(nothing, path, target, objects)
    return {name: positions for found in overwriting for name, positions in found.items()}


def _write_gpu(
    mod: tvm.IRModule,
    target: str,
    host: str,
    folder: Path,
    rules: dict[str, str],
    workloads: dict[str, Any],
    choices: Choices,
) -> tuple[FlatModule, dict[str, tuple[int, ...]]]:
    """Compile for a GPU, on which no kernel is proven to overwrite what it reads."""
    compiler = gpu_compiler(target, host)
    fused = gpu_fused(mod, compiler)
    flat = flat_module(fused)
    functions = functions_of(gpu_kernels(fused, compiler, rules, choices, workloads))
    write_gpu_kernels(functions, compiler, folder, host)
    return flat, {}


def gpu_compiler(target: str, host: str) -> tvm.target.Target:
    """Return TVM's target of a GPU whose kernels are launched by code for `host`."""
    if kind_of(target) == "cuda":
        return cuda_target(arch_of(target), tvm_target(host))
    return opencl_target(target, tvm_target(host))


def write_gpu_kernels(functions: tvm.IRModule, compiler: tvm.target.Target, folder: Path, host: str) -> None:
    """Compile scheduled functions for a target of `gpu_compiler`, and write them into an existing folder."""
    if compiler.kind.name == "cuda":
        write_cuda_kernels(functions, compiler, folder, host)
    else:
        write_opencl_kernels(functions, compiler, folder)


def slow_operators(library: Library) -> list[str]:
    """Return a line for each kernel whose schedule failed, and for each kind of operator with much work and none."""
    lines = [
        f"the schedule of {function} failed, and it runs by a slower one: {rule}"
        for function, rule in library.rules.items()
        if "failed" in rule
    ]
    slow: dict[str, list[int]] = {}
    for index in sorted(library.slow_kernels()):
        kernel, call = library.kernels[index], library.calls[index]
        if "failed" in library.rules[call.function]:
            continue
        kind = next((kind for kind, _ in kernel.operators if kind in call.function), kernel.operators[0][0])
        slow.setdefault(kind, []).append(kernel.macs)
    return lines + [
        f"{len(macs)} of the operator {kind} run by plain loops ({sum(macs) / 1e6:.1f} million multiply-adds): no fast "
        "schedule serves them"
        for kind, macs in slow.items()
    ]


def functions_of(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the functions of TIR of a module, each under its name."""
    return tvm.IRModule(
        {
            symbol: function.with_attr("global_symbol", symbol.name_hint)
            for symbol, function in mod.functions.items()
            if isinstance(function, tirx.PrimFunc)
        }
    )


def load_library(folder: Path, runs_here: Callable[[str], bool] = lambda _: True) -> Library:
    """Read what `build_library` wrote.

    Args:
        runs_here: whether code for a target runs on this machine; else it is left where it is.

    Raises:
        BundleError: it is damaged.
    """
    try:
        saved = msgspec.json.decode((folder / INDEX).read_bytes(), type=_LibraryFile)
        for name, size in saved.sizes.items():  # to run code that was cut short would end the process
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{name} is not as long as it was")
        raw = mapped(folder / WEIGHTS)
        constants = [_constant(raw, described) for described in saved.constants]
        module = _functions_of(folder, saved.target) if runs_here(saved.target) else None
    except (OSError, ValueError, TypeError, msgspec.DecodeError, RuntimeError) as error:
        raise BundleError(f"{folder}: damaged compiled model ({reason(error)}); compile it again") from error
    return Library(
        saved.target,
        saved.inputs,
        saved.outputs,
        saved.kernels,
        saved.calls,
        saved.is_view,
        saved.heads,
        constants,
        saved.rules,
        module,
        folder,
        saved.overwriting,
        saved.error,
        {name: hashable(workload) for name, workload in saved.workloads.items()},
        choices_of(saved.choices),
        saved.weights,
    )


def _functions_of(folder: Path, target: str) -> Any:
    if not has_own_memory(target):
        return load_kernels(folder / "kernels.so", alone=False)
    return CudaFunctions(folder) if kind_of(target) == "cuda" else OpenCLFunctions(folder)


def _constant(raw: Bytes, described: Weight) -> np.ndarray:
    return part_of(raw, described).view(np.dtype(described.dtype)).reshape(described.shape)


@tvm.instrument.pass_instrument
class NoteOverwriting:
    """Notes which arguments each kernel may overwrite while TVM compiles it; `overwriting.py` has the proof.

    It sees functions as they are lowered, which TVM hands to nobody: the last time that they have buffers.

        with tvm.transform.PassContext(instruments=[NoteOverwriting(found)]):
            tvm.compile(functions, target=target, tir_pipeline=lowering.PIPELINE)

    Args:
        found: is filled: of each function the positions of the arguments that its result may overwrite.
    """

    def __init__(self, found: dict[str, tuple[int, ...]]) -> None:
        self._found = found

    def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        if info.name == "tirx.MakePackedAPI":
            self._found.update({str(symbol.name_hint): overwritable(each) for symbol, each in mod.functions.items()})
