"""Sessions of onnxruntime: a file is optimised once, as a whole, and each part of it runs as it is.

onnxruntime fuses operators when it makes a session, and other operators where it is given a part of the model; sums are
then rounded elsewhere. So `optimised` folds and fuses in the whole file (its level `basic`, which leaves operators of
the ONNX standard that other backends take as well), and sessions of parts change nothing: they run the kernels of the
whole, and give its bits. Execution providers run operators on other processors. Some come built into a package that
replaces onnxruntime, others as plug-ins of packages beside it. Next: `onnxruntime_model.py`.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

# Its packages of 1.30 and later send what they know of the machine and the model to Microsoft. It looks when imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import msgspec
import onnxruntime

from tvm_pipeline.backends.cores import made_on
from tvm_pipeline.backends.engine_agreement import check_results
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.backends.trial import answer
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.number_types import NARROW, number_type
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.onnx_graph import with_fixed_inputs
from tvm_pipeline.frontends.onnx_rewriting import other_forms, raised_opset
from tvm_pipeline_onnxruntime.onnxruntime import is_own, provider_precision

_log = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
_PLACE = re.compile(r"^\S+\.cc:\d+ .*\) ")  # in its source, before some reasons
_LACKING = re.compile("NOT_IMPLEMENTED|not a registered")  # reasons that concern one operator
# The property of a target with which each part is optimised for itself, by all that onnxruntime has.
OPTIMISATION = "optimization"
_ERRORS_ONLY = 3  # a level of onnxruntime's log, which goes to stderr


def optimised(model: Model) -> bytes:
    """Return the model as onnxruntime optimises it: with its inputs fixed and all constants folded.

    Raises:
        ModelError: onnxruntime refuses the model, also in other words where it lacks an operator, with its reason.
    """
    proto = raised_opset(with_fixed_inputs(model))
    try:
        return _optimised(model.name, proto)
    except ModelError as error:
        refused = error
    for words, other in other_forms(proto) if _LACKING.search(str(refused)) else ():
        with suppress(ModelError):
            made = _optimised(model.name, other)
            _log.warning(f"{refused}; it takes the file {words}")
            return made
    raise refused


def _optimised(name: str, proto: Any) -> bytes:
    options = _options(1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(path)
        _made(name, proto.SerializeToString(), options)
        return path.read_bytes()


def session(
    name: str,
    content: bytes,
    cores: Sequence[int],
    target: str = "cpu",
    profile: Path | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Return a session that runs a file as it is, with a thread for each of these cores.

    Args:
        name: the model's, for messages.
        cores: onnxruntime's threads stay on these; without any, there is one, which the system places.
        target: `cpu`, or a provider, with options. What it does not claim is refused if `strict`, else the CPU's.
        profile: a prefix of the file that the profiler of the session writes; None without one.

    Raises:
        ModelError: onnxruntime refuses the file, or has no such provider, with its reason.
    """
    options = _options(max(len(cores), 1))
    level = "ENABLE_ALL" if parsed_target(target)[1].get(OPTIMISATION) == "all" else "DISABLE_ALL"
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if not is_own(target) and strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    # The threads of a session keep to the cores of the thread that makes it.
    return made_on(cores, lambda: _made(name, content, options, target))


@cache
def plugins() -> Mapping[str, list[Any]]:
    """Register the plug-ins of installed packages; return by provider the devices that it offers."""
    for module in sorted(module.name for module in pkgutil.iter_modules()):
        if module.startswith(("onnxruntime_ep_", "onnxruntime_ggml", "onnxruntime_qnn")):
            found = import_module(module)
            path = getattr(found, "get_library_path", None) or getattr(found, "library_path", None)
            if path:
                own = getattr(found, "get_ep_name", None)
                name = own() if own else getattr(found, "EP_NAME", module)
                onnxruntime.register_execution_provider_library(name, path())
    offered: dict[str, list[Any]] = {}
    for device in getattr(onnxruntime, "get_ep_devices", list)():
        offered.setdefault(device.ep_name, []).append(device)
    return offered


def error_reason(error: Exception) -> str:
    """Return the reason in onnxruntime's message, without its code and the place in its source."""
    text = _PLACE.sub("", " ".join(str(error).split()))
    return text.partition(" : ")[2].partition(" : ")[2][:300] or text[:300]


def _options(threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = _ERRORS_ONLY
    # A thread that waits for work would take the core from other stages.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _made(name: str, content: bytes, options: Any, target: str = "cpu") -> Any:
    make: Callable[..., Any] = onnxruntime.InferenceSession
    provider, properties = parsed_target(target)
    properties.pop(OPTIMISATION, None)
    try:
        if is_own(target):
            return make(content, options, providers=[CPU])
        if provider in plugins():
            options.add_provider_for_devices(plugins()[provider][:1], properties)
            return make(content, options, enable_fallback=0)
        made = make(content, options, providers=[(provider, properties)], enable_fallback=0)
    except Exception as error:  # its errors have no common root
        raise ModelError(f"{name}: onnxruntime refuses it: {error_reason(error)}") from error
    if provider not in made.get_providers():
        raise ModelError(f"{name}: onnxruntime cannot use {provider} here; its device, or a library, is missing")
    return made


def kernels(made: Any) -> list[tuple[int, str, float]]:
    """End the profile of a session; return number, provider and microseconds of each node that ran, and is a number."""
    events = msgspec.json.decode(Path(made.end_profiling()).read_bytes())
    named = [(event["name"].partition("_kernel_time"), event) for event in events if event["cat"] == "Node"]
    return [
        (int(label), event["args"].get("provider", ""), event["dur"])
        for (label, _, more), event in named
        if label.isdecimal() and not more
    ]


# The child that loads providers first. They may claim operators that they cannot compute, or compute something else.


def serve(order: bytes, channel: socket.socket) -> None:
    """List the providers, or try what one claims of a file.

    Of a file it tells which nodes onnxruntime leaves on the CPU, by their names, which are numbers; of one operator
    alone (`is_alone`), which it must not leave, nothing.
    """

    def listed() -> list[str]:
        return sorted({*onnxruntime.get_available_providers(), *plugins()} - {CPU, "AzureExecutionProvider"})

    answer(channel, lambda question, content: _tried(content, *question) if question else listed())


def _tried(content: bytes, name: str, target: str, is_alone: bool) -> list[int]:
    """Run a file on noise by a provider and by the CPU; return the nodes that the provider leaves to the CPU.

    Raises:
        ModelError: it fails, its results are others, or it leaves a node of an operator alone.
    """
    provider, _ = parsed_target(target)
    with tempfile.TemporaryDirectory() as folder:
        made = session(name, content, (), target, Path(folder) / "profile", strict=False)
        for one in (*made.get_inputs(), *made.get_outputs()):
            if _dtype(one.type) in NARROW or number_type(_dtype(one.type)) is None:
                raise ModelError(
                    f"{provider} is given no {one.type}, as {one.name} is; name a device of the target cpu"
                )
        ports = [Port(one.name, tuple(one.shape), _dtype(one.type)) for one in made.get_inputs()]
        frame = {port.name: noise(port) for port in ports}
        for port in ports:
            if not port.dtype.startswith("float"):
                frame[port.name].fill(0)  # it may be indices
        names = [one.name for one in made.get_outputs()]
        try:
            found = made.run(names, frame)
        except Exception as error:  # its errors have no common root
            raise ModelError(f"{provider} claims it and fails: {error_reason(error)}") from error
        left = sorted({node for node, by, _ in kernels(made) if by == CPU})
    check_results(provider, names, session(name, content, ()).run(names, frame), found, provider_precision(target))
    if left and is_alone:
        raise ModelError(f"{provider} does not claim it")
    return left


def _dtype(kind: str) -> str:
    """Return numpy's name of onnxruntime's `tensor(float)`."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)
