"""A profile as it would be if operators took another part of their seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tvm_pipeline.core.profile import Profile


def scaled_profile(profile: Profile, shares: Mapping[str, Mapping[str, float]]) -> Profile:
    """Return the profile with the seconds of some operators multiplied.

    Stages that were measured as a whole are left out, because their seconds contain those of the operators.

    Args:
        shares: by device and operator; others keep their seconds.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> scaled_profile(example_problem().profile, {"d0": {"double": 0.5}}).device("d0").seconds
        {'double': 0.01, 'increment': 0.04}
    """
    devices = dict(profile.devices)
    for name in devices.keys() & shares.keys():
        seconds = {
            operator: None if taken is None else taken * shares[name].get(operator, 1.0)
            for operator, taken in devices[name].seconds.items()
        }
        devices[name] = replace(devices[name], seconds=seconds)
    return replace(profile, devices=devices, segments=())
