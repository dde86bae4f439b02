"""Several models that run at one rate, planned as one graph: `tvm-pipeline plan a.json b.json`.

The graphs are merged under one source and one sink, as Yin et al., SEC 2022 (section V-F), do. A frame of the merged
graph is a frame of every model. No bundle holds several models, so such a plan can be predicted and simulated and is
not run; `deploy` places several models to be run, each at a rate of its own. Next: `steps.py`, which opens one
model; `profiling/merging.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tvm_pipeline.core.graph_files import merge_graphs
from tvm_pipeline.core.plan import SEVERAL
from tvm_pipeline.errors import GraphError, OptionError, PlatformError
from tvm_pipeline.frontends import check_there
from tvm_pipeline.profiling.merging import merge_profiles
from tvm_pipeline.workflow.steps import PlanningInput, planned

_log = logging.getLogger(__name__)


@contextmanager
def merged(
    sources: Sequence[str],
    platform: Path | None = None,
    profiles: Sequence[Path] = (),
    *,
    devices: str = "",
    from_models: bool = False,
) -> Iterator[PlanningInput]:
    """Open several models as one graph, whose name joins theirs by `SEVERAL`.

    Args:
        sources: what `planned` takes: operator graphs, bundles or models.
        devices: which devices of the platform are used, as `Platform.with_devices`.
        profiles: none, or one for each source, in their order.

    Raises:
        OptionError: there are more or fewer profiles than sources.
        GraphError: two of the graphs have one name.
        PlatformError: bundles were compiled for different platforms.
        ProfileError: a profile is of another graph, or the profiles do not fit together; see `merge_profiles`.
    """
    if profiles and len(profiles) != len(sources):
        raise OptionError(
            f"`profile` was given {len(profiles)} times for {len(sources)} models; give one for each, in the order of "
            "the models, or none",
            option="profile",
        )
    files: Sequence[Path | None] = profiles or [None] * len(sources)
    for source in sources:  # before minutes of compiling the first
        check_there(source)
    with ExitStack() as stack:
        parts = [
            stack.enter_context(planned(source, None, platform, file, devices=devices, from_models=from_models))
            for source, file in zip(sources, files, strict=True)
        ]
        yield as_one(sources, parts)


def as_one(sources: Sequence[str], parts: Sequence[PlanningInput]) -> PlanningInput:
    """Return opened models as one graph with one profile; see `merged`, also for what is raised."""
    by_name: dict[str, str] = {}
    for source, part in zip(sources, parts, strict=True):
        if other := by_name.get(part.graph.name):
            raise GraphError(
                f"{other} and {source} are both called {part.graph.name}, and a plan would not tell their operators "
                "apart; give one of them another `name`. To run one model on several devices at once, plan it alone: "
                "its stages may have replicas"
            )
        by_name[part.graph.name] = source
        if part.platform != parts[0].platform:
            raise PlatformError(
                f"{sources[0]} is planned on platform {parts[0].platform.name} and {source} on "
                f"{part.platform.name}, and one plan has one platform; give one for all with `platform`"
            )
    graphs = [part.graph for part in parts]
    graph = merge_graphs(graphs, SEVERAL.join(by_name))
    profile = merge_profiles(graph, graphs, [part.profile for part in parts])
    obstacle = f"{graph.name} are {len(parts)} models, and no bundle runs several; `deploy` places them to be run"
    return PlanningInput(graph, parts[0].platform, profile, not_here=obstacle)
