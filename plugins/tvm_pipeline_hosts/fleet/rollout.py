"""From a fleet.toml to the running fleet: bundles are shipped to their hosts, then the coordinator gets the plan.

    rollout = Rollout(door, tell)
    file = rollout.completed(read_fleet(path), hosts, warn)     # compiles model files, once for each kind of host
    bundles = bundles_of(file)
    plan = rollout.plan(file, bundles, results)                 # places the cameras, and says what cannot be
    rollout.ship(bundles, hosts)                                # to each host what it lacks of its bundles
    rollout.follow(plan)

Hosts have the bundles before the coordinator hears of them, so that a changed model is changed without a gap. Next:
ray_door.py, through which all of it goes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import msgspec

from tvm_pipeline import PipelineError
from tvm_pipeline.errors import OptionError
from tvm_pipeline_hosts.fleet.description import Camera, Placement
from tvm_pipeline_hosts.fleet.fleet_file import FleetFile
from tvm_pipeline_hosts.fleet.host_works import host_works
from tvm_pipeline_hosts.fleet.messages import FleetPlan, FleetStatus, ModelSettings
from tvm_pipeline_hosts.fleet.model_settings import named, read_settings
from tvm_pipeline_hosts.fleet.placement import place
from tvm_pipeline_hosts.fleet.ray_actors import COORDINATOR, agent_name
from tvm_pipeline_hosts.fleet.ray_door import FleetClient
from tvm_pipeline_hosts.fleet.shipping import send_bundle
from tvm_pipeline_hosts.remote.parcels import manifest_of, sum_of

_log = logging.getLogger(__name__)

PLACE_S = 10.0
FOLLOW_S = 300.0  # for a coordinator on a slow head that has its first plan, and compiles its loops

Bundles = Mapping[str, Mapping[str, Path]]  # host -> model -> its file


class Rollout:
    """See the module.

    Args:
        door: to the fleet.
    """

    def __init__(self, door: FleetClient) -> None:
        self._door = door

    def completed(self, file: FleetFile, hosts: Collection[str]) -> FleetFile:
        """Return the file with bundles of the models that are compiled for these hosts, see `kind_bundles.py`."""
        if not file.to_compile(hosts):
            return file
        from tvm_pipeline_hosts.fleet.kind_bundles import KindBundles  # with the compilers, which take a while
        from tvm_pipeline_hosts.fleet.ray_board import host_board

        cameras = {name: len(host.cameras) for name, host in self.status().hosts.items()}
        made = KindBundles(partial(host_board, self._door), lambda host: cameras.get(host, 0))
        return made.completed(file, hosts)

    def plan(self, file: FleetFile, bundles: Bundles, results: str = "") -> FleetPlan:
        """Place the cameras of a file; those that run now stay where they are if that is as good.

        Args:
            bundles: of each host, see `bundles_of`.
            results: the file of lines on the head; empty for none.
        """
        known = host_works(file).work_s
        works = {host: {model: known[host][model] for model in models} for host, models in bundles.items()}
        status = self.status()
        before = {duty.camera: duty.host for duty in status.duties if duty.host}
        _log.info(f"placing {len(file.cameras)} cameras; the first time on a machine that takes half a minute more")
        placement = place(file.fleet(works), PLACE_S, before=before)
        for line in said_of(placement):
            _log.info(line)
        settings = settings_of(file)
        ids = {path: sum_of(manifest_of(path)) for models in bundles.values() for path in set(models.values())}
        return FleetPlan(
            cameras={camera.name: (camera.source, camera.rates_fps) for camera in file.cameras},
            host_of=dict(placement.host_of),
            reach={camera.name: reach_of(camera, bundles) for camera in file.cameras},
            work_s=works,
            bundles={
                host: {model: named(ids[path], settings[model]) for model, path in models.items()}
                for host, models in bundles.items()
            },
            beat_s=file.beat_s,
            late_s=file.late_s,
            alone=file.alone,
            results=results,
            settings={model: found for model, found in settings.items() if found != ModelSettings()},
        )

    def ship(self, bundles: Bundles, hosts: Collection[str]) -> None:
        """Send each bundle to those of these hosts that lack it; raise PipelineError where one cannot take it."""
        for host in hosts:
            for model, path in bundles.get(host, {}).items():
                _, sent = send_bundle(self._door, host, path)
                if sent:
                    _log.info(f"{host} has {model}: {sent / 1e6:.1f} MB were sent")
            keep = [sum_of(manifest_of(path)) for path in bundles.get(host, {}).values()]
            self._door.call(agent_name(host), "forget", keep, kind=type(None))

    def follow(self, plan: FleetPlan) -> None:
        """Have the coordinator bring the fleet to a plan."""
        self._door.call(COORDINATOR, "follow", msgspec.json.encode(plan), limit_s=FOLLOW_S, kind=type(None))

    def status(self) -> FleetStatus:
        """Return how the fleet is now."""
        return self._door.call(COORDINATOR, "status", kind=FleetStatus)


def bundles_of(file: FleetFile) -> dict[str, dict[str, Path]]:
    """Return the bundle of each host for each model that it has one for.

    Raises:
        OptionError: a model that a camera wants has no bundle for any host, and is not compiled for them.
    """
    found: dict[str, dict[str, Path]] = {host.name: {} for host in file.hosts}
    for host in file.hosts:
        for model in file.models:
            if path := file.bundle(host, model.name):
                found[host.name][model.name] = path
    wanted = {model for camera in file.cameras for model in camera.rates_fps}
    lacking = {model for model in wanted if not any(model in models for models in found.values())}
    if nowhere := sorted(model for model in lacking if not file.find_model(model).is_source):
        raise OptionError(
            f"{file.path}: no host has a bundle of {', '.join(nowhere)}; name the model as its `file`, or compile it "
            "on a host of each kind and name that under `bundles` of these hosts"
        )
    return found


def settings_of(file: FleetFile) -> dict[str, ModelSettings]:
    """Return the settings of each model; raise OptionError as `read_settings` does."""
    return {model.name: read_settings(model, file.path) for model in file.models}


def reach_of(camera: Camera, bundles: Bundles) -> tuple[str, ...]:
    """Return the hosts that may take a camera: they reach it, and have a bundle of each of its models."""
    able = [host for host, models in bundles.items() if set(camera.rates_fps) <= set(models)]
    return tuple(host for host in able if not camera.hosts or host in camera.hosts)


def said_of(placement: Placement) -> list[str]:
    """Return what people must know of a placement before it runs."""
    said = [f"camera {camera} starves: {why}" for camera, why in placement.starving.items()]
    said += [
        f"if {hosts} is lost, nobody has room for {', '.join(cameras)}"
        for hosts, cameras in placement.starving_without.items()
    ]
    most = max(placement.utilisation.items(), key=lambda found: found[1], default=("", 0.0))
    if placement.host_of:
        said.append(
            f"{len(placement.host_of)} cameras are placed; the busiest host, {most[0]}, has {most[1]:.0%} to do"
        )
    return said


def not_joined(file: FleetFile, hosts: Collection[str]) -> str:
    """Return a sentence about the hosts of a file that are not in the fleet; empty where all are."""
    lacking = [host.name for host in file.hosts if host.name not in hosts]
    if len(lacking) == len(file.hosts):
        raise PipelineError(
            f"none of the hosts of {file.path} has joined ({', '.join(lacking)}); run `fleet join` on them"
        )
    return f"{', '.join(lacking)} has not joined; the others take its cameras until it does" if lacking else ""
