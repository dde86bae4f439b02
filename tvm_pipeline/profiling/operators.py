"""Seconds of every operator on every device, measured on the compiled model itself.

Each kernel is timed where it runs in the whole model, from a thread that is bound to the device. A device with memory
of its own is also timed as it receives and sends tensors. The whole model is timed too. Its median, less the transfers
of its inputs and outputs, is what the operators' times are scaled to, because a sum of small times misses the time
between them. Where a device does not compute all operators, the stages that it computes stand for the whole model. Then
all devices that can work at the same time do so; the factor by which that slows a device is its `busy_factor`. What
another program disturbed is recognised and measured again. Next: `rounds.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from tvm_pipeline.backends.contract import Backend, CompiledModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.device_costs import can_time_operators
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.profiling.device_bench import Bench
from tvm_pipeline.profiling.environment import environment
from tvm_pipeline.profiling.estimates import estimate
from tvm_pipeline.profiling.evidence import borrowed, doubt, observations, without_schedule
from tvm_pipeline.profiling.links import fit_links
from tvm_pipeline.profiling.rounds import Rounds
from tvm_pipeline.profiling.throttling import ThrottleWatch

_log = logging.getLogger(__name__)

BUSY_SPREAD = 0.10
MOST_UNCERTAIN = 0.05  # what a strict profile may be off


def profile_model(
    backend: Backend,
    compiled: CompiledModel,
    platform: Platform,
    repeats: int = 24,
    strict: bool = False,
    root: Path = Path("/"),
) -> Profile:
    """Measure `compiled` on every device of `platform`, and the links between the devices.

    A device that is present and has a model is not measured, because operators cannot be timed one by one on it (an
    Edge TPU is such a device). `stage_timer` times whole stages on such devices, for the scheduler `measured`.

    Passes that another program disturbed are measured again, for at most three times as long as all takes once, and
    30 s. Where too few are undisturbed even then, the profile's warnings say so, and its uncertainty is wide. They also
    say where the machine was throttled meanwhile.

    Args:
        repeats: passes over the model for each device, spread over the rounds; fewer, and 8 at least, where all would
            take longer than 10 s.
        strict: make all passes, try for at least 20 s and at most 60 s, and raise ProfileError where the figures are
            still doubtful.
        root: the folder with the files of the system that tell whether the machine is throttled.

    Examples:
        >>> from tvm_pipeline.testing import example_backend, example_model, example_problem
        >>> profile = profile_model(example_backend(), example_model(), example_problem().platform, repeats=4)
        >>> profile.graph, {name: device.runs for name, device in profile.devices.items()}
        ('net', {'d0': 2, 'd1': 2})
    """
    measurable = [device for device in platform.devices if can_time_operators(device)]
    throttling = ThrottleWatch(root)
    differences = compiled.check_engines(measurable)

    with ExitStack() as opened:
        benches = {device: opened.enter_context(closing(Bench(compiled, device))) for device in measurable}
        rounds = Rounds(benches, repeats, throttling.look, strict)
        rounds.measure()
        throttling.look()
        _log.info("links")
        links = fit_links({device: bench.runner for device, bench in benches.items()})
    absent = [
        f"device {name} was not here, measured were {what.partition(' (')[0]}"
        for name, what in platform.stand_ins.items()
    ]
    devices, doubts = figures(compiled.graph, rounds, strict)
    throttling.look_now()
    if throttling.begun:
        doubts.append(
            f"the machine was throttled while {compiled.graph.name} was measured ({throttling.begun}): a cooler "
            "machine is faster. Let it cool down, or choose a lower power mode, and profile again"
        )
    return Profile(
        graph=compiled.graph.name,
        fingerprint=compiled.graph.fingerprint,
        devices={device.name: devices[device] for device in measurable},
        links=links,
        environment={**environment(backend.versions()), **observations(rounds)},
        warnings=(*absent, *differences, *doubts, *without_schedule(compiled, devices)),
    )


def figures(graph: OperatorGraph, rounds: Rounds, strict: bool) -> tuple[dict[Device, DeviceProfile], list[str]]:
    """Return the figures of each device that was measured, and warnings; raise ProfileError as `profile_model` does."""
    warnings: list[str] = []
    found: dict[Device, DeviceProfile] = {}
    for group in rounds.groups:
        of_group = estimate(graph, rounds.of(group), rounds.least, rounds.stages(group[0]))
        found |= dict.fromkeys(group, of_group.figures)
        uncertainty, doubtful = doubt(graph.name, group, of_group, rounds)
        if strict and uncertainty > MOST_UNCERTAIN:
            raise ProfileError(doubtful)
        if doubtful:
            warnings.append(doubtful)
        else:
            warnings += [*borrowed(group, of_group, rounds), *_spread(group, of_group.figures, graph)]
    return found, [*warnings, *rounds.differences]


def _spread(group: Sequence[Device], figures: DeviceProfile, graph: OperatorGraph) -> list[str]:
    """Return a warning where the slower operators have so much spread that another program used the devices.

    It says what else slows several cores (benchmarks/core_distance.py), beside which no reference kernel runs.
    """
    spread = figures.mean_spread
    moved = ", or the host of this virtual machine moved its cores apart," if len(group[0].cores) > 1 else ""
    return [
        f"device {device.name} was busy with something else{moved} while {graph.name} was measured (spread "
        f"{spread:.0%}); predictions will be as far off: stop other programs and profile again"
        for device in group
        if spread > BUSY_SPREAD
    ]
