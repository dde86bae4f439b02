"""The plan of a whole application: the model of a bundle with the host work around it.

The host work is measured on a stretch of the real source, planned with the model's operators, and the candidates that
the predictions cannot tell apart run side by side on that stretch. What was found is kept for the next run of the same
application, in a folder of the cache. A bundle that was compiled for an application brings it along.

Read next: rehearsals.py and host_profile.py (measuring), planning/ (planning), runtime/verification.py
(running side by side).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline import Bundle, Decision, OperatorGraph, Plan, Platform, Problem, Profile, Stage, __version__, plan
from tvm_pipeline.addresses import HIDDEN
from tvm_pipeline.core.plan import cost_key, describe
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.cost.under_load import FrameDeadline, in_time, with_latencies
from tvm_pipeline.errors import BundleError, LimitMissedError, NoPlanError, OptionError, PlanError, ProfileError
from tvm_pipeline.files import cache_folder, keep, read_kept
from tvm_pipeline.power import Meter
from tvm_pipeline.runtime.verification import verified, with_fewest_inside
from tvm_pipeline.workflow.steps import given_plan
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.result_files import ResultFiles
from tvm_pipeline_video.service.result_lines import result_line
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.service.video_extra import (
    Analysis,
    Follow,
    Frame,
    HostSetting,
    Interpretation,
    Rehearsal,
    Request,
    interpret,
    profile_host,
)

# A plan for a source of a fixed rate must be able to take so many more frames than come.
RATE_MARGIN = 0.1
_FORMAT = 2  # of what is kept of an application
MOST_KEPT = 200  # applications in the cache, of some 100 KB each


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A plan of a model with the host work around it.

    Attributes:
        problem: what was planned for; its graph holds the model's operators and the host's.
        decision: the plan, its candidates, and what was measured of them; None where the plan was given.
        rate_fps: the frames a second that come; None where the source gives them as fast as they are taken.
        deadline: that was asked for, whether the plan keeps it or not.
        measured: measures the application and plans it; None where the plan does not follow from shapes alone.
    """

    problem: Problem
    plan: Plan
    decision: Decision | None = None
    rate_fps: float | None = None
    deadline: FrameDeadline | None = None
    measured: Callable[[], HostPlan] | None = None

    @property
    def has_host(self) -> bool:
        """Whether the plan holds host work, or the model alone."""
        return any(operator.is_host for operator in self.problem.graph.operators)


class _KeptPlan(msgspec.Struct):
    """What is kept of a HostPlan for the next run of the same application."""

    profile: Profile
    decision: Decision


def plan_with_host(
    bundle: Bundle,
    rehearsal: Rehearsal,
    usual: Problem,
    rate_fps: float | None,
    verify_s: float,
    *,
    listener: Listener,
    given: Plan | Path | None = None,
    key: str = "",
    fresh: bool = False,
    meter: Meter | None = None,
    deadline: FrameDeadline | None = None,
    first: HostPlan | None = None,
) -> HostPlan:
    """Return the plan of an application: as the bundle has it, as it was planned before, or measured and planned now.

    Args:
        rehearsal: the application on a stretch of its source.
        usual: the problem of the bundle, with the objective and the limits.
        rate_fps: the frames a second that come; None where the source gives frames as fast as they are taken.
        verify_s: how long candidates may run side by side.
        given: a plan of the application, or of the model to run with the host work around it, or its file; None to
            plan.
        key: names the application in the cache; empty where nothing is to be kept.
        fresh: measure and plan anew, also where that was done before.
        meter: samples a sensor of power, for candidates of least energy.
        listener: hears what is being done, and why.
        deadline: of the frames; see `kept_in_time`.
        first: the plan to begin with, where nothing is to be measured now.

    Raises:
        ProfileError: no device of the platform can run host work.
        NoPlanError: no plan is possible.
        PipelineError: the source broke, or the decoder failed.
    """
    graph, known = rehearsal.graph, ApplicationRecord.of(bundle)
    plain = not (given or fresh or rate_fps or usual.min_throughput_fps or usual.max_latency_s)
    if known and plain and usual.objective == bundle.plan.objective:
        if not (differs := rehearsal.setting.differences(known.setting)):
            return HostPlan(usual, judged(usual, bundle.plan), bundle.decision)
        listener.say(f"the bundle was planned for another application ({differs}), so it is measured and planned anew")
    path = cache_folder() / "applications" / f"{key}.json"
    if key and not fresh and (before := _kept(path)) is not None:
        try:
            problem = _requested(usual, graph, before.profile, rate_fps)
            plan = judged(replace(problem, min_throughput_fps=None), before.decision.plan)
            plan = plan if rate_fps is None else at_rate(problem, plan, rate_fps)
        except (PlanError, ProfileError):
            pass  # it is of another version: plan anew
        else:
            listener.say(f"planned for this bundle, source and decoder before; `fresh` measures again ({path})")
            alone = replace(before.decision, plan=plan, candidates=(plan,))
            decision = None if given else before.decision
            return HostPlan(problem, kept_in_time(problem, alone, deadline, listener).plan, decision)
    if first:
        return first
    profile = profile_host(rehearsal, bundle.compiled, bundle.platform, bundle.profile)
    problem = _requested(usual, graph, profile, rate_fps)
    if given:
        plan = given_plan(problem, given, with_host) if isinstance(given, Path) else with_host(problem, given)
        alone = Decision(plan, (plan,), "", asked=True)
        if key:
            _keep(path, _KeptPlan(profile, alone))
        return HostPlan(problem, kept_in_time(problem, alone, deadline, listener).plan)
    problem, decision = _decided(problem, rate_fps, listener)
    run = rehearsal.runner(bundle.compiled, bundle.platform, rate_fps)
    decision = verified(problem, decision, run, verify_s, meter, rate_fps)
    decision = with_fewest_inside(problem, decision, run, verify_s)
    decision = kept_in_time(problem, decision, deadline, listener)
    listener.say(f"plan: {decision.why}")
    if key:
        _keep(path, _KeptPlan(profile, decision))
    return HostPlan(problem, decision.plan, decision)


def kept_in_time(problem: Problem, decision: Decision, deadline: FrameDeadline | None, listener: Listener) -> Decision:
    """Return the decision for the candidate that keeps a deadline; where none does, tell what would be kept."""
    try:
        return in_time(problem, decision, deadline) if deadline else decision
    except LimitMissedError as error:
        listener.warn(f"{error}; until then frames are late")
        return decision


def with_host(problem: Problem, plan: Plan) -> Plan:
    """Return the best plan that has the host operators around the stages of a plan, where it lacks them.

    Raises:
        PlanError: they can stand nowhere; the message gives the reason.
    """
    names = problem.graph.operator_names
    known = (replace(s, operators=tuple(name for name in s.operators if name in names)) for s in plan.stages)
    unknown = {name for stage in plan.stages for name in stage.operators} - {*names}
    if others := sorted(name for name in unknown if not name.startswith("host/")):
        raise PlanError(f"it names operator {others[0]}, which {problem.graph.name} does not have")
    plan = replace(plan, stages=tuple(stage for stage in known if stage.operators))  # it may be of another application
    own = {name for stage in plan.stages for name in stage.operators}
    if len(own) == len(names):
        return judged(problem, plan)
    first = next((index for index, name in enumerate(names) if name in own), 0)
    before, after = names[:first], [name for name in names[first:] if name not in own]
    best: Plan | None = None
    refusal: PlanError | None = None
    for front, back in product((None, *problem.platform.devices), repeat=2):
        stages = list(plan.stages)
        if front is None:
            stages[0] = replace(stages[0], operators=(*before, *stages[0].operators))
        else:
            stages.insert(0, Stage((front.name,), tuple(before)))
        if back is None:
            stages[-1] = replace(stages[-1], operators=(*stages[-1].operators, *after))
        else:
            stages.append(Stage((back.name,), tuple(after)))
        try:
            found = judged(problem, Plan(plan.graph, plan.scheduler, problem.objective, tuple(stages), plan.predicted))
        except PlanError as error:
            refusal = refusal or error
            continue
        if best is None or cost_key(found) < cost_key(best):
            best = found
    if best is None:
        raise PlanError(f"no device can do the host work around this plan: {refusal}") from refusal
    return best


def application_key(bundle: Path, problem: Problem, rehearsal: Rehearsal, *load: object) -> str:
    """Return what names an application in the cache: its bundle, its source and decoder, and what is planned for.

    Args:
        load: the frames a second that come, and their deadline and the plan that stays, where there is one.
    """
    found = bundle.stat()
    asked = problem.objective, problem.min_throughput_fps, problem.max_latency_s, *load
    parts = (
        str(bundle.resolve()),
        found.st_mtime_ns,
        found.st_size,
        asdict(rehearsal.setting),
        asked,
        __version__,
        _FORMAT,
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def _keep(path: Path, found: _KeptPlan) -> None:
    """Write what is to be kept, and remove the oldest of what is too much."""
    keep(path, msgspec.json.encode(found))
    for old in sorted(path.parent.glob("*.json"), key=lambda file: -file.stat().st_mtime)[MOST_KEPT:]:
        old.unlink(missing_ok=True)


def _kept(path: Path) -> _KeptPlan | None:
    content = read_kept(path)
    try:
        return None if content is None else msgspec.json.decode(content, type=_KeptPlan)
    except (msgspec.DecodeError, ProfileError):
        return None  # another version wrote it


def _requested(usual: Problem, graph: OperatorGraph, profile: Profile, rate_fps: float | None) -> Problem:
    """Return the problem of the whole application: where there is a rate, to keep up with it at the least latency."""
    problem = replace(usual, graph=graph, profile=profile)
    if rate_fps is None:
        return problem
    objective = problem.objective if problem.objective in ("latency", "energy") else "latency"
    floor_fps = max(rate_fps * (1 + RATE_MARGIN), problem.min_throughput_fps or 0.0)
    return replace(problem, objective=objective, min_throughput_fps=floor_fps, max_latency_s=None)


def _decided(problem: Problem, rate_fps: float | None, listener: Listener) -> tuple[Problem, Decision]:
    """Plan; where no plan keeps up with the rate, tell what is missing, and plan for most frames a second."""
    try:
        decision = plan(problem)
        return problem, decision if rate_fps is None else decided_at_rate(problem, decision, rate_fps)
    except NoPlanError:
        if rate_fps is None:
            raise
    problem = replace(problem, objective="throughput", min_throughput_fps=None)
    decision = plan(problem)
    best_fps = decision.plan.predicted.throughput_fps or 0.0
    short = rate_fps * (1 + RATE_MARGIN) / max(best_fps, 1e-12)
    listener.warn(
        f"no plan keeps up with {rate_fps:g} frames a second and {RATE_MARGIN:.0%} to spare: the best makes "
        f"{best_fps:.4g}. Needed are devices {short:.2f} times as fast, a smaller input of the model, or "
        f"`policy` every={math.ceil(short)}; until then frames are late or dropped"
    )
    return problem, decision


def decided_at_rate(problem: Problem, decision: Decision, rate_fps: float) -> Decision:
    """Return the decision with the latencies of the candidates at a rate of frames, and the least of these chosen.

    Frames that come at a rate meet one another, and devices that work at the same time slow each other down.
    """
    candidates = [at_rate(problem, plan, rate_fps) for plan in decision.candidates]
    if problem.objective == "latency":
        candidates.sort(key=cost_key)
    best = candidates[0]
    why = f"{decision.why}; simulated at {rate_fps:g} frames a second, {describe(best)} has the best {best.objective}"
    return replace(decision, plan=best, candidates=tuple(candidates), why=why)


def at_rate(problem: Problem, plan: Plan, rate_fps: float) -> Plan:
    """Return the plan with the median latency of frames that come at a rate, as the simulator has it."""
    found = with_latencies(problem, plan, (), rate_fps).predicted
    return replace(plan, predicted=replace(found, latency_s=found.latency_p50_s), status="feasible")


def rehearsed_application(
    model: OperatorGraph,
    platform: Platform,
    spec: str,
    found: Interpretation,
    *,
    video: str = "",
    lines: bool = False,
    overlay: bool = False,
    trackers: Callable[[], Follow] | None = None,
    hardware: str = "auto",
) -> Rehearsal:
    """Return an application on a stretch of its source.

    Args:
        found: how the model is read.
        video: the extension of the video that it writes; empty without one.
        lines: whether it writes a line for each frame.
        overlay: whether it draws the rate and the latency into the video.
        trackers: makes what follows objects; None where none are followed.
        hardware: what decodes the source, as `open_source` takes it.

    Raises:
        VideoError: the source cannot be opened.
    """

    @contextmanager
    def scratch(folder: Path, fps: float) -> Iterator[Callable[[Analysis[Frame], Any], None]]:
        output = folder / f"scratch{video}" if video else None
        results = os.devnull if lines else None  # lines are small: making them is what takes time
        with ResultFiles(Settings(output=output, results=results), fps, False) as files:
            yield lambda seen, picture: files.write(
                seen,
                result_line(seen, decoded=found.decode is not None, stand_ins=platform.stand_ins),
                "",
                picture,
            )

    opens = scratch if video or lines else None
    return Rehearsal(
        model,
        spec,
        found.preprocessing,
        found.decode,
        decoder=found.name,
        video=video,
        lines=lines,
        overlay=overlay,
        trackers=trackers,
        scratch=opens,
        hardware=hardware,
    )


@dataclass(frozen=True, slots=True)
class ApplicationRecord:
    """The application that a bundle was compiled for.

    Attributes:
        source: what was measured on, as `open_source` takes it, without secrets (`addresses.shown`).
        decoder: the decoder as it was requested; empty where one was to be recognised, if there is one.
        setting: what the cost of the host operators depends on.
        labels, threshold, classes: as `Request` has them.
    """

    source: str
    decoder: str
    setting: HostSetting
    labels: tuple[str, ...] = ()
    threshold: float | None = None
    classes: tuple[str, ...] = ()

    @property
    def request(self) -> Request:
        """What was wanted of the decoder."""
        return Request(self.decoder, self.labels, self.threshold, self.classes)

    @classmethod
    def of(cls, bundle: Bundle) -> ApplicationRecord | None:
        """Return the record of a bundle, None where it holds the model alone; raise BundleError where it is damaged."""
        try:
            return None if bundle.application is None else msgspec.convert(bundle.application, cls)
        except msgspec.ValidationError as error:
            raise BundleError(
                f"application.json of a bundle of {bundle.graph.name}: {error}; compile it again"
            ) from error

    def rehearsal(self, bundle: Bundle, source: str = "") -> Rehearsal:
        """Return the application again, on a source, or its own; raise as `rehearsed_application` does.

        Raises OptionError, too, where its own has a secret, which no bundle holds.
        """
        if not source and HIDDEN in self.source:
            raise OptionError(
                f"the bundle was compiled on {self.source}, and holds no password; give the address as `source`",
                option="source",
            )
        model, setting = bundle.compiled.graph, self.setting
        found = interpret(model, bundle.metadata, self.request, bundle.preprocessing)
        return rehearsed_application(
            model,
            bundle.platform,
            source or self.source,
            found,
            video=setting.video,
            lines=setting.lines,
            overlay=setting.overlay,
        )
