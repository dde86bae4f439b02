"""Sessions of onnxruntime: a file is optimised once, as a whole, and each part of it runs as it is.

onnxruntime fuses operators when it makes a session, and other operators where it is given a part of the model; sums are
then rounded elsewhere. So `optimised` folds and fuses in the whole file (its level `basic`, which leaves operators of
the ONNX standard that other backends take as well), and sessions of parts change nothing: they run the kernels of the
whole, and give its bits. Next: `onnxruntime_model.py`.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

# Its packages of 1.30 and later send what they know of the machine and the model to Microsoft. It looks when imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

from tvm_pipeline.backends.cores import bind
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.onnx_graph import with_fixed_inputs
from tvm_pipeline.frontends.onnx_rewriting import other_forms, raised_opset

_log = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
# The cores of this process before any thread is bound to some of them.
CORES = frozenset(os.sched_getaffinity(0))
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
    provider, properties = parsed_target(target)
    level = "ENABLE_ALL" if properties.pop(OPTIMISATION, "") == "all" else "DISABLE_ALL"
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if provider not in ("", "cpu") and strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")

    def bound() -> Any:
        bind(cores)
        return _made(name, content, options, provider, properties)

    # The threads of a session keep to the cores of the thread that makes it.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(bound).result()


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


def _made(
    name: str, content: bytes, options: Any, provider: str = "cpu", properties: Mapping[str, str] | None = None
) -> Any:
    make: Callable[..., Any] = onnxruntime.InferenceSession
    try:
        if provider in ("", "cpu"):
            return make(content, options, providers=[CPU])
        if provider in plugins():
            options.add_provider_for_devices(plugins()[provider][:1], dict(properties or {}))
            return make(content, options, enable_fallback=0)
        made = make(content, options, providers=[(provider, dict(properties or {}))], enable_fallback=0)
    except Exception as error:  # its errors have no common root
        raise ModelError(f"{name}: onnxruntime refuses it: {error_reason(error)}") from error
    if provider not in made.get_providers():
        raise ModelError(f"{name}: onnxruntime cannot use {provider} here; its device, or a library, is missing")
    return made
