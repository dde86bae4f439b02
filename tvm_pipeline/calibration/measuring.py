"""Measure stages of compiled models on one device, and refit its model to them.

Whole networks are measured first, and a quick stage of each. The rest of the first half is chosen under the prior, and
the second half under the model that the first one gives. Next: `stage_choice.py` (which stages), `fit.py` (the model).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.calibration.fit import LEAST_STAGES, Calibration, calibrated
from tvm_pipeline.calibration.stage_choice import Candidate, candidates, expected_error, next_stages
from tvm_pipeline.calibration.stage_time import StageTime
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Device
from tvm_pipeline.cost.modelled_stage import stage_table
from tvm_pipeline.errors import ModelError, PipelineError, PlanError, ProfileError
from tvm_pipeline.planning.measured import SegmentTimer
from tvm_pipeline.profiling.stage_timer import stage_timer
from tvm_pipeline.profiling.throttling import ThrottleWatch

_log = logging.getLogger(__name__)

STAGES = 16
STEADY_SPREAD = 0.2  # of a stage's times; beyond it the stage is measured again
MOST_SPREAD = 0.5  # with which a stage still tells something
TRIES = 3


@dataclass(frozen=True, slots=True)
class Measuring:
    """What was measured on a device, and the model that it gives.

    Attributes:
        device: it, as it was settled on this machine.
        calibration: the refitted model.
        times: the stages, in the order in which they were measured.
        rest: candidates that were not measured, for what to measure next.
    """

    device: Device
    calibration: Calibration
    times: tuple[StageTime, ...]
    rest: tuple[Candidate, ...]


def measured_model(
    device: Device,
    models: Sequence[CompiledModel],
    prior: DeviceModel,
    count: int = STAGES,
    timer: Callable[[CompiledModel], SegmentTimer] = stage_timer,
    enough: float = 0.0,
) -> Measuring:
    """Measure so many stages of the models on a device, and refit the prior to them.

    A stage that the device's compiler refuses, or whose times vary, is told, and another one is measured in its place.

    Args:
        models: compiled for the device.
        timer: what times stages of a compiled model.
        enough: measure no further stage, once half of them are measured, where the constants are expected to contribute
            no more than this to the error of a stage.

    Raises:
        ProfileError: the device failed, its times vary, or what was measured cannot be fitted; see `calibrated`. It
            names the device.
        ModelError: the device computes nothing of a model, or its compiler refuses more stages than are asked for.
    """
    timers = {compiled.graph.fingerprint: timer(compiled) for compiled in models}
    pool = _computable(device, models)
    throttling = ThrottleWatch()
    times: list[StageTime] = []
    refused: list[str] = []
    varying: list[str] = []
    model = prior

    def measure(chosen: Sequence[Candidate]) -> None:
        for candidate in chosen:
            pool.remove(candidate)
            throttling.look()
            _log.info(f"stage {len(times) + 1} of {count} on {device.name}: {candidate.name}")
            try:
                timed = _timed(candidate, device, timers)
            except (PlanError, ModelError) as error:
                refused.append(str(error))
                _log.warning(f"{device.name}: {candidate.name} is left out: {error}")
                if len(refused) > count:
                    raise ModelError(
                        f"device {device.name}: its compiler refuses {len(refused)} stages, the first because: "
                        f"{refused[0]}; give models that it takes as they are"
                    ) from error
                continue
            if timed.spread <= MOST_SPREAD:
                times.append(timed)
                continue
            varying.append(f"{candidate.name}: its times vary by {timed.spread:.0%} from run to run")
            _log.warning(f"{device.name}: {varying[-1]}; it is left out")
            if len(varying) > count:
                raise ProfileError(
                    f"device {device.name}: the times of {len(varying)} stages vary too much to be fitted, such as "
                    f"{varying[0]}; stop other programs, fix its clocks or let it cool down, and measure again"
                )

    def choose(wanted: int) -> None:
        while len(times) < wanted and pool:
            measure(next_stages(model, pool, wanted - len(times), measured=times))

    measure(_extremes(pool, prior)[: count // 2])
    choose(count // 2)
    if len(times) >= LEAST_STAGES:
        with suppress(ProfileError):  # the other half may yet explain what does not fit
            model = calibrated(prior, times).model
    while len(times) < count and expected_error(model, pool, times) > enough:
        choose(len(times) + 1)
    if throttling.look_now() or throttling.begun:
        _log.warning(
            f"the machine was throttled while {device.name} was measured ({throttling.begun}): a cooler machine is "
            "faster. Let it cool down, or choose a lower power mode, and calibrate again"
        )
    found = _fitted(device, prior, times)
    for line in found.doubtful:
        _log.warning(f"{device.name}: {line}")
    return Measuring(device, found, tuple(times), tuple(pool))


def _computable(device: Device, models: Sequence[CompiledModel]) -> list[Candidate]:
    """Return stages to choose from, of what the device computes of each model."""
    computed: dict[str, set[str]] = {}
    for compiled in models:
        names = set(compiled.computes(device))
        if not names:
            raise ModelError(
                f"device {device.name} computes no operator of {compiled.graph.name}; give other models for it"
            )
        computed[compiled.graph.fingerprint] = names
    found = candidates([compiled.graph for compiled in models])
    return [candidate for candidate in found if computed[candidate.graph.fingerprint].issuperset(candidate.operators)]


def _extremes(pool: Sequence[Candidate], prior: DeviceModel) -> list[Candidate]:
    """Return the longest stage of each network, mostly all of it, and then the quickest of each.

    Plans consist of long stages. Short ones tell what a call takes, and the fit is judged by leaving out networks: each
    must have some.
    """
    seconds = stage_table([(candidate.graph, candidate.operators) for candidate in pool]).seconds(prior)
    longest: dict[str, int] = {}
    quickest: dict[str, int] = {}
    for index, candidate in enumerate(pool):
        network = candidate.graph.fingerprint
        if len(candidate.operators) > len(pool[longest.setdefault(network, index)].operators):
            longest[network] = index
        if seconds[index] < seconds[quickest.setdefault(network, index)]:
            quickest[network] = index
    return [pool[index] for index in dict.fromkeys((*longest.values(), *quickest.values()))]


def _timed(candidate: Candidate, device: Device, timers: Mapping[str, SegmentTimer]) -> StageTime:
    """Return the steadiest of up to TRIES measurements; one that is steady is enough."""
    graph, operators = candidate.graph, candidate.operators
    try:
        tries = [timers[graph.fingerprint](operators, device)]
        while tries[-1].spread > STEADY_SPREAD and len(tries) < TRIES:
            tries.append(timers[graph.fingerprint](operators, device))
    except PipelineError:
        raise
    except Exception as error:  # whatever a device's library raises
        raise ProfileError(
            f"device {device.name} failed at {candidate.name}: {type(error).__name__}: {error}; see "
            "whether `tvm-pipeline profile` runs the model there"
        ) from error
    steadiest = min(tries, key=lambda timed: timed.spread)
    return StageTime(graph, tuple(operators), steadiest.seconds, steadiest.spread)


def _fitted(device: Device, prior: DeviceModel, times: Sequence[StageTime]) -> Calibration:
    try:
        return calibrated(prior, times)
    except ProfileError as error:
        raise ProfileError(f"device {device.name}: {error}") from error
