"""A model that TVM refuses, on an engine that takes it, where nobody said what is to run it.

The engine runs the operators that TVM refuses; the planner decides which of them runs the others, by their measured
times. The engine runs all where TVM takes no operator, where it would have to compile so many that it takes too long,
or where no two devices could work at the same time. Read next: `backends/registry.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from tvm_pipeline.backends.contract import Backend, CompiledModel, Order
from tvm_pipeline.backends.registry import engine_for, settle_platform
from tvm_pipeline.backends.sliced import SlicedModel
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline.signals import check_interrupted

_log = logging.getLogger(__name__)

# To time them, TVM compiles each operator that it takes as a model of its own, which takes about a second.
MOST_OPERATORS = 40
_SHOWN = 4  # operators that a message names


def compiled_by_engine(
    model: Model, platform: Platform, refusal: ModelError, order: Order
) -> tuple[Backend, CompiledModel, Platform]:
    """Compile a model for an engine on the cores of a platform, beside TVM where that pays; warn which runs what.

    Args:
        platform: this machine's, settled, whose backend refuses the model.
        refusal: says why.

    Returns:
        The backend of the platform, the model, and the platform with the engine's devices.

    Raises:
        ModelError: there is no engine for it, it is not installed, or it refuses the model as well. The message has
            both reasons, and the next step.
    """
    check_interrupted()
    own = tuple(device for device in platform.devices if device.backend == "host" and not device.stand_in)
    if not own:
        raise refusal
    try:
        engine, devices = engine_for(model, own)
    except PlatformError as error:
        raise ModelError(f"{refusal}. Nothing else runs it: {error}") from refusal
    try:
        beside = _beside(model, engine, devices, own, order)
        if beside:
            backend, compiled, mixed = beside
            refused = compiled.refusals(own[0])
            rest = len(compiled.graph) - len(refused)
            shown = ", ".join(list(refused)[:_SHOWN]) + (
                f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            )
            _log.warning(
                f"{refusal}. {engine.engine} runs {shown or 'what the plan gives it'} of its "
                f"{len(compiled.graph)} operators, and the plan divides the other {rest} between TVM and "
                f"{engine.engine}, on {_listed(devices)}"
            )
            return backend, compiled, mixed
        backend, alone = settle_platform(Platform(platform.name, devices))
        whole = backend.compile(model, alone.devices, order)
    except ModelError as error:
        raise ModelError(f"{refusal}. {engine.engine} cannot run it either: {error}") from error
    _log.warning(f"{refusal}. {engine.engine} runs all of it, on {_listed(devices)}")
    return backend, whole, alone


def _beside(
    model: Model, engine: Backend, devices: Sequence[Device], own: Sequence[Device], order: Order
) -> tuple[Backend, SlicedModel, Platform] | None:
    """Return the model compiled for the engine and for TVM; None where that does not pay."""
    named = [replace(device, name=f"{engine.engine.lower()}-{device.name}") for device in devices]
    if all(one.overlaps(other) for one, other in product(named, own)):
        return None
    backend, mixed = settle_platform(Platform("this machine", (*own, *named)))
    compiled = backend.compile(model, mixed.devices, order)
    if not isinstance(compiled, SlicedModel):
        raise PlatformError(f"{engine.engine} does not share {model.name} with TVM")
    _log.info(f"operators of {model.name} that TVM takes")
    if 0 < len(compiled.computes(own[0])) <= MOST_OPERATORS:
        return backend, compiled, mixed
    compiled.close()
    return None


def _listed(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)
