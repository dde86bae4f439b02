"""`tvm-pipeline run --inputs x.npz --outputs y.npz`: run a model on arrays of NumPy, whatever they mean.

Use it for a model that takes no picture, and to compare outputs with another engine. Next: run.py, which runs video.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline import Pipeline, Tensor
from tvm_pipeline.cli.output import print_json, say
from tvm_pipeline.core.number_types import is_float, packed_bits, widened
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import ModelError, OptionError, nearest
from tvm_pipeline.files import check_distinct, replacing
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.model_bundle import opened_model
from tvm_pipeline_video.service.model_plan import plan_alone
from tvm_pipeline_video.service.settings import Settings

Arrays = Mapping[str, NDArray[Any]]
Join = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]

# The settings that count here.
USED = {
    *("bundle", "source", "device", "platform", "input_shapes", "fresh", "isolate", "json"),
    *("plan", "objective", "min_throughput", "max_latency"),
}


def run_arrays(settings: Settings, inputs: Path, outputs: Path | None, listener: Listener) -> None:
    """Run the frames of a file through one model, and write its outputs.

    Args:
        settings: those of USED.
        inputs: .npz with an array for each input, or .npy for a model of one input; see `frames_of`.
        outputs: .npz with an array for each output; nothing is written without it. numpy's files have no types of
            ml_dtypes: these are written as float32 or int8, which hold the same numbers, and read as such.

    Raises:
        OptionError: there are several models or sources, or the file of outputs is no .npz.
        ModelError: the file cannot be read, or its arrays do not fit the model.
    """
    if len(settings.bundle) != 1 or settings.source:
        raise OptionError("`inputs` takes one model, and no `source`", option="inputs")
    if outputs and outputs.suffix.lower() != ".npz":
        raise OptionError(f"`outputs` {outputs}: give the name of an .npz file", option="outputs")
    check_distinct([outputs], [*settings.bundle, inputs])
    arrays = read_arrays(inputs)
    with ExitStack() as stack:
        opening = opened_model(settings.bundle[0], settings, listener, of_pictures=False)
        _, bundle = stack.enter_context(opening)
        compiled = bundle.compiled
        with blamed(inputs, ModelError):
            frames, join = frames_of(arrays, compiled.graph.inputs)
        plan = plan_alone(settings, bundle, *settings.plan[:1]).plan
        if settings.isolate is not False:
            apart = isolated(compiled, bundle.platform, plan.stages, every=bool(settings.isolate))
            compiled = stack.enter_context(apart)
        with Pipeline(compiled, plan, bundle.platform) as pipe, blamed(inputs, ModelError):
            began_s = perf_counter()
            results = list(pipe.map(frames))
            taken_s = perf_counter() - began_s
    figures = {
        "frames": len(frames),
        "seconds": taken_s,
        "throughput_fps": len(frames) / taken_s,
        "latency_p50_s": median(result.latency_s for result in results),
    }
    made = {name: widened(join([result.outputs[name] for result in results])) for name in results[0].outputs}
    if outputs:
        with replacing(outputs) as temporary, temporary.open("wb") as file:
            np.savez(file, **made)  # type: ignore[arg-type]  # the stub has a keyword before them
    if settings.json:
        print_json({**figures, "outputs": {name: list(array.shape) for name, array in made.items()}})
        return
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in made.items())
    say(
        f"{len(frames)} frames in {taken_s:.3g} s, {figures['throughput_fps']:.4g} frames a second; median latency "
        f"{figures['latency_p50_s'] * 1e3:.3g} ms"
    )
    say(f"written {outputs}: {shapes}" if outputs else f"outputs: {shapes}; --outputs y.npz writes them")


def read_arrays(path: Path) -> Arrays:
    """Return the arrays of an .npz file by name, or that of an .npy file under an empty name; nothing is unpickled."""
    with blamed(path, ModelError, "write it by numpy.savez, without arrays of objects"):
        with path.open("rb") as file:
            if not file.read(6).startswith((b"PK", b"\x93NUMPY")):  # numpy takes anything else for a pickle
                raise ModelError("it holds no arrays of NumPy")
        loaded = np.load(path, allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}


def frames_of(arrays: Arrays, inputs: Sequence[Tensor]) -> tuple[list[dict[str, NDArray[Any]]], Join]:
    """Return the inputs of each frame, and what joins the outputs of all frames as these inputs are joined.

    An array has the shape of its input, for one frame; this shape behind a first axis of frames; or, where the input's
    first axis is 1, this shape with the frames along that axis.

    Raises:
        ModelError: an array is missing, is of no input, or has another shape.

    Examples:
        >>> frames, join = frames_of({"": np.zeros((5, 3, 8, 8))}, [Tensor("data", (1, 3, 8, 8))])
        >>> len(frames), frames[0]["data"].shape, join([np.zeros((1, 10))] * 5).shape
        (5, (1, 3, 8, 8), (5, 10))
    """
    names = [tensor.name for tensor in inputs]
    if len(names) == len(arrays) == 1:
        arrays = {names[0]: next(iter(arrays.values()))}
    for name in arrays:
        if name not in names:
            raise ModelError(f"the model has no input {name or 'without a name'}; {nearest(name, names)}")
    for tensor in inputs:
        if tensor.name not in arrays:
            raise ModelError(f"it has no array for the input {tensor.name} {list(tensor.shape)}")
    split, joins = zip(*(_split(_narrowed(arrays[tensor.name], tensor), tensor) for tensor in inputs), strict=True)
    counts = list(map(len, split))
    if len(set(counts)) != 1 or 0 in counts:
        listed = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        raise ModelError(f"each input needs the same number of frames, at least one; there are {listed}")
    return [dict(zip(names, frame, strict=True)) for frame in zip(*split, strict=True)], joins[0]


def _narrowed(array: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    """Return int8 as the integers of 4 or 2 bits that an input has; other arrays as they are."""
    if not packed_bits(tensor.dtype) or is_float(tensor.dtype) or array.dtype != np.int8:
        return array
    made = array.astype(tensor.dtype)
    if not np.array_equal(widened(made), array):
        raise ModelError(f"the array {tensor.name} has numbers that {tensor.dtype} has not")
    return made


def _split(array: NDArray[Any], tensor: Tensor) -> tuple[Sequence[NDArray[Any]], Join]:
    """Return the frames of the array of an input, and what joins outputs likewise."""
    if array.shape == tensor.shape:
        return [array], lambda outputs: outputs[0]
    if array.shape[1:] == tensor.shape:
        return list(array), np.stack
    if tensor.shape[:1] == (1,) and array.shape[1:] == tensor.shape[1:]:
        return np.split(array, len(array)) if len(array) else [], np.concatenate
    raise ModelError(
        f"the array {tensor.name} has the shape {list(array.shape)}; the input has {list(tensor.shape)}, and several "
        "frames stand behind each other along a first axis"
    )
