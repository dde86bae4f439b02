"""Find the installed backends, their devices, and the backend that compiles for a platform.

The order in which backends are installed or listed decides nothing. Several backends on one platform work together in
two ways. If one of them compiles for the devices of all others (`Backend.serves`), it has the platform alone. Otherwise
one of them must cut files of the model's format (`Backend.cuts`), or several that are engines; see `sliced.py`. Any
other platform file is refused. If a detected platform has backends that cannot share the model, one rule decides and is
logged: a backend that comes with tvm-pipeline precedes others, so that installing another changes nothing; then the
name decides. The backend that serves it, and others that this one serves, stay with it.
"""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import MappingProxyType

from tvm_pipeline.backends.contract import Backend
from tvm_pipeline.backends.sliced import SlicedBackend, cutting_backends
from tvm_pipeline.core.model import FLOAT32, Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlatformError, nearest
from tvm_pipeline.plugins import entry_points

GROUP = "tvm_pipeline.backends"
OWN_PACKAGE = "tvm-pipeline"

# Engines run, on CPU cores, models that the backend of these cores refuses. `detect` of an engine finds no cores: a
# platform file names it, or `compile` turns to it if TVM refuses a model and nobody said what is to run it
# (`workflow/engine_fallback.py`). It cuts files of its format, so that it and TVM share a model. By format:
ENGINES = MappingProxyType({"onnx": "onnxruntime", "tflite": "edgetpu"})

_log = logging.getLogger(__name__)
_closed_at_exit: set[int] = set()


def find_backend(name: str) -> Backend:
    """Return the backend that an installed package registered as `name`; it is closed when the process ends.

    Raises:
        PlatformError: no package did, two did, or what it needs is not installed.
    """
    installed = entry_points(group=GROUP)
    found = {entry.value: entry for entry in installed if entry.name == name}
    if not found:
        known = sorted({entry.name for entry in installed})
        advice = f"installed are {', '.join(known) or 'none: install the package with `pip install .`'}"
        raise PlatformError(f"there is no backend {name}; {nearest(name, known, advice)}")
    if len(found) > 1:
        packages = " and ".join(sorted(f"{_package(entry)} ({entry.value})" for entry in found.values()))
        raise PlatformError(f"two packages bring a backend called {name}: {packages}; uninstall one of them")
    [entry] = found.values()
    try:
        backend: Backend = entry.load()
    except ImportError as error:
        raise PlatformError(f"the backend {name} cannot be used: {error}; see the extras in docs/install.md") from error
    if id(backend) not in _closed_at_exit:
        _closed_at_exit.add(id(backend))
        atexit.register(backend.close)
    return backend


def engine_for(model: Model, cores: Sequence[Device]) -> tuple[Backend, tuple[Device, ...]]:
    """Return the engine for a model's format, with its devices on the cores of others.

    Raises:
        PlatformError: there is no engine for the format, or it is not installed; the message says what to install.
    """
    if model.format not in ENGINES:
        raise PlatformError(f"there is no other engine for {model.format} models")
    engine = find_backend(ENGINES[model.format])
    if not engine.engine:
        raise PlatformError(f"the backend {engine.name} that is installed is no engine; upgrade it")
    return engine, tuple(engine.engine_devices(cores))


def known_engines() -> dict[str, Backend]:
    """Return the engines whose backends can be imported, by their names in lower case."""
    found = {}
    for name in _installed():
        with suppress(PlatformError):  # `left_out` tells why
            backend = find_backend(name)
            if backend.engine:
                found[backend.engine.lower()] = backend
    return found


def compose(names: Iterable[str]) -> Backend:
    """Return the backend that compiles for devices of all these backends.

    It is the only one, or the one that serves all others, or a SlicedBackend.
    """
    backends = {name: find_backend(name) for name in sorted(set(names))}
    alone = [name for name, backend in backends.items() if backends.keys() <= {name, *backend.serves}]
    return backends[_preferred(alone)] if alone else SlicedBackend(list(backends.values()))


def platform_backend(platform: Platform) -> Backend:
    """Return the backend that compiles for all devices of a platform."""
    return compose(device.backend for device in platform.devices)


def served_devices(backend: Backend, platform: Platform) -> tuple[Device, ...]:
    """Return the devices of a platform for which `backend` compiles although they are of other backends."""
    return tuple(device for device in platform.devices if device.backend in backend.serves)


def settle_platform(platform: Platform, *, elsewhere: bool = False) -> tuple[Backend, Platform]:
    """Return the backend that compiles for a platform, and the platform with each device settled on this machine.

    Args:
        elsewhere: the devices are another machine's, and were settled there (`Backend.settle_elsewhere`).

    Raises:
        PlatformError: a device cannot be used here, or not beside another one; or it cannot be compiled for here.

    Examples:
        >>> from tvm_pipeline.testing import example_backend, installed
        >>> with installed(example_backend()):
        ...     backend, platform = settle_platform(Platform("box", (Device("d1", "fake"),)))
        >>> backend.name, [device.stand_in for device in platform.devices]
        ('fake', [''])
    """
    backend = platform_backend(platform)
    if elsewhere:
        return backend, replace(platform, devices=_settled_elsewhere(backend, platform.devices))
    devices = tuple(find_backend(device.backend).settle(device) for device in platform.devices)
    for name in dict.fromkeys(device.backend for device in devices):
        find_backend(name).check_together([device for device in devices if device.backend == name])
    return backend, replace(platform, devices=devices)


def _settled_elsewhere(backend: Backend, devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return devices of another machine; raise PlatformError where a backend does not compile for them here."""
    settled = [find_backend(device.backend).settle_elsewhere(device) for device in devices]
    if isinstance(backend, SlicedBackend):
        raise PlatformError(
            f"devices {_listed(settled)} share a model by slices of its file, which {backend.name} compile where the "
            "devices are. Run the command there, or give `platform` with a file of the devices of one backend"
        )
    return tuple(settled)


def versions_of(platform: Platform) -> dict[str, str]:
    """Return the versions of the software of all backends of the platform: a saved model loads where they are equal."""
    names = dict.fromkeys(device.backend for device in platform.devices)
    return {key: version for name in names for key, version in find_backend(name).versions().items()}


def description(device: Device) -> str:
    """Return what a settled device is, as a user knows it; empty where its backend does not tell."""
    return find_backend(device.backend).describe(device)


def state(device: Device) -> str:
    """Return where a settled device is plugged in and how it is now; empty where its backend does not tell."""
    return find_backend(device.backend).state(device)


def own_process(device: Device) -> bool:
    """Return whether all stages on a settled device are to share a process of their own (`Backend.own_process`)."""
    return find_backend(device.backend).own_process(device)


def left_out() -> list[str]:
    """Return a line for each backend that cannot be used, and for each device that its backend does not offer."""
    lines: list[str] = []
    for name in _installed():
        try:
            lines += find_backend(name).left_out()
        except PlatformError as error:
            lines.append(str(error))
    return lines


def detect_platform(model: Model | None = None) -> Platform:
    """Return this machine: the devices of every installed backend, or of those that can compile `model` together.

    If devices of several backends have one name, the backend's name is put in front (`host-cpu0`). Devices that are
    left out are logged with the reason.

    Raises:
        PlatformError: nothing is left.

    Examples:
        >>> from tvm_pipeline.testing import example_backend, installed
        >>> with installed(example_backend()):  # an example needs devices that every machine has
        ...     [device.name for device in detect_platform().devices]
        ['d0', 'd1']
    """
    found: dict[str, Sequence[Device]] = {}
    backends: dict[str, Backend] = {}
    reasons: list[str] = []
    missing: list[str] = []
    for name in _installed():
        try:
            backend = find_backend(name)
        except PlatformError as error:
            # Most machines have no device of a backend that is not installed. The command `devices` lists them all.
            (_log.warning if model and ENGINES.get(model.format) == name else _log.info)(error)
            missing.append(str(error))
            continue
        devices = backend.detect()
        refused = backend.refuses(model) if model and devices else ""
        if not refused and devices and model and model.weights != FLOAT32:
            refused = backend.refuses_weights()
        if refused:
            reasons.append(f"{_listed(devices)} left out: {refused}")
        elif devices:
            found[name], backends[name] = devices, backend
    if model:
        kept = _working_together(backends, model)
        if len(kept) < len(backends):
            reasons.append(_why_left_out(found, backends, kept, model))
        found = {name: found[name] for name in kept}
    for reason in reasons:
        _log.warning(reason)
    if not found:
        why = "; ".join([*missing, *reasons])
        raise PlatformError(why or "no backend finds a device on this machine; give `platform`")
    return Platform("this machine", _told_apart(found))


def _installed() -> list[str]:
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def _working_together(backends: Mapping[str, Backend], model: Model) -> list[str]:
    """Return the names of those that can share the model: all where one cuts its file, else by the module's rule."""
    if len(backends) < 2:
        return list(backends)
    cutting = [backend.name for backend in cutting_backends(backends.values(), model.format)]
    if not cutting:
        lead = _lead(backends)
        return [name for name in backends if name == lead or name in backends[lead].serves]
    return [name for name in backends if name not in cutting or name == _preferred(cutting)]


def _lead(backends: Mapping[str, Backend]) -> str:
    """Return the backend that compiles where none cuts the file: the preferred one, or one that serves it."""
    chosen = _preferred(backends)
    serving = [name for name, backend in backends.items() if chosen in backend.serves]
    return _preferred(serving) if serving else chosen


def _why_left_out(
    found: Mapping[str, Sequence[Device]], backends: Mapping[str, Backend], kept: Sequence[str], model: Model
) -> str:
    left = [name for name in backends if name not in kept]
    devices = _listed([device for name in left for device in found[name]])
    cutting = [backend.name for backend in cutting_backends(backends.values(), model.format)]
    chosen = _preferred(cutting or backends)
    if cutting:
        clash = f"the backends {' and '.join(cutting)} both cut {model.format} files, and one of them has to"
    else:
        clash = f"none of the backends {', '.join(backends)} cuts {model.format} files for the others"
    own = _is_own(chosen) and not all(_is_own(name) for name in left)
    rule = "comes with tvm-pipeline" if own else "is first by name"
    others = "" if cutting else "".join(f", with {name}" for name in kept if name != chosen)
    return (
        f"{devices} of {', '.join(left)} left out of {model.name}: {clash}. {chosen} is taken, since it {rule}{others}"
        "; for another choice give `platform` with a file that lists the devices"
    )


def _preferred(names: Iterable[str]) -> str:
    """Return the backend that precedes others where they cannot work together."""
    return min(names, key=lambda name: (not _is_own(name), name))


def _is_own(name: str) -> bool:
    """Return whether a backend comes with tvm-pipeline itself."""
    return any(entry.name == name and _package(entry) == OWN_PACKAGE for entry in entry_points(group=GROUP))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name.replace("_", "-") if entry.dist else "a package without a name"


def _told_apart(found: Mapping[str, Sequence[Device]]) -> tuple[Device, ...]:
    """Return all devices; a name that several backends use gets the backend's name in front."""
    used = Counter(name for devices in found.values() for name in {device.name for device in devices})
    return tuple(
        replace(device, name=f"{backend}-{device.name}") if used[device.name] > 1 else device
        for backend, devices in found.items()
        for device in devices
    )


def _listed(devices: Iterable[Device]) -> str:
    return ", ".join(device.name for device in devices)
