"""`tvm-pipeline layer-times`: what profiles tell of a device, for networks that were never measured on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tvm_pipeline.backends.bundle import open_bundle
from tvm_pipeline.cli.options import JsonOption, PlatformOption, check_outputs
from tvm_pipeline.cli.output import print_json, show, warn
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.graph_limits import MOST_FILE_BYTES
from tvm_pipeline.core.platform import Device, read_platform
from tvm_pipeline.core.profile import Profile, read_profile
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import OptionError, ProfileError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.profiling.layer_times import (
    DeviceNote,
    LayerTime,
    LayerTimes,
    layer_times,
    read_layer_times,
    write_layer_times,
)
from tvm_pipeline.report import TextTable
from tvm_pipeline.report.tables import percent


def command(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Bundles (.tar), or pairs of GRAPH.json and PROFILE.json as `profile --graph` writes them.",
        ),
    ],
    device: Annotated[str, typer.Option("--device", help="The device of the profiles that is meant.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file for the layer times, as JSON.")],
    add_to: Annotated[
        Path | None, typer.Option("--add-to", help="Layer times to begin with; networks of the same name are replaced.")
    ] = None,
    platform: PlatformOption = None,
    json: JsonOption = False,
) -> None:
    """Collect the operators' seconds of a device from profiles, so that other networks can be planned without it.

    Say `layer_times = "FILE"` for a device of a platform file, and `plan` predicts what no profile has.

    Example: tvm-pipeline layer-times resnet.json resnet.profile.json vgg.tar --device cpu0 -o board.json
    """
    check_outputs(output, inputs=(*sources, platform))
    known = read_layer_times(add_to) if add_to else None
    networks: dict[str, list[LayerTime]] = {}
    described = known.device if known else DeviceNote()
    for source, graph, profile, found in _read(
        sources, device, read_platform(platform).device(device) if platform else None
    ):
        profile.check_graph(graph)
        measured = profile.device(device)
        layers = layer_times(graph, measured)
        networks.setdefault(graph.name, []).extend(layers)
        left_out = measured.runs - len(layers)
        if left_out:
            warn(f"{source}: {left_out} of {measured.runs} operators were measured too inexactly and are left out")
        note = _note(profile, found)
        if str(described) and note != described:
            warn(f"{source} was measured on {note}, and others on {described}: one file describes one device")
        described = described if str(described) else note
    times = LayerTimes(described, {**(known.networks if known else {}), **networks})
    write_layer_times(output, times)
    if json:
        errors = {kind: asdict(error) for kind, error in times.errors.items()}
        print_json({"device": described, "median_error": times.median_error, "kinds": errors})
    else:
        show(errors_table(times), json)


def errors_table(times: LayerTimes) -> TextTable:
    """Return how well each kind of operator of a network is predicted from the other networks."""
    rows = [
        (kind, str(error.operators), percent(error.median), percent(error.worst), percent(error.half_width))
        for kind, error in times.errors.items()
    ]
    title = f"{times.device or 'Layer times'}: {len(times.networks)} networks, each predicted from the others"
    return TextTable(title, ("kind", "operators", "median error", "worst", "95 % interval, +-"), tuple(rows))


def _read(
    sources: Sequence[str], name: str, given: Device | None
) -> list[tuple[str, OperatorGraph, Profile, Device | None]]:
    """Return each profile with its graph and, where it is known, the device."""
    found: list[tuple[str, OperatorGraph, Profile, Device | None]] = []
    graphs: dict[str, OperatorGraph] = {}
    profiles: list[tuple[str, Profile]] = []
    for source in sources:
        if source.endswith(".tar"):
            with open_bundle(Path(source)) as bundle:
                found.append((source, bundle.graph, bundle.profile, bundle.platform.device(name)))
            continue
        if _is_profile(source):
            profiles.append((source, read_profile(source)))
        else:
            graph = read_graph(source)
            graphs[graph.fingerprint] = graph
    for source, profile in profiles:
        if profile.fingerprint not in graphs:
            raise OptionError(
                f"{source}: the graph of {profile.graph} ({profile.fingerprint}) is not among the files; "
                "`tvm-pipeline profile MODEL -o PROFILE --graph GRAPH` writes both"
            )
        found.append((source, graphs[profile.fingerprint], profile, given))
    return found


def _is_profile(source: str) -> bool:
    with blamed(source, ProfileError, "it takes profiles, operator graphs and bundles"):
        keys = msgspec.json.decode(read_bytes(source, ProfileError, MOST_FILE_BYTES), type=dict[str, msgspec.Raw])
    return "fingerprint" in keys


def _note(profile: Profile, device: Device | None) -> DeviceNote:
    known: Mapping[str, str] = profile.environment
    return DeviceNote(
        known.get("processor", ""),
        len(device.cores) if device else 0,
        device.target if device else "",
        known.get("tvm", ""),
    )
