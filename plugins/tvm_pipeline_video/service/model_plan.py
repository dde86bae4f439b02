"""The plan by which a model of a run begins: given, known from before, measured now, or from shapes alone.

A video file runs at once, unless the user asked something of the plan: each core runs whole frames
(`workflow/predicted.py`). The frames of a long video then wait once, while the application is measured and planned; the
others run by that plan. A short video ends before that pays.

Read next: host_planning.py, which measures and plans; running_model.py, which runs the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tvm_pipeline import Bundle, Decision, Platform, Problem
from tvm_pipeline.addresses import shown
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.cost.under_load import as_measured, frame_deadline, with_latencies
from tvm_pipeline.power import Meter
from tvm_pipeline.runtime.replanning import quick_plan
from tvm_pipeline.workflow.steps import chosen_plan, given_plan, plan_from_shapes
from tvm_pipeline_video.service.control import requested_problem
from tvm_pipeline_video.service.host_planning import (
    HostPlan,
    application_key,
    kept_in_time,
    plan_with_host,
    rehearsed_application,
)
from tvm_pipeline_video.service.inputs import is_live, taken_fps
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.model_bundle import is_model, is_unmeasured, measured_bundle
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.service.video_extra import Interpretation, Rehearsal, Trackers, host_devices

# The first frames tell how long the others take. Measuring takes half a minute, and finds a plan that is some percent
# faster among cores, and some times as fast where there are other devices.
SEEN_S, PAYS_S, PAYS_WITH_OTHERS_S = 2.0, 600.0, 60.0


def begins_at_once(settings: Settings) -> bool:
    """Return whether a model may run before it was measured: alone, on one file, with nothing asked of its plan.

    A camera cannot be read a second time to measure on it, and its frames do not wait.
    """
    asked = (
        *(settings.plan_first, settings.plan, settings.objective, settings.min_throughput, settings.max_latency),
        *(settings.rate, settings.deadline, settings.control, settings.adapt == "off", settings.fresh),
        *(settings.platform, settings.device, settings.isolate, settings.wait, settings.policy, any(settings.tag)),
    )
    return settings.models == len(settings.source) == 1 and not any(asked) and not is_live(settings.source[0])


def _is_left_open(bundle: Bundle) -> bool:
    """Return whether nothing was asked of a bundle's plan, and no device is known to be faster than all cores."""
    plan, platform = bundle.plan, bundle.platform
    asked = bundle.application or _was_given(bundle) or plan.objective != "throughput" or plan.power_mode
    return not asked and plan.batch == 1 and all(device.cores and not device.stand_in for device in platform.devices)


def pays(frames: int, seconds: float, left: float, platform: Platform) -> bool:
    """Return whether frames should wait until the application is measured.

    Args:
        frames: that came out in so many `seconds`.
        left: that are still to come; infinite where that is not known.
        platform: that of the model. Devices without cores are in no plan that follows from shapes.
    """
    has_others = not all(device.cores for device in platform.devices)
    return left * seconds > (PAYS_WITH_OTHERS_S if has_others else PAYS_S) * max(frames, 1)


def planned_model(
    settings: Settings,
    path: Path,
    bundle: Bundle,
    plan: Path | None,
    sources: tuple[Sequence[str], Sequence[str | None]],
    found: Interpretation,
    listener: Listener,
    meter: Meter | None,
) -> HostPlan:
    """Return the plan of a model with the host work around it; of the model alone where that cannot be planned.

    Args:
        path: the bundle's.
        sources: the model's, and their policies; host work is measured on the first.
    """
    at_once = begins_at_once(settings)  # where the application was not measured, the plan follows from shapes
    is_new = at_once and is_model(settings.bundle[0]) and is_unmeasured(bundle)
    if not is_new and not host_devices(bundle.platform, bundle.profile):
        listener.say(
            "reading, decoding and writing frames is in no plan: no device of the platform is a CPU that could"
        )
        alone = plan_alone(settings, bundle, plan)
        deadline = frame_deadline(settings.deadline, settings.miss, settings.rate) if settings.deadline else None
        chosen = kept_in_time(alone.problem, Decision(alone.plan, (alone.plan,), ""), deadline, listener).plan
        return _with_latencies(replace(alone, plan=chosen, rate_fps=settings.rate, deadline=deadline), bundle)
    rehearsal = rehearsed_application(
        bundle.compiled.graph,
        bundle.platform,
        sources[0][0],
        found,
        video=settings.output.suffix.lower() if settings.output else "",
        lines=bool(settings.results),
        overlay=settings.overlay,
        trackers=partial(Trackers, followed) if (followed := settings.followed()) else None,
        hardware=settings.hardware_decoding,
    )
    if decoding := rehearsal.setting.decoding(settings.hardware_decoding):
        listener.say(f"{shown(sources[0][0])}: {decoding}")
    planned = partial(_with_host_work, settings, path, plan, sources, rehearsal, listener, meter)
    may_begin = is_new or (at_once and _is_left_open(bundle))
    shapes = plan_from_shapes(bundle.compiled, bundle.platform, rehearsal.graph) if may_begin else None

    def measured() -> HostPlan:
        return planned(replace(measured_bundle(path), compiled=bundle.compiled) if is_new else bundle)

    if shapes is None:
        return measured()
    first = HostPlan(*shapes, measured=measured)
    return first if is_new else planned(bundle, first)


def _with_host_work(
    settings: Settings,
    path: Path,
    plan: Path | None,
    sources: tuple[Sequence[str], Sequence[str | None]],
    rehearsal: Rehearsal,
    listener: Listener,
    meter: Meter | None,
    bundle: Bundle,
    first: HostPlan | None = None,
) -> HostPlan:
    """Return the plan of a measured model with the host work around it; `first` where the application is not known.

    The plan is that of a file, or that of a bundle which was compiled with a given plan; else the best one for
    the objective and the limits that the settings request, or for the bundle's own objective.
    """
    usual, own = chosen_plan(bundle)
    problem = requested_problem(usual, settings.objective, settings.min_throughput, settings.max_latency)
    asked = bool(settings.objective or settings.min_throughput or settings.max_latency)
    own_fps = taken_fps(rehearsal.fps, *sources) if rehearsal.setting.live and rehearsal.fps else None
    rate_fps = settings.rate or (None if asked and not settings.deadline else own_fps)
    deadline = frame_deadline(settings.deadline, settings.miss, rate_fps) if settings.deadline else None
    stays = own if not asked and _was_given(bundle) else None
    planned = plan_with_host(
        bundle,
        rehearsal,
        problem,
        rate_fps,
        settings.verify,
        given=plan or stays,
        key="" if plan else application_key(path, problem, rehearsal, rate_fps, deadline, stays and str(stays)),
        fresh=settings.fresh,
        listener=listener,
        meter=meter,
        deadline=deadline,
        first=first,
    )
    if planned is first:
        return planned
    return _with_latencies(replace(planned, rate_fps=rate_fps, deadline=deadline), bundle)


def _with_latencies(planned: HostPlan, bundle: Bundle) -> HostPlan:
    """Return the plan with the latencies that are to be expected, by what was measured when it was chosen."""
    decision = planned.decision or bundle.decision
    problem, plan, rate_fps = planned.problem, planned.plan, planned.rate_fps
    if decision is None:
        return replace(planned, plan=with_latencies(problem, plan, (), rate_fps))
    return replace(planned, plan=as_measured(problem, plan, decision, rate_fps))


def _was_given(bundle: Bundle) -> bool:
    """Return whether a bundle was compiled with a plan or a scheduler that was asked for, so that it is kept."""
    return not bundle.application and (bundle.decision is None or bundle.decision.asked)


def plan_alone(settings: Settings, bundle: Bundle, plan: Path | None = None) -> HostPlan:
    """Return the plan of the model alone, where the work around it cannot be measured or no device could do it.

    It is that of a file, the best one for what the settings request, or the bundle's own without its host operators.
    """
    graph = bundle.compiled.graph
    own = Problem(graph, bundle.platform, bundle.profile, bundle.plan.objective)
    problem = requested_problem(own, settings.objective, settings.min_throughput, settings.max_latency)
    if plan:
        found = given_plan(problem, plan)
        if found.objective != problem.objective:
            found = replace(found, objective=problem.objective, status="feasible", bound=None)
        return HostPlan(problem, found)
    if settings.objective or settings.min_throughput or settings.max_latency:
        return HostPlan(problem, quick_plan(problem))
    names = set(graph.operator_names)
    stages = (
        replace(stage, operators=tuple(name for name in stage.operators if name in names))
        for stage in bundle.plan.stages
    )
    alone = replace(bundle.plan, stages=tuple(stage for stage in stages if stage.operators))
    return HostPlan(problem, judged(problem, alone))
