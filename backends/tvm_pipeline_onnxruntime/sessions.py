"""Sessions of onnxruntime: a file is optimised once, as a whole, and each part of it runs as it is.

onnxruntime fuses operators when it makes a session, and other operators where it is given a part of the model; sums are
then rounded elsewhere. So `optimised` folds and fuses in the whole file (its level `basic`, which leaves operators of
the ONNX standard that other backends take as well), and sessions of parts change nothing: they run the kernels of the
whole, and give its bits. Next: `onnxruntime_model.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Its packages of 1.30 and later send what they know of the machine and the model to Microsoft. It looks when imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

from tvm_pipeline.backends.cores import bind
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.onnx_graph import with_fixed_inputs

_ERRORS_ONLY = 3  # a level of onnxruntime's log, which goes to stderr


def optimised(model: Model) -> bytes:
    """Return the model as onnxruntime optimises it: with its inputs fixed and all constants folded.

    Raises:
        ModelError: onnxruntime refuses the model, with its reason.
    """
    options = _options(1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(path)
        _made(model.name, with_fixed_inputs(model).SerializeToString(), options)
        return path.read_bytes()


def session(name: str, content: bytes, cores: Sequence[int], profile: Path | None = None) -> Any:
    """Return a session that runs a file as it is, with a thread for each of these cores.

    Args:
        name: the model's, for messages.
        cores: onnxruntime's threads stay on these; without any, there is one, which the system places.
        profile: a prefix of the file that the profiler of the session writes; None without one.

    Raises:
        ModelError: onnxruntime refuses the file, with its reason.
    """
    options = _options(max(len(cores), 1))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)

    def bound() -> Any:
        bind(cores)
        return _made(name, content, options)

    # The threads of a session keep to the cores of the thread that makes it.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(bound).result()


def told(error: Exception) -> str:
    """Return the reason in onnxruntime's message, without its code and the place in its source."""
    text = " ".join(str(error).split())
    return text.partition(" : ")[2].partition(" : ")[2][:300] or text[:300]


def _options(threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = _ERRORS_ONLY
    # A thread that waits for work would take the core from other stages.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _made(name: str, content: bytes, options: Any) -> Any:
    make: Callable[..., Any] = onnxruntime.InferenceSession
    try:
        return make(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common root
        raise ModelError(f"{name}: onnxruntime refuses it: {told(error)}") from error
