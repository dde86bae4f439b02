"""Engines that compete: each that was asked for has devices on the same CPU cores, and the planner chooses.

An engine's devices share cores with those of the others, so a plan never uses two of them on one core; each stage may
have another engine. Next: `backends/registry.py`, and `engine_fallback.py`, for models that TVM refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm_pipeline.backends.contract import Backend
from tvm_pipeline.backends.registry import known_engines
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import OptionError, PlatformError, nearest

TVM = "tvm"  # compiles for every backend that is no engine


def with_engines(platform: Platform, engines: str, model_format: str = "") -> Platform:
    """Return a platform with the devices of some engines alone.

    An engine that has no device there gets those that it offers: on the cores of the host's devices, and others that it
    finds, each with the engine's name in front.

    Args:
        engines: names, separated by commas: `tvm,openvino,onnxruntime`; empty leaves the platform as it is.
        model_format: of the file that they are to run; empty for any.

    Raises:
        OptionError: a word names no engine, or one of another format.
        PlatformError: an engine is not installed, or nothing is left.
    """
    if not engines:
        return platform
    engines_here = known_engines()
    words = list(dict.fromkeys(word.strip().lower() for word in engines.split(",") if word.strip()))
    for word in words:
        if word not in (TVM, *engines_here):
            advice = nearest(word, [TVM, *engines_here])
            raise OptionError(f"`engines` {word}: there is no such engine; {advice}", option="engines", value=word)
        if model_format and word != TVM and model_format not in engines_here[word].cuts:
            able = ", ".join([TVM, *(name for name, each in engines_here.items() if model_format in each.cuts)])
            raise OptionError(
                f"`engines` {word}: it takes no {model_format} models; these may: {able}", option="engines", value=word
            )
    owner = {backend.name: name for name, backend in engines_here.items()}
    kept = [device for device in platform.devices if owner.get(device.backend, TVM) in words]
    cores = [device for device in platform.devices if device.backend == "host"]
    for word in words:
        if word != TVM and word not in {owner.get(device.backend) for device in kept}:
            kept += _offered(word, engines_here[word], cores)
    if not kept:
        raise PlatformError(f"{platform.name} has no device of {engines}; `tvm-pipeline devices` lists what is here")
    names = {device.name for device in kept}
    links = tuple(link for link in platform.links if {link.source, link.destination} <= names)
    return replace(platform, devices=tuple(kept), links=links)


def _offered(name: str, engine: Backend, cores: Sequence[Device]) -> Iterator[Device]:
    for device in engine.engine_devices(cores):
        target = engine.fastest_target if device.cores else ""
        yield replace(device, name=f"{name}-{device.name}", target=target or device.target)
