"""TensorFlow as a tool: in an environment of its own, since it is large and nothing but building models needs it.

`run_with_tensorflow` makes that environment, once, and runs a script in it; `quantised` is for such scripts. Next:
`efficientnet_lite0.py`, which is one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

REQUIREMENT = "tensorflow-cpu==2.21.0"
_NEEDED_BYTES = 3 << 30  # 1.6 GB installed, and what is downloaded for it


def run_with_tensorflow(script: Path, arguments: Sequence[object], tools: Path | None = None) -> None:
    """Runs a Python script where TensorFlow is.

    Args:
        script: it sees the packages of the tool's environment only.
        arguments: of its command line.
        tools: folder of the environment, made where it is not yet; else one in the user's cache folder.

    Raises:
        SystemExit: the environment cannot be made, or the script fails; both have said why on stderr.
    """
    python = _environment(tools or _default_folder())
    # TensorFlow writes about the machine at every start; its errors still come.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONWARNINGS": "ignore"}
    command = [str(python), str(script), *map(str, arguments)]
    if subprocess.run(command, check=False, env={**os.environ, **quiet}).returncode:
        raise SystemExit(f"{script.name} failed, see above")


def _default_folder() -> Path:
    from tvm_pipeline.files import cache_folder  # not where this file is read inside the tool's environment

    return cache_folder() / "tools" / "tensorflow"


def _environment(folder: Path) -> Path:
    """The Python interpreter of the environment; what an interrupted installation left is completed."""
    python, done = folder / "bin" / "python", folder / f"{REQUIREMENT}.installed"
    if done.exists() and python.exists():  # a system that was upgraded may have lost that Python
        return python
    if not (3, 10) <= sys.version_info < (3, 14):
        raise SystemExit(f"{REQUIREMENT} needs Python 3.10-3.13; run this with one of these")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise SystemExit(
            f"{folder}: {free / 1e9:.1f} GB are free and TensorFlow needs {_NEEDED_BYTES / 1e9:.1f} while it is "
            "installed; choose another folder with --tools"
        )
    print(f"installing {REQUIREMENT} into {folder} (1.6 GB, once)", file=sys.stderr)
    venv.create(folder, with_pip=True)
    if subprocess.run([python, "-m", "pip", "install", "--quiet", REQUIREMENT], check=False).returncode:
        raise SystemExit(f"cannot install {REQUIREMENT}: is a package registry within reach?")
    done.touch()
    return python


def quantised(network: Any, samples: Any, input_type: str) -> bytes:
    """A network quantised after training: weights, tensors, input and output are of 8 bits.

    Args:
        network: a Keras model of one input and one output, its batch fixed to 1: edgetpu_compiler refuses open ones.
        samples: float32, N x the shape of the input: what the ranges of the tensors are taken from.
        input_type: int8 or uint8, of the input and the output; inside all is int8.

    Returns:
        A .tflite with a batch of 1.
    """
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_keras_model(network)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([sample[None]] for sample in samples)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = getattr(tf, input_type)
    # TVM 0.19 does not import dense layers whose scales differ by channel ("Expr is not a constant scalar").
    converter._experimental_disable_per_channel_quantization_for_dense_layers = True
    with redirect_stdout(StringIO()):  # else hundreds of lines about the network
        content: bytes = converter.convert()
    return content
