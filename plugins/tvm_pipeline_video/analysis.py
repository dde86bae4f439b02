"""A source through a running pipeline: pictures in, annotated pictures out, in order.

Each frame travels through the pipeline as the tag of its tensor, so that it meets its own result whatever happens on
the way. Read next: `runtime/frame_stream.py` (what a running pipeline offers), sinks.py (where results go).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from tvm_pipeline import OperatorGraph, Result
from tvm_pipeline.backends.ports import aligned_empty
from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline.runtime.frame_stream import FrameStream, Tagged
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.preprocessing import Preprocessing, Transform, default_for, picture_input, preprocess
from tvm_pipeline_video.sources import Frame
from tvm_pipeline_video.tracking import Follow, ObjectEvent

Outputs = Mapping[str, NDArray[Any]]

# Turns the model's outputs into annotations; the transform leads from the model's input back to the picture.
Decoder = Callable[[Outputs, Transform], Sequence[Annotation]]

FrameT = TypeVar("FrameT", bound=Frame)  # live sources give a LiveFrame, which knows where it is from


@dataclass(frozen=True, slots=True)
class Analysis(Generic[FrameT]):
    """A frame of the source with the model's result for it, and what became of objects that are followed."""

    frame: FrameT
    result: Result
    annotations: Sequence[Annotation]
    events: Sequence[ObjectEvent] = ()


def stream(
    pipeline: FrameStream,
    source: Iterable[FrameT],
    settings: Preprocessing,
    decode: Decoder | None = None,
    stopped: Callable[[], bool] = lambda: False,
    follow: Follow | None = None,
) -> Iterator[Analysis[FrameT]]:
    """Run every frame of `source`; end when it ends, or with the frames inside once `stopped()` is true.

    `source` is one Source or LiveSource, or several of these by `merge`; another thread iterates over it.
    `stopped` is called at each frame. Close live sources as well, since they may give no frame for long. `follow` is
    such as `Trackers`.

    Raises:
        VideoError: the source broke; the frames before that have been yielded.
        StageError: a stage failed.
    """

    def pictures() -> Iterator[Tagged]:
        tensor: NDArray[Any] | None = None  # one is enough, since `submit` copies it
        for frame in source:
            if stopped():
                return
            height, width = frame.image.shape[:2]
            shape = settings.input_shape(width, height)
            if tensor is None or tensor.shape != shape:
                tensor = aligned_empty(shape, settings.dtype)
            yield Tagged(preprocess(frame.image, settings, tensor), frame)

    for result in pipeline.map(pictures()):
        frame: FrameT = result.tag
        found: Sequence[Annotation] = decoded(decode, result.outputs, settings, frame) if decode else ()
        events: Sequence[ObjectEvent] = ()
        if follow:
            found, events = follow(frame, found)
        yield Analysis(frame, result, found, events)


def decoded(decode: Decoder, outputs: Outputs, settings: Preprocessing, frame: Frame) -> Sequence[Annotation]:
    """Return what a decoder finds in the outputs of a frame.

    Raises:
        RunError: the decoder raised, or returned something else than annotations; with its name and the frame.
    """
    name = decoder_name(decode)
    where = f"frame {frame.index} of {frame.source}"
    try:
        found = decode(outputs, settings.transform(frame.image.shape[1], frame.image.shape[0]))
    except BaseException as error:
        # In the main thread, Ctrl-C and an exit are those of the program. In any other they would end only the thread.
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise
        at = _line_of(error, decode)
        given = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        raise RunError(
            f"{name} failed at {where}: {type(error).__name__}: {error}{at}; the outputs are {given}; mend the function"
        ) from error
    if not isinstance(found, Sequence) or not all(isinstance(one, Annotation) for one in found):
        raise RunError(
            f"{name} returned {_shown(found)} at {where}; it must return a list of tvm_pipeline_video.Annotation"
        )
    for annotation in found:
        if fault := _fault(annotation):
            raise RunError(f"{name} returned an annotation at {where} whose {fault}")
    return found


def _line_of(error: BaseException, decode: Decoder) -> str:
    """Return file and line of a decoder's error: the innermost of its own file, if it has one."""
    function = inspect.unwrap(decode)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames[-1:]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def decoder_name(decode: Decoder) -> str:
    """Return the name of a decoder for messages, such as `the decoder found:decode`."""
    return f"the decoder {decode.__module__}:{getattr(decode, '__qualname__', type(decode).__qualname__)}"


def _fault(annotation: Annotation) -> str:
    """Return what of an annotation can be neither written nor drawn; empty where nothing is."""
    label: object = annotation.label  # of the user's own code, whatever the types say
    score, box = annotation.score, annotation.box
    if not isinstance(label, str):
        return f"label is {_shown(label)}, a {type(label).__name__}; give text"
    try:
        if score is not None and not math.isfinite(score):
            return f"score is {_shown(score)}; give a finite number or None"
        if box is not None and (len(box) != 4 or not all(map(math.isfinite, box))):
            return f"box is {_shown(box)}; give left, top, right and bottom as finite numbers, or None"
        for name, points in (("points", annotation.points), ("polygon", annotation.polygon)):
            if not all(math.isfinite(x) and math.isfinite(y) for x, y in points):
                return f"{name} are {_shown(points)}; give (x, y) in finite numbers each"
    except (TypeError, ValueError, OverflowError) as error:
        return f"score, box or points are no numbers ({error}); give numbers"
    return ""


def _shown(value: object) -> str:
    return repr(str(value)[:60])


def preprocessing_for(graph: OperatorGraph, given: Path | Mapping[str, Any] | None = None) -> Preprocessing:
    """Return how pictures become the model's one input: from a TOML file or a bundle, else from its shape.

    Raises:
        OptionError: the model takes something else than one picture, or the settings do not make such an input.
    """
    tensor = picture_input(graph.name, graph.inputs)
    usual = default_for(tensor.shape, tensor.dtype)
    if given is None:
        settings = usual
    elif isinstance(given, Path):
        settings = Preprocessing.from_toml(given, usual)
    else:
        settings = Preprocessing.from_dict(given, usual)
    made = settings.input_shape(*(settings.size or (0, 0)))
    if made != tensor.shape or settings.dtype != tensor.dtype:
        raise OptionError(
            f"the preprocessing makes {settings.dtype} {list(made)}; {graph.name} takes {tensor.dtype} "
            f"{list(tensor.shape)}: mend size (width, height), layout, color or dtype"
        )
    return settings


class _FromSource(SourceFileLoader):
    """Compiles a file at each import: bytecode would also be taken for a file that was changed within a second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def find_decoder(name: str) -> Decoder:
    """Return the function that is named `path/to/file.py:function` or `package.module:function`.

    Raises:
        OptionError: there is no such file, module or function, or importing it raises.
    """
    where, _, function = name.rpartition(":")
    if not where.strip(".") or not function.isidentifier():
        raise OptionError(
            f"`decoder` {name!r}: give it as file.py:function or package.module:function", option="decoder", value=name
        )
    try:
        if where.endswith(".py"):
            stem = Path(where).stem
            spec = importlib.util.spec_from_file_location(stem, where, loader=_FromSource(stem, where))
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot load {where}")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        decoder: Decoder = getattr(module, function)
    except (ImportError, OSError, AttributeError) as error:
        raise OptionError(f"`decoder` {name!r}: {error}", option="decoder", value=name) from error
    except SyntaxError as error:
        raise OptionError(
            f"`decoder` {name!r}: {error.filename}, line {error.lineno}: {error.msg}", option="decoder", value=name
        ) from error
    except (Exception, SystemExit, GeneratorExit) as error:
        raise OptionError(
            f"`decoder` {name!r}: importing {where} raised {type(error).__name__}: {error}; a file with a decoder only "
            "defines functions",
            option="decoder",
            value=name,
        ) from error
    if not callable(decoder):
        raise OptionError(
            f"`decoder` {name!r}: {function} is a {type(decoder).__name__}, not a function of the outputs and the "
            "transform",
            option="decoder",
            value=name,
        )
    return decoder
