"""The profile of several models that are planned as one graph, from a profile of each.

`core/graph_files.py` makes the graph. Next: `workflow/merged.py`, which does both for the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import ProfileError

KnownT = TypeVar("KnownT")


def merge_profiles(merged: OperatorGraph, graphs: Sequence[OperatorGraph], profiles: Sequence[Profile]) -> Profile:
    """Return the profile of `merge_graphs(graphs, ...)`, whose source and sink take no time.

    What belongs to an operator is that of its model. What belongs to a device or to the machine was measured several
    times: of the factors by which devices slow one another down the greatest counts, and of links, transfers and the
    idle power the first that is known. Stages that were measured as a whole are left out: they are none of the merged
    graph.

    Args:
        graphs: of different names.
        profiles: one for each graph, in their order.

    Raises:
        ProfileError: a device was measured for some of the models alone, or they were measured in different power
            modes.

    Examples:
        >>> from dataclasses import replace
        >>> from tvm_pipeline.core.graph_files import merge_graphs
        >>> from tvm_pipeline.testing import example_graph
        >>> graphs = [replace(example_graph(), name=name) for name in ("left", "right")]
        >>> measured = {"d0": DeviceProfile.in_order(graphs[0], [0.02, 0.04])}
        >>> profiles = [Profile(graph.name, graph.fingerprint, measured) for graph in graphs]
        >>> together = merge_profiles(merge_graphs(graphs, "both"), graphs, profiles)
        >>> together.device("d0").seconds["right/increment"], together.device("d0").whole_s
        (0.04, 0.12)
    """
    for graph, profile in zip(graphs, profiles, strict=True):
        profile.check_graph(graph)
    _check_alike(profiles)
    fronts = [f"{graph.name}/" for graph in graphs]
    names = set(merged.operator_names)
    own = names.difference(f + o.name for f, graph in zip(fronts, graphs, strict=True) for o in graph.operators)

    def joined(figures: Sequence[Mapping[str, float | None] | None]) -> dict[str, float | None]:
        """Return the figures of all operators by their names in the merged graph; empty where a model has none."""
        if not all(figures):
            return {}
        of_models = zip(fronts, figures, strict=True)
        return {**dict.fromkeys(own, 0.0), **{f + name: s for f, row in of_models for name, s in (row or {}).items()}}

    return Profile(
        merged.name,
        merged.fingerprint,
        {name: _device([p.devices[name] for p in profiles], joined) for name in profiles[0].devices},
        _first([p.links for p in profiles]) or (),
        dict(_first([p.environment for p in profiles]) or {}),
        tuple(dict.fromkeys(line for p in profiles for line in p.warnings)),
        lock_s={f + name: s for f, p in zip(fronts, profiles, strict=True) for name, s in p.lock_s.items()},
        idle=_first([p.idle for p in profiles]),
        power_mode=profiles[0].power_mode,
    )


def _check_alike(profiles: Sequence[Profile]) -> None:
    first, *others = profiles
    for other in others:
        for has, lacks in ((first, other), (other, first)):
            if missing := sorted(has.devices.keys() - lacks.devices.keys()):
                raise ProfileError(
                    f"device {missing[0]} was measured for {has.graph} and not for {lacks.graph}; measure "
                    f"{lacks.graph} on it with `tvm-pipeline profile`"
                )
        if other.power_mode != first.power_mode:
            modes = " and ".join(f"{p.graph} in {p.power_mode or 'no power mode'}" for p in (first, other))
            raise ProfileError(f"the profiles are of different power modes: {modes}; measure both in one")


def _device(parts: Sequence[DeviceProfile], joined: Callable[..., dict[str, float | None]]) -> DeviceProfile:
    def known(figures: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
        return {name: figure for name, figure in joined(figures).items() if figure is not None}

    return DeviceProfile(
        joined([part.seconds for part in parts]),
        known([part.spread for part in parts]),
        max(part.busy_factor for part in parts),
        known([part.joules for part in parts]) or None,
        _first([part.receive for part in parts]),
        _first([part.send for part in parts]),
        known([part.uncertainty for part in parts]),
        known([part.joules_uncertainty for part in parts]),
        ", ".join(dict.fromkeys(part.predicted_from for part in parts if part.predicted_from)),
    )


def _first(figures: Sequence[KnownT | None]) -> KnownT | None:
    return next((figure for figure in figures if figure), None)
