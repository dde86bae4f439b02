"""The power modes of this machine: which it has, whether it is in one, and being in one with permission.

Read before: power/modes.py. Read next: mode_profiles.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tvm_pipeline.backends.bundle import bundle_power_mode
from tvm_pipeline.backends.registry import detect_platform
from tvm_pipeline.core.in_mode import find_mode
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.errors import OptionError, PowerError
from tvm_pipeline.power import power_modes

_log = logging.getLogger(__name__)


def this_machine(model: Model | None) -> Platform:
    """Return the devices of this machine, as `detect_platform`, and its power modes.

    If the modes cannot be read, they are left out with a warning.
    """
    platform = detect_platform(model)
    try:
        modes = tuple(power_modes().modes())
    except PowerError as error:
        _log.warning(f"power modes are left out: {error}")
        return platform
    return replace(platform, power_modes=modes)


def other_mode(platform: Platform, name: str) -> str:
    """Return why this machine does not show the figures of a power mode: it is not set. Empty where it is, or none is.

    Raises:
        PlatformError: the platform has no such mode.
    """
    if not name or power_modes().is_set(find_mode(platform, name)):
        return ""
    return f"the figures are of power mode {name}, and the machine is not in it"


def check_allowed(mode: PowerMode, what: str, allowed: bool) -> None:
    """Raise OptionError where a mode is not set, and may not be; `what` needs it."""
    if not allowed and not power_modes().is_set(mode):
        by_hand = "" if mode.nvpmodel is None else f"set it before (`sudo nvpmodel -m {mode.nvpmodel}`), or "
        raise OptionError(
            f"{what} is for power mode {mode.name}, and the machine is not in it: {by_hand}have it set for this alone "
            "and put back by `allow_power_modes`, which takes the rights of root",
            option="allow_power_modes",
        )


@contextmanager
def with_mode_of(bundles: Sequence[Path], allowed: bool) -> Iterator[None]:
    """Have the machine in the power mode of the bundles' plans, where they are for one, while the block lasts.

    Raises:
        OptionError: two bundles are for different modes, or theirs is not set and may not be.
        PowerError: the mode cannot be set.
    """
    modes = {path: mode for path in bundles if (mode := bundle_power_mode(path))}
    if not modes:
        yield
        return
    (path, mode), *others = modes.items()
    for other, its in others:
        if its != mode:
            raise OptionError(
                f"{path} is for power mode {mode.name} and {other} for {its.name}; compile both with profiles of one "
                "mode, or run them one after the other"
            )
    check_allowed(mode, str(path), allowed)
    with power_modes().mode_set(mode):
        yield
