"""Preprocessing: a frame becomes the tensor that a model takes, and coordinates lead back to the frame.

The form of a model's input (size, order of channels, normalisation, number type) is data: `Preprocessing`, kept in a
small TOML file or inside a bundle. `preprocess` carries it out, with swscale for the resizing;
`Preprocessing.transform` maps coordinates, so that a detector can draw on the original frame. Read next:
annotations.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import av
import msgspec
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from tvm_pipeline import Tensor
from tvm_pipeline.documents import TomlFile
from tvm_pipeline.errors import OptionError, nearest
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.presets import FOR_INTEGERS, PRESETS

Fit = Literal["stretch", "letterbox", "crop", "pad"]
Color = Literal["rgb", "bgr", "gray"]
Layout = Literal["NCHW", "NHWC"]
DType = Literal["float32", "uint8", "int8"]

_ALLOWED = {
    "size": "[width, height] in pixels, both above 0",
    "fit": "one of " + ", ".join(get_args(Fit)),
    "fill": "a whole number from 0 to 255",
    "color": "one of " + ", ".join(get_args(Color)),
    "layout": "one of " + ", ".join(get_args(Layout)),
    "mean": "a list of 1 number, or of one for each channel",
    "std": "a list of 1 number, or of one for each channel, all above 0",
    "scale": "a number above 0; 1.0 keeps pixels as 0 to 255, 0.00392156862745098 makes them 0 to 1",
    "dtype": "one of " + ", ".join(get_args(DType)),
    "quantization": "[scale, zero_point] with a scale above 0, for dtype uint8 or int8",
}


@dataclass(frozen=True, slots=True)
class Transform:
    """The map from a picture to the model's input: model = image * scale + offset, in pixels.

    Attributes:
        width, height: of the picture; 0 where they are not known.
    """

    scale_x: float
    scale_y: float
    offset_x: float
    offset_y: float
    width: int = 0
    height: int = 0

    def to_image(self, x: float, y: float) -> tuple[float, float]:
        """Return the point of the original picture for a point of the model's input; it may lie outside the picture."""
        return (x - self.offset_x) / self.scale_x, (y - self.offset_y) / self.scale_y


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """The form of the pictures that a model takes.

    value = (pixel * scale - mean) / std, for pixels from 0 to 255; a quantised input then stores
    round(value / quantization[0] + quantization[1]). Without `quantization`, uint8 and int8 store
    round(value).

    Attributes:
        size: (width, height) of the input; None takes each picture at its own size.
        fit: stretch = to the size, whatever the aspect; letterbox = scaled to fit, centred, borders filled;
            crop = scaled to cover, the centre kept; pad = at the top left, scaled only if too large, rest
            filled.
        fill: pixel value of the borders, before normalisation.
        color, layout, dtype: of the input; gray has one channel.
        mean, std: one number, or one for each channel in the order of `color`.
        scale: see above.
        quantization: (scale, zero_point) of a quantised input, or None.

    Raises OptionError, naming the field and what it may be, when a value cannot be used.
    """

    size: tuple[int, int] | None = None
    fit: Fit = "stretch"
    fill: int = 0
    color: Color = "rgb"
    layout: Layout = "NCHW"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1.0
    dtype: DType = "float32"
    quantization: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        lengths = {1, self.channels}
        right = {
            "size": self.size is None or min(self.size) > 0,
            "fill": 0 <= self.fill <= 255,
            "mean": len(self.mean) in lengths and bool(np.isfinite(self.mean).all()),
            "std": len(self.std) in lengths and min(self.std) > 0 and bool(np.isfinite(self.std).all()),
            "scale": 0 < self.scale < float("inf"),
            "quantization": self.quantization is None or (self.quantization[0] > 0 and self.dtype != "float32"),
        }
        for key in (key for key, is_right in right.items() if not is_right):
            what = f"preprocessing: {key} = {getattr(self, key)!r}; it must be {_ALLOWED[key]}"
            raise OptionError(what, option=key)

    @property
    def channels(self) -> int:
        return 1 if self.color == "gray" else 3

    @classmethod
    def from_toml(cls, path: Path | str, defaults: Preprocessing | None = None) -> Preprocessing:
        """Read a TOML file of the fields above; missing fields come from `defaults` (`default_for`).

        Raises OptionError naming the file, the line, the key and what is allowed.
        """
        file = TomlFile(path, OptionError, 'a line looks like fit = "letterbox"')
        try:
            return cls.from_dict(file.tables, defaults)
        except OptionError as error:
            raise file.mistake(str(error), *([error.option] if error.option else [])) from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], defaults: Preprocessing | None = None) -> Preprocessing:
        """Return what `to_dict` was made from, also after JSON; raise OptionError as `from_toml` does.

        A key `preset` names a row of `presets.PRESETS`, whose fields come before the defaults.
        """
        types = get_type_hints(cls)
        checked = {}
        base = defaults or cls()
        if "preset" in values and "quantization" in values:  # a preset of real values needs it
            base = cls.from_dict({"quantization": values["quantization"]}, base)
        if "preset" in values:
            base = base.with_preset(str(values["preset"]))
        for key, value in values.items():
            if key == "preset":
                continue
            if key not in types:
                raise OptionError(f"preprocessing: there is no key {key}; {nearest(key, types)}", option=key)
            try:
                checked[key] = msgspec.convert(value, types[key])
            except msgspec.ValidationError as error:
                what = f"preprocessing: {key} = {value!r}; it must be {_ALLOWED[key]}"
                raise OptionError(what, option=key) from error
        return replace(base, **checked)

    def with_preset(self, name: str) -> Preprocessing:
        """Return the form with the fields of a preset; raise OptionError where there is none of this name.

        Integers of an unknown quantisation take fit, border and colours alone.

        Examples:
            >>> Preprocessing(size=(640, 640)).with_preset("yolo").fit
            'letterbox'
        """
        if name not in PRESETS:
            what = f"preprocessing: there is no preset {name!r}; the presets are {', '.join(PRESETS)}"
            raise OptionError(what, option="preset")
        fields = dict(PRESETS[name].fields)
        if self.dtype != "float32" and self.quantization is None:
            fields = {key: value for key, value in fields.items() if key in FOR_INTEGERS}
        if self.color == "gray":
            fields.pop("color", None)
            fields |= {key: fields[key][:1] for key in ("mean", "std") if key in fields}
        return replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return size, fit, colours and range of values in words, for messages.

        Examples:
            >>> print(Preprocessing(size=(640, 384), fit="letterbox", scale=1 / 255))
            640x384 letterbox, rgb, 0..1
        """
        size = f"{self.size[0]}x{self.size[1]} " if self.size else "as large as the picture, "
        ends = [
            {round((pixel * self.scale - mean) / std, 3) for mean in self.mean for std in self.std}
            for pixel in (0, 255)
        ]
        if all(len(values) == 1 for values in ends):
            values = "..".join(f"{end.pop():g}" for end in ends)
        else:
            mean, std = ([round(value, 3) for value in values] for values in (self.mean, self.std))
            values = f"{'0..1' if self.scale < 0.1 else '0..255'} less {mean} by {std}"
        return f"{size}{self.fit}, {self.color}, {values}" + ("" if self.dtype == "float32" else f", {self.dtype}")

    def transform(self, width: int, height: int) -> Transform:
        """Return the map from a picture of this size to the input."""
        (scaled_w, scaled_h), (x, y) = self._scaled_position(width, height)
        return Transform(scaled_w / width, scaled_h / height, x, y, width, height)

    def input_shape(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return the tensor's shape for a picture of this size; if `size` is set, it is the same for all."""
        width, height = self.size or (width, height)
        return (1, self.channels, height, width) if self.layout == "NCHW" else (1, height, width, self.channels)

    def _scaled_position(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the size that a picture is scaled to, and the position of its top left in the input (< 0: cut off)."""
        into_w, into_h = self.size or (width, height)
        if self.fit == "stretch":
            return (into_w, into_h), (0, 0)
        ratios = (into_w / width, into_h / height)
        factor = {"letterbox": min(ratios), "crop": max(ratios), "pad": min(1.0, *ratios)}[self.fit]
        scaled = (max(1, round(width * factor)), max(1, round(height * factor)))
        if self.fit == "pad":
            return scaled, (0, 0)
        return scaled, ((into_w - scaled[0]) // 2, (into_h - scaled[1]) // 2)


def picture_input(model: str, inputs: Sequence[Tensor]) -> Tensor:
    """Return the one input of a model, which is one picture.

    Raises:
        OptionError: the model has several inputs, or its input is not one picture. The message says what to give.
    """
    if len(inputs) != 1:
        names = ", ".join(tensor.name for tensor in inputs)
        raise OptionError(
            f"{model} has several inputs ({names}); a video gives one picture a frame. Compile the model with `carry` "
            "where one is a state, and with `input_values` where one is a constant"
        )
    tensor, alone = inputs[0], (1, *inputs[0].shape[1:])
    if _layout(tensor.shape, tensor.dtype):
        return tensor
    advice = "to run it on arrays, give `inputs`, a file of NumPy"
    if _layout(alone, tensor.dtype):
        given = f"{tensor.name}:{list(alone)}".replace(" ", "")
        advice = f'give `input_shapes` "{given}", with the height and width that the model was made for'
    raise OptionError(f"{model}: {_no_picture(tensor.shape, tensor.dtype)}; {advice}")


def default_for(shape: tuple[int, ...], dtype: str) -> Preprocessing:
    """Return the most likely preprocessing for an input's shape and type.

    (1, 3, H, W) is NCHW and (1, H, W, 3) is NHWC; one channel is gray. float32 gets values from 0 to 1, uint8
    the pixels as they are, int8 the pixels less 128. A dimension of 0 or less is taken as free.

    Raises OptionError when the input is not one picture.
    """
    layout = _layout(shape, dtype)
    if layout is None:
        raise OptionError(_no_picture(shape, dtype))
    channels, height, width = shape[1:] if layout == "NCHW" else (shape[3], shape[1], shape[2])
    base = Preprocessing(
        size=(width, height) if min(width, height) > 0 else None,
        color="gray" if channels == 1 else "rgb",
        layout=layout,
    )
    if dtype == "float32":
        return replace(base, scale=1 / 255)
    return replace(base, dtype="uint8") if dtype == "uint8" else replace(base, dtype="int8", mean=(128.0,))


def _layout(shape: tuple[int, ...], dtype: str) -> Layout | None:
    """Return how one picture lies in an input; None for an input that is not one picture."""
    if len(shape) != 4 or shape[0] not in (-1, 0, 1) or dtype not in get_args(DType):
        return None
    return "NCHW" if shape[1] in (1, 3) else "NHWC" if shape[3] in (1, 3) else None


def _no_picture(shape: tuple[int, ...], dtype: str) -> str:
    return (
        f"the input {shape} {dtype} is not one picture; one picture is (1, 3, H, W) or (1, H, W, 3), with 1 or 3 "
        f"channels, of {', '.join(get_args(DType))}"
    )


def preprocess(image: NDArray[np.uint8], settings: Preprocessing, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return a picture as the tensor that the model takes.

    Args:
        image: uint8 HxWx3 RGB.
        settings: the form of the model's input.
        out: the tensor to write and return, of `settings.input_shape` and `settings.dtype`; None makes one.

    Raises:
        VideoError: the image is not a picture, or swscale cannot resize it.
        OptionError: `out` has another shape or type.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
        raise VideoError(f"a frame of {image.dtype} {image.shape} is not a picture; give uint8 (height, width, 3) RGB")
    height, width = image.shape[:2]
    shape = settings.input_shape(width, height)
    if out is None:
        out = np.empty(shape, settings.dtype)
    elif out.shape != shape or out.dtype != settings.dtype:
        raise OptionError(
            f"the model takes {out.shape} {out.dtype}, but the preprocessing makes {shape} {settings.dtype}; "
            "set size (width, height), layout, color and dtype of the preprocessing to fit the model"
        )
    (scaled_w, scaled_h), (left, top) = settings._scaled_position(width, height)
    into_h, into_w = (shape[2], shape[3]) if settings.layout == "NCHW" else (shape[1], shape[2])
    rows, columns = _overlap(top, scaled_h, into_h), _overlap(left, scaled_w, into_w)
    planes = _scaler.planes(image, scaled_w, scaled_h, settings.color)
    for channel, (plane, pixels) in enumerate(zip(planes, _pixels(settings), strict=True)):
        view = out[0, channel] if settings.layout == "NCHW" else out[0, :, :, channel]
        filled = pixels.table[settings.fill]
        view[: rows.start], view[rows.stop :] = filled, filled
        view[rows, : columns.start], view[rows, columns.stop :] = filled, filled
        seen = plane[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
        pixels.write(seen, view[rows, columns])
    return out


def _overlap(start: int, length: int, whole: int) -> slice:
    return slice(max(0, start), min(whole, start + length))


class _Pixels:
    """The stored numbers of the 256 pixel values of one channel."""

    def __init__(self, slope: float, offset: float, dtype: DType) -> None:
        self.slope, self.offset = np.float32(slope), np.float32(offset)
        self.is_float = dtype == "float32"
        stored = np.arange(256) * slope + offset
        if not self.is_float:
            limits = np.iinfo(dtype)
            stored = np.clip(np.rint(stored), limits.min, limits.max)
        self.table = stored.astype(dtype)
        self.is_identity = dtype == "uint8" and np.array_equal(self.table, np.arange(256))

    def write(self, plane: NDArray[np.uint8], view: NDArray[Any]) -> None:
        if self.is_identity:
            view[...] = plane
        elif self.is_float:  # three times faster than the table; dtype: NumPy 1 would choose float16
            np.multiply(plane, self.slope, out=view, dtype=np.float32)
            view += self.offset
        else:
            np.take(self.table, plane, out=view, mode="clip")  # clip: writes to out without a copy


@lru_cache(maxsize=64)
def _pixels(settings: Preprocessing) -> tuple[_Pixels, ...]:
    step, zero = settings.quantization or (1.0, 0)
    made = []
    for channel in range(settings.channels):
        mean, std = settings.mean[channel % len(settings.mean)], settings.std[channel % len(settings.std)]
        made.append(_Pixels(settings.scale / (std * step), zero - mean / (std * step), settings.dtype))
    return tuple(made)


class _Scaler(threading.local):
    """swscale with the filters and the memory that it keeps between frames; every thread has its own."""

    # Bilinear interpolation averages when it makes a picture smaller.
    _how = Interpolation.BILINEAR | Interpolation.ACCURATE_RND
    _slack_bytes = 128  # swscale reads past the end of a picture, and a bare array may end where memory ends

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()
        self._memory = np.empty(0, np.uint8)

    def planes(self, image: NDArray[np.uint8], width: int, height: int, color: Color) -> list[NDArray[np.uint8]]:
        """Return the picture at another size, one array for each channel in the order of `color`."""
        if self._memory.size < image.size + self._slack_bytes:
            self._memory = np.empty(image.size + self._slack_bytes, np.uint8)
        copy = self._memory[: image.size].reshape(image.shape)
        copy[...] = image
        pixel_format = "gray" if color == "gray" else "gbrp"
        try:
            frame = av.VideoFrame.from_numpy_buffer(copy, "rgb24")
            scaled = self._reformatter.reformat(frame, width, height, pixel_format, interpolation=self._how, threads=1)
        except av.error.FFmpegError as error:
            sizes = f"{image.shape[1]}x{image.shape[0]} to {width}x{height}"
            raise VideoError(f"cannot resize a frame from {sizes}: {error}; choose another size or fit") from error
        planes = [
            # A plane is a buffer, though PyAV's types do not say so.
            np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:height, :width]  # type: ignore[call-overload]
            for plane in scaled.planes
        ]
        order = {"gray": (0,), "rgb": (2, 0, 1), "bgr": (1, 0, 2)}[color]  # of the planes green, blue, red
        return [planes[index] for index in order]


_scaler = _Scaler()
