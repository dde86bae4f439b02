"""A bundle of a model file: `run` takes the file itself, and compiles it into the cache when it is first run.

The bundle is named by the content of the file, the shapes, the devices, the version of this package and the machine in
its power mode, so that a file is compiled anew when one of them changes. Its plan is a quick one, because
host_planning.py plans the model with the work around it. Only a run without such work searches for a plan here, and
keeps it in the bundle. Next: workflow/steps.py, which has the steps.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tvm_pipeline import Bundle, Decision, Problem, Profile, __version__, load, write_bundle
from tvm_pipeline.addresses import shown
from tvm_pipeline.errors import BundleError, NoPlanError, OptionError, PipelineError, PlatformError
from tvm_pipeline.files import cache_folder, read_bytes, temporary_folder
from tvm_pipeline.frontends import EXPORTS, Shapes, interface_of, parse_shapes
from tvm_pipeline.profiling.environment import environment
from tvm_pipeline.runtime.replanning import quick_plan
from tvm_pipeline.workflow.doubts import elsewhere_warnings
from tvm_pipeline.workflow.steps import (
    Compiled,
    compile_source,
    compiled_in,
    decide,
    measured_profile,
    opened_bundle,
    plan_from_shapes,
)
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.service.video_extra import (
    VideoError,
    check_name,
    host_devices,
    interpret,
    open_source,
    picture_input,
)

MODEL_FILES = (".onnx", ".tflite", ".relay")
CAMERA_S = 5.0  # that a camera may take to accept a connection
MOST_KEPT = 8  # bundles in the cache, each as large as its model


def is_model(path: Path) -> bool:
    """Return whether a file is a model to compile, or one that another program must export first, and no bundle."""
    return path.suffix.lower() in (*MODEL_FILES, *EXPORTS)


def settings_beside(path: Path) -> Path | None:
    """Return the TOML file beside a model file that says how a picture becomes its input; None without one."""
    beside = path.with_suffix(".toml")
    return beside if is_model(path) and beside.exists() else None


@contextmanager
def opened_model(
    path: Path,
    settings: Settings,
    listener: Listener,
    index: int = 0,
    *,
    of_pictures: bool = True,
    measured: bool = True,
) -> Iterator[tuple[Path, Bundle]]:
    """Open a bundle, or that of a model file, which is compiled if that was not done before, or if `fresh` is set.

    What makes the profile doubtful is repeated each time. Yields the path of the bundle, too, which names what else is
    kept of it.

    Args:
        settings: of them `input_shapes`, `platform`, `device` and `fresh` count, what is to be read of the model, and
            `source` and `wait`, which say whether there is work around the model.
        index: of the model among those of the settings.
        of_pictures: the model's input must be a picture.
        measured: the profile has figures. Without it, that of a model file may have none; see `model_plan.py`.

    Raises:
        ModelError: the file cannot be compiled.
        OptionError: the model's input is no picture; shapes or devices are given for a bundle, which has its own; or,
            before it is compiled, its decoder, labels or preprocessing do not fit it.
        VideoError: before it is compiled, a source cannot be opened.
        BundleError: the bundle cannot be opened.
    """
    if not is_model(path):
        for name in ("input_shapes", "platform", "device"):
            if getattr(settings, name):
                raise OptionError(
                    f"`{name}`: {path} is a bundle, which has its own; give the model file, or compile it anew",
                    option=name,
                )
        with opened_bundle(path) as bundle:
            for line in bundle.profile.warnings:
                listener.warn(f"{path} was measured so: {line}")
            yield path, bundle
        return
    shapes = parse_shapes(settings.input_shapes) if settings.input_shapes else None
    model = load(path, shapes)
    if of_pictures and model.inputs:  # else only the importer knows them
        picture_input(path.name, model.inputs)  # an error now, and not after minutes of compiling
    of_machine = ("processor", "board", "power mode", "cores")
    here = {key: value for key, value in environment({}).items() if key in of_machine}
    devices = (read_bytes(settings.platform, PlatformError) if settings.platform else b"", settings.device)
    key = hashlib.sha256(msgspec.json.encode((model.name, model.digest, __version__, here, devices))).hexdigest()[:32]
    kept = cache_folder() / "bundles" / f"{key}.tar"
    with ExitStack() as stack:
        found: Bundle | None = None
        if kept.exists() and not settings.fresh:
            try:
                found = stack.enter_context(opened_bundle(kept))
                if elsewhere_warnings(kept, found.profile, found.platform):
                    raise BundleError("its devices are connected or clocked in another way than when it was measured")
            except BundleError as error:
                listener.say(f"{path} is compiled anew: {error}")
                found = None
        if found is None:
            _check_what_runs(settings)
            if of_pictures and settings.bundle and (graph := interface_of(model)):
                beside = settings_beside(path)
                interpret(graph, model.metadata, settings.request(index), settings.preprocessing or beside)
            bundle = _compiled(path, shapes, settings, listener, measured)
            kept = _kept(bundle, kept, listener, stack)
            found = stack.enter_context(opened_bundle(kept))
        else:
            # Used now; its applications know it by when it was written.
            os.utime(kept, ns=(time.time_ns(), kept.stat().st_mtime_ns))
            for note in model.notes:
                listener.warn(note)
            for line in found.profile.warnings:
                listener.warn(f"when {path} was compiled, {line}. `fresh` measures again")
            listener.say(f"{path} was compiled before ({kept})")
        if measured and is_unmeasured(found):
            found = replace(measured_bundle(kept), compiled=found.compiled)
        around_it = settings.source and not settings.wait and host_devices(found.platform, found.profile)
        if measured and not around_it and found.decision and not found.decision.candidates:
            problem = Problem(found.graph, found.platform, found.profile)
            decision, profile = decide(problem, verify_s=0.0)
            found = replace(found, plan=decision.plan, decision=decision, profile=profile)
            write_bundle(kept, found)
        yield kept, found


def _check_what_runs(settings: Settings) -> None:
    """Raise now, and not after minutes of compiling, where a source or a decoder is not there.

    A stream is not opened: it may serve one client, once. An RTSP server must listen at its address.
    """
    for spec in () if settings.wait else settings.source:
        if "://" not in spec:
            open_source(spec).close()
        elif spec.startswith("rtsp://") and not settings.policy:  # with a policy a camera may come later
            _check_camera(spec)
    for name in settings.decoder:
        check_name(name)


def _check_camera(spec: str) -> None:
    with suppress(ValueError):  # FFmpeg reads more addresses than Python does
        where = urlsplit(spec)
        if where.hostname and "@" not in where.path + where.query + where.fragment:  # not a part of a password
            try:
                socket.create_connection((where.hostname, where.port or 554), CAMERA_S).close()
            except OSError as error:
                raise VideoError(
                    f"{shown(spec)} cannot be reached: {error.strerror or error}; see that the camera is on, and that "
                    "its address and port are these"
                ) from error


def is_unmeasured(bundle: Bundle) -> bool:
    """Return whether the bundle of a model file was not measured yet: nothing was decided by its figures."""
    return bundle.decision is None


def measured_bundle(path: Path) -> Bundle:
    """Return the bundle of a model file that has no profile yet, measured now, and keep it so; its model is closed."""
    with opened_bundle(path) as bundle:
        found = _measured(compiled_in(bundle))
        write_bundle(path, found)
        return found


def _measured(made: Compiled) -> Bundle:
    """Return the bundle of a compiled model, with a quick plan.

    Its decision has no candidates, by which it is known that no plan was searched for.
    """
    graph, profile = made.compiled.graph, measured_profile(made)
    problem = Problem(graph, made.platform, profile)
    try:
        decision = Decision(quick_plan(problem), (), "no other plan of the model alone was considered")
    except NoPlanError:  # none that simple keeps within the devices' memory
        decision, profile = decide(problem, verify_s=0.0)
    return Bundle(graph, made.platform, profile, decision.plan, made.compiled, None, decision, None, made.metadata)


def _unmeasured(made: Compiled) -> Bundle | None:
    """Return the bundle of a compiled model that was not measured; None where no plan follows from shapes alone."""
    graph = made.compiled.graph
    if (first := plan_from_shapes(made.compiled, made.platform, graph)) is None:
        return None
    nothing = Profile(graph.name, graph.fingerprint, {})
    return Bundle(graph, made.platform, nothing, first[1], made.compiled, metadata=made.metadata)


def _compiled(path: Path, shapes: Shapes | None, settings: Settings, listener: Listener, measured: bool) -> Bundle:
    """Return the bundle of a model file, compiled now."""
    listener.say(f"{path} is compiled for this machine, once; `tvm-pipeline compile` offers more choices")
    made = compile_source(path, shapes, settings.platform, devices=settings.device)
    return (None if measured else _unmeasured(made)) or _measured(made)


def _kept(bundle: Bundle, kept: Path, listener: Listener, stack: ExitStack) -> Path:
    """Write a bundle into the cache, remove those that were not used for longest, and return its path.

    Where the cache is full, it is among the temporary files as long as `stack`.
    """
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_bundle(kept, bundle)
    except (OSError, PipelineError) as error:
        here = stack.enter_context(temporary_folder()) / kept.name
        write_bundle(here, bundle)
        listener.warn(f"it is not kept for the next run: {error}; or set TVM_PIPELINE_CACHE")
        return here
    listener.say(f"kept for the next run: {kept}")
    for old in sorted(kept.parent.glob("*.tar"), key=lambda file: -file.stat().st_atime)[MOST_KEPT:]:
        old.unlink(missing_ok=True)
    return kept
