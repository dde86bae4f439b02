"""A Relay module becomes a Library for one target, kept in the user's cache.

Next: `library.py`, what a library is.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tvm
from tvm import relay

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.files import cache_folder, keep, read_kept
from tvm_pipeline.signals import check_interrupted
from tvm_pipeline_tvm.devices.runtimes import ready_to_compile
from tvm_pipeline_tvm.devices.targets import has_own_memory, plain_target
from tvm_pipeline_tvm.float64 import next_tolerance
from tvm_pipeline_tvm.kernel_sets import MISSING, OWN, Choices, relay_kernels
from tvm_pipeline_tvm.library_cache import tuned_or_made
from tvm_pipeline_tvm.linking import check_linker, export_library
from tvm_pipeline_tvm.relay.channels_first import channels_first
from tvm_pipeline_tvm.relay.child import compile_in_child
from tvm_pipeline_tvm.relay.fold import fast_build
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.kernel_walkers import kernels_of_library
from tvm_pipeline_tvm.relay.library import TUNING, Library, Tuning, load_library, read_tuning, write_index
from tvm_pipeline_tvm.relay.output_names import save_output_names
from tvm_pipeline_tvm.relay.overwriting_record import save_overwriting
from tvm_pipeline_tvm.relay.pad_channels import pad_channels
from tvm_pipeline_tvm.relay.reference import error_of
from tvm_pipeline_tvm.relay.saved_params import write_params
from tvm_pipeline_tvm.relay.work_done import LINKING, CompileProgress, WorkDone
from tvm_pipeline_tvm.tvm_errors import reason

_log = logging.getLogger(__name__)

# Raise it when a saved library must not be read any more, or when the engine compiles otherwise.
FORMAT = 18


def build_library(
    model: Model,
    target: str,
    host: str = "",
    choices: Choices | None = None,
    *,
    apart: bool = False,
    elsewhere: bool = False,
) -> Library:
    """Compiles `model` for `target`, or takes it from the cache.

    TVM or LLVM may end the process where a target, or an element type, is new to the cache: that compile is a child's
    (`child.py`). What has once been compiled for the target is compiled here, since a child takes seconds to start.

    Args:
        host: the target of the code that launches kernels, where `target` is that of a device with memory of its own.
        choices: of tuning, by workload; without them, those recorded here that the model allows.
        apart: compile in a child in any case, beside other threads that do the same.
        elsewhere: the code runs on another machine alone, so it is not loaded here.

    Raises:
        ModelError: TVM cannot import or compile it.
        PlatformError: TVM cannot compile for such a device, or run it, on this machine.
    """
    host = host if has_own_memory(target) else ""
    # What runs elsewhere is not measured here, see `compile_module`.
    allowed = [f"{model.tolerance:g}{' elsewhere' if elsewhere else ''}"] if model.tolerance else []
    described = _described(model.digest, target, host, *allowed)
    plain = cache_folder() / "libraries" / _sha(described)
    if choices is None:
        choices = relay_kernels().recorded(target, tolerance=model.tolerance)

    def write(folder: Path, own: Choices) -> tuple[Iterable[Any], Choices]:
        _compile_where_it_is_safe(model, target, host, folder, own, apart=apart, elsewhere=elsewhere)
        tuning = read_tuning(folder)
        return tuning.workloads.values(), dict(tuning.choices)

    load = partial(load_library, runs_here=lambda _: not elsewhere)
    what, digest_of = f"{model.name} for {target}", relay_kernels().digest_of
    return tuned_or_made(plain, what, choices, digest_of, load, write)


def _described(*what: str) -> str:
    """Return what a compile depends on; libraries of before there were guests have no key."""
    key = relay_kernels().key
    return "|".join((*what, tvm.__version__, str(FORMAT), *([key] if key else [])))


def _sha(described: str) -> str:
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def _compile_where_it_is_safe(
    model: Model, target: str, host: str, folder: Path, choices: Choices, *, apart: bool, elsewhere: bool
) -> None:
    ready_to_compile(target)
    check_linker(host or target)
    record = cache_folder() / "targets" / f"{_sha(_described(target, host))}.json"
    content = read_kept(record)
    proven = set() if content is None else msgspec.json.decode(content, type=set[str])
    if proven and not apart:
        _log.info(f"importing {model.name}")
        mod, params = import_model(model)
        if element_types(mod) <= proven:
            compile_module(
                model.name, mod, params, target, folder, host, choices, tolerance=model.tolerance, elsewhere=elsewhere
            )
            return
    else:  # the child imports it
        _log.info(f"importing {model.name}")
    met = compile_in_child(model, target, folder, host, choices, elsewhere=elsewhere)
    keep(record, msgspec.json.encode(sorted(proven | met)))


def element_types(mod: tvm.IRModule) -> set[str]:
    """The dtypes of all tensors of `main`: kernels of another type are other code."""
    found: set[str] = set()

    def add(type_: Any) -> None:
        if isinstance(type_, relay.TupleType):
            for field_ in type_.fields:
                add(field_)
        elif isinstance(type_, relay.TensorType):
            found.add(str(type_.dtype))

    def visit(expr: relay.Expr) -> None:
        if not isinstance(expr, (tvm.ir.Op, relay.Function)):
            add(expr.checked_type)

    relay.analysis.post_order_visit(mod["main"], visit)
    return found


def compile_module(
    name: str,
    mod: tvm.IRModule,
    params: dict[str, Any],
    target: str,
    folder: Path,
    host: str = "",
    choices: Choices | None = None,
    *,
    tolerance: float = 0.0,
    elsewhere: bool = False,
) -> None:
    """Compiles an imported module and writes the library into `folder`; `host` is as in `build_library`.

    Choices are taken as they are: none are read. Where kernels of other sums come into it (`Model.tolerance`), the
    error of its outputs is measured, unless it runs elsewhere. If that is too large, it is compiled again: each layer
    may then have a tenth of the error, and at last none.
    """
    ready_to_compile(target)
    done = WorkDone(f"compiling {name} for {target}")
    _log.info(f"compiling {name} for {target}")
    if relay_kernels().key == OWN:
        _log.info(f"{name} for {target} gets TVM's own kernels, which are slower: {MISSING}")
    try:
        mod = as_compiled(mod, params)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    allowed: float | None = tolerance
    while allowed is not None:
        try:
            factory, used = _built(name, mod, params, target, host, choices, [CompileProgress(done)], allowed)
        except Exception as error:  # TVM's passes raise whatever their author had at hand
            check_interrupted()
            raise ModelError(f"{name}: TVM cannot compile it for {target}: {reason(error)}") from error
        done.reach(LINKING)
        _write(folder, factory, mod, params, target, host, used, choices or {})
        if elsewhere or not read_tuning(folder).winograd:
            return
        library = load_library(folder)
        measure = partial(error_of, library, mod, params)
        measured, allowed = next_tolerance(name, target, measure, tolerance, allowed)
        (folder / TUNING).write_bytes(msgspec.json.encode(msgspec.structs.replace(library.tuning, error=measured)))
        write_index(folder, target, library.inputs, library.kernels)
        for file in folder.iterdir() if allowed is not None else ():
            file.unlink()


def _built(
    name: str,
    mod: tvm.IRModule,
    params: dict[str, Any],
    target: str,
    host: str,
    choices: Choices | None,
    instruments: Sequence[Any],
    tolerance: float,
) -> tuple[Any, str]:
    """Return what `relay.build` gives, and the target that it compiled for.

    Where the schedules of one vendor's devices fail, that is the target without them (`plain_target`).
    """
    wanted = tvm.target.Target(target, host) if host else target
    try:
        return fast_build(mod, wanted, params, choices, instruments, in_place=True, tolerance=tolerance), target
    except Exception as error:
        plain = plain_target(target)
        if plain == target:
            raise
        _log.info(f"{name} for {plain}: the schedules of {target} do not compile ({reason(error)})")
        return fast_build(mod, tvm.target.Target(plain, host), params, choices, in_place=True), plain


def as_compiled(mod: tvm.IRModule, params: dict[str, Any]) -> tvm.IRModule:
    """Return an imported module as it is compiled for every target, so that all have the same operators."""
    return pad_channels(channels_first(mod, params), params)


def _functions(factory: Any) -> dict[str, relay.Function]:
    """Return what each kernel computes."""
    return {
        str(name): next(iter(info.relay_primfuncs.values()))
        for name, info in factory.function_metadata.items()
        if len(info.relay_primfuncs)
    }


def _tuning(functions: Mapping[str, relay.Function], target: tvm.target.Target, choices: Choices) -> Tuning:
    """Return what tuning can make faster of these functions, what it did, and how many are Winograd's."""
    kernels = relay_kernels()
    found = {name: kernels.workload_of(function, target) for name, function in functions.items()}
    workloads = {name: workload for name, workload in found.items() if workload is not None}
    applied = tuple((one, choices[one]) for one in sorted(set(workloads.values())) if one in choices)
    return Tuning(
        workloads, applied, len({one for name, one in workloads.items() if kernels.is_winograd(functions[name])})
    )


def _write(
    folder: Path,
    factory: Any,
    mod: tvm.IRModule,
    params: dict[str, Any],
    target: str,
    host: str,
    used: str,
    choices: Choices,
) -> None:
    inputs = tuple(
        Tensor(p.name_hint, tuple(int(extent) for extent in p.checked_type.shape), p.checked_type.dtype)
        for p in mod["main"].params
        if p.name_hint not in params
    )
    graph_json = factory.get_graph_json()
    if "storage_scope" in json.loads(graph_json)["attrs"]:
        raise ModelError(
            f"{target} keeps tensors in textures, which cannot be cut yet; use the target `opencl` without -device"
        )
    functions = _functions(factory)
    kernels = kernels_of_library(graph_json, functions, [tensor.name for tensor in inputs])
    export_library(factory.lib, folder / "kernels.so", host or target)
    (folder / "graph.json").write_text(graph_json)
    (folder / TUNING).write_bytes(msgspec.json.encode(_tuning(functions, tvm.target.Target(used), choices)))
    save_overwriting(factory, folder)
    save_output_names(mod, folder)
    write_params(folder, factory.params)
    write_index(folder, target, inputs, kernels)
