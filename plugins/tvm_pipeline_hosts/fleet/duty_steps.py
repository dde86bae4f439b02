"""The next step of the services of a host towards the duties that are ordered: who begins a source, and who ends one.

A duty that goes to another service, for its bundle is another one, begins there first. The old service keeps the
source until the new one gives a line, so that there is no gap. A source that can be opened once only is closed first,
when the new service is warm. Read next: agent.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm_pipeline_hosts.fleet.messages import Duty
from tvm_pipeline_hosts.fleet.service_files import folder_name, is_exclusive, tag_of
from tvm_pipeline_hosts.fleet.service_process import ServiceProcess

OVERLAP_S = 10.0  # for which an old service keeps a source whose new one gives no line

Begun = dict[tuple[str, str], float]  # (service, tag) -> since when a warm service has the source
Key = tuple[str, str]  # camera and model


def next_duties(
    wanted: Mapping[Key, Duty], services: Mapping[str, ServiceProcess], begun: Begun, now_s: float
) -> tuple[dict[str, dict[str, Duty]], Begun, dict[Key, str]]:
    """Return the duties that each service is to have now, when they were begun, and why some cannot begin.

    Args:
        wanted: what is ordered; there is a service for each.
        services: by the names of their folders.
        begun: what the last call returned.
    """
    given: dict[str, dict[str, Duty]] = {name: {} for name in services}
    since: Begun = {}
    clashes: dict[Key, str] = {}
    for key, duty in wanted.items():
        home, tag = folder_name(duty.model, duty.bundle), tag_of(duty)
        service = services[home]
        others = [
            (name, other, held)
            for name, one in services.items()
            for other, held in one.duties.items()
            if name != home and (held.camera, held.model) == key
        ]
        runs = tag in service.duties
        if runs and service.ready:
            since[home, tag] = begun.get((home, tag), now_s)
        if not runs and _is_held(key, duty.source, home, services):
            if not service.ready:
                for name, other, held in others:
                    given[name][other] = held
            continue
        same = [one.camera for one in given[home].values() if one.source == duty.source]
        if same and is_exclusive(duty.source):
            clashes[key] = f"its source can be opened once only, and camera {same[0]} has it"
            continue
        given[home][tag] = duty
        over = now_s - since.get((home, tag), now_s) > OVERLAP_S
        if not over and not (runs and service.source(tag).frames):
            for name, other, held in others:
                given[name][other] = held
    return given, since, clashes


def _is_held(key: Key, source: str, home: str, services: Mapping[str, ServiceProcess]) -> bool:
    """Return whether another service still has the source of a duty, which can be opened only once."""
    for name, service in services.items():
        held = [*service.duties.values(), *(e.duty for e in service.endings.values() if e.closed_s is None)]
        if name != home and any((one.camera, one.model) == key for one in held):
            return is_exclusive(source)
    return False
