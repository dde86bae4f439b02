"""A model compiled for a platform: devices that fail are left out, an engine takes what TVM refuses, parts are tried.

`workflow.compile_source` calls it with a model that was read. Next: `engine_fallback.py`, `rewriting_trial.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tvm_pipeline.backends.contract import Backend, CompiledModel, MemoryRewriting, Order
from tvm_pipeline.backends.registry import find_backend, served_devices, settle_platform
from tvm_pipeline.core.model import FLOAT32, Model
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline.workflow.doubts import stand_in_warnings
from tvm_pipeline.workflow.engine_fallback import compiled_by_engine
from tvm_pipeline.workflow.rewriting_trial import compiled_in_parts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A model that was compiled for the devices of a platform, with the backend that did it.

    Attributes:
        metadata: what the model's file says about itself.
        rewriting: what was done in parts to save memory; None where that was not asked for.
    """

    backend: Backend
    compiled: CompiledModel
    platform: Platform
    metadata: Mapping[str, str] = field(default_factory=dict)
    rewriting: MemoryRewriting | None = None


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How a model is to be compiled.

    Attributes:
        order, tuned, rewrite: as `workflow.compile_source` takes them.
        asked: the user named the platform, so that none of its devices may be left out.
        elsewhere: the devices are those of another machine.
        processor: of that machine, by which what tuning has found there is known.
        compared: has that machine compare what its devices compute, see `machine.Machine`.
    """

    order: Order | None
    tuned: bool
    rewrite: bool
    asked: bool
    elsewhere: bool = False
    processor: str = ""
    compared: Callable[[CompiledModel, Platform], None] = lambda *_: None


def compiled_on(model: Model, platform: Platform, options: CompileOptions) -> Compiled:
    """Compile a model for a platform, with the backend that serves it; raise as `workflow.compile_source` does."""
    backend, settled = settle_platform(platform, elsewhere=options.elsewhere)
    for line in stand_in_warnings(settled):
        _log.warning(line)
    options = replace(options, order="memory" if options.rewrite else options.order or _order_of(settled))
    try:
        return _compiled_beside(model, backend, settled, options)
    except ModelError as error:
        if options.asked or options.elsewhere or model.weights != FLOAT32:  # engines store float32
            raise
        if options.rewrite:
            raise ModelError(
                f"{error}. An engine would run it, and `memory_rewrite` is not for engines that nobody named: compile "
                "without it, or name the device of an engine in a platform file"
            ) from error
        return Compiled(*compiled_by_engine(model, settled, error, options.order or "listed"))


def _compiled_beside(model: Model, backend: Backend, settled: Platform, options: CompileOptions) -> Compiled:
    """Compile for a platform; without the devices that its backend serves itself where these fail and nobody asked."""
    try:
        return _compiled(model, backend, settled, options)
    except (ModelError, PlatformError) as error:
        others = served_devices(backend, settled)
        if options.asked or not others:
            raise
        # Nobody asked for these devices: without them the model may compile.
        left_out = ", ".join(device.name for device in settled.devices if device not in others)
        _log.warning(f"{left_out} left out of {model.name}: {error}")
    backend, settled = settle_platform(replace(settled, devices=others), elsewhere=options.elsewhere)
    return _compiled(model, backend, settled, options)


def _order_of(platform: Platform) -> Order:
    return "memory" if any(device.memory_bytes is not None for device in platform.devices) else "listed"


def _compiled(model: Model, backend: Backend, settled: Platform, options: CompileOptions) -> Compiled:
    for name in {device.backend for device in settled.devices} if model.weights != FLOAT32 else ():
        if why := find_backend(name).refuses_weights():
            raise PlatformError(f"`weights` {model.weights}: {why}")
    compile_: Callable[..., CompiledModel] = backend.compile
    if options.elsewhere:
        compile_ = partial(backend.compile_elsewhere, tuned=options.tuned, processor=options.processor)
    elif not options.tuned:
        compile_ = backend.compile_untuned

    def compiled_as(one: Model) -> CompiledModel:
        return compile_(one, settled.devices, options.order or "listed")

    rewriting = None
    if options.rewrite:
        compiled, rewriting = compiled_in_parts(model, backend, settled.devices, compiled_as)
        if rewriting.why:
            _log.warning(f"{model.name} is compiled as it is, without `memory_rewrite`: {rewriting.why}")
        for line in rewriting.omissions:
            _log.warning(f"{model.name}: {line}")
    else:
        compiled = compiled_as(model)
    options.compared(compiled, settled)
    return Compiled(backend, compiled, settled, rewriting=rewriting)
