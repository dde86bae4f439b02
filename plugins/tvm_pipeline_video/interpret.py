"""What a model's input wants and what its outputs mean: as given, as recognised, or as assumed; and each is said.

    found = interpret(graph, metadata, Request("yolo"), preprocessing="yolo")
    found.preprocessing, found.decode, found.said

Read next: decoders/choice.py (which decoder), presets.py (which preprocessing).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm_pipeline import OperatorGraph
from tvm_pipeline.errors import OptionError
from tvm_pipeline.frontends.model_metadata import quantization_of
from tvm_pipeline_video.analysis import Decoder, find_decoder, preprocessing_for
from tvm_pipeline_video.decoders import Choice, Request, choose
from tvm_pipeline_video.preprocessing import Preprocessing, default_for
from tvm_pipeline_video.presets import PRESETS

Given = str | Path | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Interpretation:
    """How pictures go into a model, and what is made of its outputs.

    Attributes:
        decode: None where the outputs are taken as they are.
        name: names the decoder with its options; empty without one.
        said: a sentence for the preprocessing, and one for the decoder.
    """

    preprocessing: Preprocessing
    decode: Decoder | None
    name: str
    said: tuple[str, ...]


def interpret(
    model: OperatorGraph,
    metadata: Mapping[str, str] | None = None,
    request: Request | None = None,
    preprocessing: Given = None,
    whence: str = "",
) -> Interpretation:
    """Return how a model is read.

    Args:
        metadata: what the model's file says about it.
        request: the decoder that is wanted; without it, one is recognised where that can be.
        preprocessing: a TOML file, the name of a preset, or what `Preprocessing.to_dict` returns; without it, that of
            the model's family or metadata, else what the input's shape suggests.
        whence: where the preprocessing is from, if it is a dictionary.

    Raises:
        OptionError: the model takes something else than one picture, or an option does not fit it.
    """
    request, metadata = request or Request(), metadata or {}
    preprocessing_for(model)  # the clearest error where the model takes no picture
    if ":" in request.name:
        _refuse_with_function(request)
        chosen = Choice(find_decoder(request.name), None, "", request.name)
    else:
        chosen = choose(model, request, metadata)
    settings, why = _settings(model, metadata, chosen, preprocessing, whence)
    said = (f"preprocessing: {settings}: {why}", chosen.said)
    return Interpretation(settings, chosen.decode, chosen.name, tuple(filter(None, said)))


def _refuse_with_function(request: Request) -> None:
    for option, value in (("labels", request.labels), ("threshold", request.threshold), ("classes", request.classes)):
        if value:
            raise OptionError(
                f"`{option}` is for the decoders in the box; {request.name} is a function of its own", option=option
            )


def _settings(
    model: OperatorGraph, metadata: Mapping[str, str], chosen: Choice, given: Given, whence: str
) -> tuple[Preprocessing, str]:
    """Return how pictures go in, and where that is from."""
    usual = default_for(model.inputs[0].shape, model.inputs[0].dtype)
    if isinstance(given, Mapping):
        return preprocessing_for(model, given), whence or "as given"
    exact = _quantised(usual, metadata)
    if given is not None and str(given) in PRESETS:
        name = str(given)
        return exact.with_preset(name), f"the preset {name} ({PRESETS[name].source})"
    if given is not None:
        path = Path(given)
        if not path.exists():
            raise OptionError(
                f"`preprocessing` {given}: there is no such file, and no such preset; the presets are "
                f"{', '.join(PRESETS)}",
                option="preprocessing",
                value=given,
            )
        return preprocessing_for(model, path), f"from {path}"
    if stated := _stated(metadata, exact):
        return stated, "from the model's metadata"
    if chosen.form and chosen.form.preset:
        preset = chosen.form.preset
        family = f"as {chosen.form.name} takes it" + (" by the model's metadata" if metadata.get("task") else "")
        return exact.with_preset(preset), f"{family}, the preset {preset} ({PRESETS[preset].source})"
    return usual, (
        "assumed from the input's shape and type; if that is wrong, write model.toml or give `preprocessing`, a TOML "
        f"file or one of {', '.join(PRESETS)}"
    )


def _quantised(usual: Preprocessing, metadata: Mapping[str, str]) -> Preprocessing:
    """Return the usual form with the quantisation that a TFLite file states for its input of integers."""
    try:
        (pair,) = quantization_of(metadata.get("input_quantization", ""))
        return replace(usual, quantization=pair) if usual.dtype != "float32" else usual
    except (ValueError, OptionError):  # several inputs, or a scale that cannot be
        return usual


def _stated(metadata: Mapping[str, str], usual: Preprocessing) -> Preprocessing | None:
    """Return the normalisation that a TFLite file states, for pixels from 0 to 255; None without one."""
    known = usual.dtype == "float32" or usual.quantization is not None
    if not known or not {"input_mean", "input_std"} <= metadata.keys():
        return None
    try:
        mean, std = (tuple(map(float, metadata[key].split())) for key in ("input_mean", "input_std"))
        return replace(usual, scale=1.0, mean=mean, std=std)
    except (ValueError, OptionError):
        return None
