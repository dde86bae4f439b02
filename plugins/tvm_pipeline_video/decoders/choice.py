"""Chooses a decoder: by name, or by what the outputs and the metadata of a model say; and says which, and why.

Nothing is guessed in silence: a model that no family recognises, or several do, gets no decoder, and the reason is a
sentence for people. Read next: interface.py (what a family is asked), yolo.py (one family).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_pipeline import OperatorGraph
from tvm_pipeline.errors import OptionError
from tvm_pipeline.frontends.model_metadata import quantization_of
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders import (
    classification,
    heat_maps,
    keypoints,
    mediapipe,
    picodet,
    segmentation,
    ssd,
    text,
    yolo,
    yolo_variants,
)
from tvm_pipeline_video.decoders.interface import Decoder, Format, Interface, Options, Outputs, shown
from tvm_pipeline_video.decoders.labels import COCO, checked_classes, labels_of
from tvm_pipeline_video.preprocessing import Transform

Forms = Callable[[Interface, str], list[Format]]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders, by what it reads.

    Attributes:
        forms: returns the ways in which a model's outputs can be read.
        names: of all its forms.
        reads: the outputs that it reads, for messages.
    """

    forms: Forms
    names: tuple[str, ...]
    reads: str


FAMILIES: Mapping[str, Family] = {
    "classification": Family(classification.forms, ("classification",), "[1, classes]"),
    "yolo": Family(
        lambda model, name: yolo.forms(model, name) + yolo_variants.forms(model, name),
        ("yolov5", "yolov8", "yolov10", "yolox", "yolov8-seg", "yolov8-pose", "yolov8-obb"),
        "[1, 4 + classes, N], [1, N, 5 + classes] or [1, K, 6], N by the grids of the input",
    ),
    "ssd": Family(
        ssd.forms,
        ("ssd", "ssd-output", "ssd-anchors"),
        "[1, N, 4], [1, N], [1, N], [1]; or [1, 1, N, 7]; or [1, 1917, 4] and [1, 1917, classes + 1]",
    ),
    "centernet": Family(
        heat_maps.forms, ("centernet", "centerface"), "[1, classes, h, w], [1, 2, h, w], [1, 2, h, w] of a quarter"
    ),
    "mediapipe": Family(
        mediapipe.forms,
        tuple(kind.name for kind in mediapipe.KINDS),
        "[1, N, 16], [1, N, 18] or [1, N, 12] and [1, N, 1], N by MediaPipe's anchors",
    ),
    "picodet": Family(picodet.forms, ("picodet",), "[1, N, classes] and [1, N, 4 * bins] for each stride"),
    "segmentation": Family(
        segmentation.forms, ("segmentation-argmax", "segmentation-sigmoid"), "[1, classes, h, w] or [1, h, w]"
    ),
    "text": Family(text.forms, ("text",), "[1, 1, h, w]"),
    "keypoints": Family(keypoints.forms, ("movenet", "landmarks"), "[1, 1, 17, 3]; or [1, 3 * points] and [1, 1]"),
}
NONE = "none"  # the name that asks for no decoder
ADVICE = "as file.py:function, a decoder of your own (docs/decoders.md)"


@dataclass(frozen=True, slots=True)
class Request:
    """What a user wants of a decoder.

    Attributes:
        name: of a family or a form, `none`, or empty to recognise one.
        labels: of the classes; empty for those of the model's file.
        threshold: the least score; None for the usual one.
        classes: labels, or their numbers, that are listed alone; empty for all.
    """

    name: str = ""
    labels: tuple[str, ...] = ()
    threshold: float | None = None
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A decoder for a model, or none.

    Attributes:
        decode: None where there is no decoder.
        form: None where there is none.
        said: what was chosen, or why nothing was, as a sentence.
        name: names the decoder with its options; empty without one.
    """

    decode: Decoder | None
    form: Format | None
    said: str
    name: str = ""


def is_known(name: str) -> bool:
    """Return whether a decoder of this name is in the box, or whether it asks for none."""
    return name == NONE or name in FAMILIES or any(name in family.names for family in FAMILIES.values())


def check_name(name: str) -> None:
    """Raise OptionError, with the nearest name, unless this is a decoder's name or names a function."""
    if is_known(name) or ":" in name:
        return
    names = [*FAMILIES, *(form for family in FAMILIES.values() for form in family.names)]
    near = difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {near[0]}? Known are" if near else "known are"
    raise OptionError(
        f"`decoder` {name!r}: {meant} {', '.join(FAMILIES)}; or give it as file.py:function, or as "
        "package.module:function",
        option="decoder",
        value=name,
    )


def choose(model: OperatorGraph, request: Request, metadata: Mapping[str, str] | None = None) -> Choice:
    """Return the decoder that is named, or the only one that recognises the outputs.

    Raises:
        OptionError: there is no decoder of that name, it cannot read these outputs, or an option does not fit it.
    """
    metadata = metadata or {}
    labels = request.labels or labels_of(metadata)
    interface = Interface.of(model, metadata, labels)
    if request.name == NONE:
        return Choice(None, None, "decoder: none, as requested")
    if request.name:
        form, how = _named(interface, request.name), ""
    else:
        found = [form for family in FAMILIES.values() for form in family.forms(interface, "")]
        if len(found) != 1:
            reason = _nothing(interface, found)
            _refuse_options(request, reason)
            return Choice(None, None, f"decoder: {reason}")
        form, how = found[0], ", recognised from its outputs" + (" and its metadata" if metadata.get("task") else "")
    options, remark = _options(form, request, labels)
    decode, reason = _of_integers(form.make(options), form, model, metadata)
    if decode is None and request.name:
        raise OptionError(f"`decoder` {request.name}: {reason}", option="decoder")
    if decode is None:
        _refuse_options(request, reason)
        return Choice(None, None, f"decoder: none, since {reason}")
    wanted = checked_classes(request.classes, options.labels[: form.classes] if form.classes else options.labels)
    if wanted:
        decode = ClassFilter(decode, wanted)
    name = " ".join([form.name, *([f"threshold {options.threshold:g}"] if request.threshold else []), *sorted(wanted)])
    return Choice(decode, form, f"decoder: {form}{how}{remark}", name)


@dataclass(frozen=True)
class ClassFilter:
    """Leaves of what a decoder finds only some classes."""

    decode: Decoder
    labels: frozenset[str]

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        return [found for found in self.decode(outputs, transform) if found.label in self.labels]


@dataclass(frozen=True)
class Dequantiser:
    """Gives a decoder the real values of outputs of integers.

    Attributes:
        quantization: scale and zero point by output.
    """

    decode: Decoder
    quantization: Mapping[str, tuple[float, int]]

    def __call__(self, outputs: Outputs, transform: Transform) -> Sequence[Annotation]:
        real = {}
        for name, array in outputs.items():
            scale, zero = self.quantization.get(name, (1.0, 0))
            real[name] = (array.astype(np.float32) - zero) * scale if name in self.quantization else array
        return self.decode(real, transform)


def _of_integers(
    decode: Decoder, form: Format, model: OperatorGraph, metadata: Mapping[str, str]
) -> tuple[Decoder | None, str]:
    """Return a decoder that reads a quantised model's outputs, too; None where nobody says what they stand for."""
    if form.name == "segmentation-argmax" and not form.classes:  # the outputs are classes
        return decode, ""
    integers = [name for name in model.outputs if model.tensors[name].dtype in ("int8", "uint8")]
    if not integers:
        return decode, ""
    known = quantization_of(metadata.get("output_quantization", ""))
    if len(known) == len(model.outputs):
        pairs = {name: pair for name, pair in zip(model.outputs, known, strict=True) if pair is not None}
        if set(integers) <= pairs.keys():
            return Dequantiser(decode, {name: pairs[name] for name in integers}), ""
    return None, (
        f"the outputs {shown(form.read)} are quantised, and the model's file does not say their scale; export it "
        f"with outputs of float32, or give `decoder` {ADVICE}"
    )


def _named(model: Interface, name: str) -> Format:
    """Return the form of that name, or the only one of the family of that name, that can read the outputs."""
    check_name(name)
    families = [family for key, family in FAMILIES.items() if name in (key, *family.names)]
    found = [form for family in families for form in family.forms(model, name)]
    exact = [form for form in found if form.name == name] or (found if name in FAMILIES else [])
    if len(exact) == 1:
        return exact[0]
    if exact:
        forms = ", ".join(form.name for form in exact)
        raise OptionError(
            f"`decoder` {name}: the outputs {shown(model.outputs)} can be read as {forms}; give one of these, or "
            "`labels`, whose number tells them apart",
            option="decoder",
            value=name,
        )
    reads = "; ".join(family.reads for family in families)
    size = f"the input is {model.width}x{model.height}" if model.width else "the input is no picture"
    raise OptionError(
        f"`decoder` {name} cannot read the outputs {shown(model.outputs)}; it reads {reads} ({size})",
        option="decoder",
        value=name,
    )


def _refuse_options(request: Request, reason: str) -> None:
    for option, value in (("labels", request.labels), ("threshold", request.threshold), ("classes", request.classes)):
        if value:
            raise OptionError(f"`{option}` goes with a decoder: {reason}", option=option)


def _nothing(model: Interface, found: list[Format]) -> str:
    """Return why no decoder was chosen, and what to do."""
    outputs = shown(model.outputs)
    if found:
        forms = ", ".join(form.name for form in found)
        return f"none, since {outputs} can be read as {forms}; give one of them as `decoder`, or {ADVICE}"
    possible = [
        form.name
        for family in FAMILIES.values()
        for name in family.names
        for form in family.forms(model, name)
        if form.name == name
    ]
    if possible:
        return (
            f"none, since the shapes of {outputs} do not tell what they mean; if it fits, give `decoder` as "
            f"{' or '.join(possible)}, or {ADVICE}"
        )
    families = ", ".join(FAMILIES)
    return f"none, since {outputs} has the form of no known family ({families}); give `decoder` {ADVICE}"


def _options(form: Format, request: Request, labels: tuple[str, ...]) -> tuple[Options, str]:
    """Return the options of a form, and what is to be said of its labels."""
    if request.threshold is not None and form.threshold is None:
        raise OptionError(f"`threshold` {request.threshold:g}: the decoder {form.name} takes none", option="threshold")
    if request.threshold is not None and not 0 < request.threshold < 1:
        raise OptionError(f"`threshold` {request.threshold:g}: it must be above 0 and below 1", option="threshold")
    remark = ""
    given = request.labels
    if given[:1] == ("???",) and len(given) == form.classes + 1:  # how TensorFlow's lists name the background
        given = given[1:]
    own = given or form.labels or labels
    if given and form.classes > 1 and len(given) != form.classes:
        raise OptionError(
            f"`labels`: there are {len(given)}, and the model has {form.classes} classes ({form})",
            option="labels",
        )
    if not own and form.classes == len(COCO):
        own, remark = COCO, ", assumed to be COCO's: `labels` gives others"
    elif not own and form.classes > 1:
        remark = ", without names: give `labels`"
    threshold = request.threshold if request.threshold is not None else form.threshold or 0.0
    return Options(own, threshold), remark
