"""Named forms of a model's input: what families of models expect of a picture, as one table with its sources.

A preset sets fields of `Preprocessing`; size, layout and number type are those of the model's input. Inputs of uint8
and int8 whose quantisation is not known take only `fit`, `fill` and `color` of a preset. Read next: preprocessing.py,
and decoders/choice.py, which finds the preset of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

FOR_INTEGERS = ("fit", "fill", "color")

_UNIT = 1 / 255
_IMAGENET = {"scale": _UNIT, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_SIGNED = {"scale": 1 / 127.5, "mean": (1.0,)}


@dataclass(frozen=True, slots=True)
class Preset:
    """The fields that a preset sets, and where they are from."""

    fields: Mapping[str, Any]
    source: str


_PLAIN = {"fit": "stretch", "fill": 0, "color": "rgb", "mean": (0.0,), "std": (1.0,), "scale": 1.0}


def _preset(source: str, **fields: Any) -> Preset:
    return Preset(MappingProxyType(_PLAIN | fields), source)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "raw": _preset("pixels as they are, 0 to 255"),
        "unit": _preset("0 to 1, as torchvision's ToTensor makes them", scale=_UNIT),
        "signed": _preset("-1 to 1: Keras's mode tf, TensorFlow's SSD MobileNet", **_SIGNED),
        "imagenet": _preset("torchvision's ImageClassification: the middle, ImageNet's mean", fit="crop", **_IMAGENET),
        "caffe": _preset(
            "Keras's mode caffe: blue first, less ImageNet's mean", color="bgr", mean=(103.939, 116.779, 123.68)
        ),
        "yolo": _preset("Ultralytics' LetterBox", fit="letterbox", fill=114, scale=_UNIT),
        "yolo-classify": _preset("Ultralytics' classify_transforms", fit="crop", scale=_UNIT),
        "yolox": _preset("YOLOX's preproc", fit="pad", fill=114, color="bgr"),
        "mediapipe": _preset("MediaPipe's graphs of palms, hands and face meshes", fit="letterbox", scale=_UNIT),
        "mediapipe-face": _preset("MediaPipe's graphs of face and pose detection", fit="letterbox", **_SIGNED),
        "movenet": _preset("MoveNet's model card", fit="letterbox"),
        "paddleocr": _preset("PaddleOCR's NormalizeImage of detection", fit="letterbox", color="bgr", **_IMAGENET),
        "picodet": _preset("PaddleDetection's NormalizeImage", **_IMAGENET),
    }
)
