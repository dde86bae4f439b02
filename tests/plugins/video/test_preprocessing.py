"""Preprocessing against Pillow and plain arithmetic, its files, and the way back to the picture."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.support.examples import examples
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video import Preprocessing, default_for, open_source, preprocess
from tvm_pipeline_video.errors import VideoError

SIZES = st.integers(1, 90)
FITS = st.sampled_from(["stretch", "letterbox", "crop", "pad"])


@pytest.fixture(scope="module")
def picture() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A smooth picture, on which resizers agree."""
    return next(open_source("synthetic:64x48")).image


def test_values_are_scaled_then_normalised_for_each_channel(picture: Any) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    wanted = (picture / 255 - mean) / std
    made = preprocess(picture, Preprocessing(scale=1 / 255, mean=mean, std=std))
    assert made.shape == (1, 3, 48, 64)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made[0], wanted.transpose(2, 0, 1), atol=1e-5)
    made = preprocess(picture, Preprocessing(scale=1 / 255, mean=mean, std=std, layout="NHWC"))
    np.testing.assert_allclose(made[0], wanted, atol=1e-5)
    made = preprocess(picture, Preprocessing(scale=1 / 255, mean=mean[::-1], std=std[::-1], color="bgr"))
    np.testing.assert_allclose(made[0], wanted.transpose(2, 0, 1)[::-1], atol=1e-5)


def test_gray_is_what_pillow_calls_gray(picture: Any) -> None:
    made = preprocess(picture, Preprocessing(color="gray"))
    assert made.shape == (1, 1, 48, 64)
    np.testing.assert_allclose(made[0, 0], np.asarray(Image.fromarray(picture).convert("L")), atol=1)


@pytest.mark.parametrize("size", [(32, 24), (128, 96), (50, 90)])
def test_resizing_agrees_with_pillow(picture: Any, size: tuple[int, int]) -> None:
    made = preprocess(picture, Preprocessing(size=size, layout="NHWC", dtype="uint8"))
    wanted = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR), np.int16)
    difference = np.abs(made[0].astype(np.int16) - wanted)
    assert difference.mean() < 1
    assert np.percentile(difference, 99) <= 3


def test_integer_inputs_are_rounded_clipped_and_quantised(picture: Any) -> None:
    raw = preprocess(picture, Preprocessing(dtype="uint8", layout="NHWC"))
    assert np.array_equal(raw[0], picture)
    signed = preprocess(picture, Preprocessing(dtype="int8", layout="NHWC", mean=(128,)))
    assert np.array_equal(signed[0], picture.astype(np.int16) - 128)
    # A TFLite input of real values from -1 to 1: stored = value / 0.0078125 + 128.
    form = Preprocessing(dtype="uint8", scale=1 / 127.5, mean=(1,), quantization=(0.0078125, 128), layout="NHWC")
    wanted = np.clip(np.rint((picture / 127.5 - 1) / 0.0078125 + 128), 0, 255)
    assert np.array_equal(preprocess(picture, form)[0], wanted)


def test_borders_are_filled_and_hold_the_normalised_fill() -> None:
    white = np.full((20, 40, 3), 255, np.uint8)
    form = Preprocessing(size=(40, 40), fit="letterbox", fill=51, scale=1 / 255)
    made = preprocess(white, form)[0]
    np.testing.assert_allclose(made[:, 10:30], 1, atol=1e-6)
    np.testing.assert_allclose(made[:, :10], 0.2, atol=1e-6)
    np.testing.assert_allclose(made[:, 30:], 0.2, atol=1e-6)
    padded = preprocess(white, replace(form, size=(50, 30), fit="pad"))[0]
    np.testing.assert_allclose(padded[:, :20, :40], 1, atol=1e-6)
    np.testing.assert_allclose(padded[:, 20:], 0.2, atol=1e-6)
    np.testing.assert_allclose(padded[:, :, 40:], 0.2, atol=1e-6)
    smaller = preprocess(white, replace(form, size=(20, 20), fit="pad"))[0]
    np.testing.assert_allclose(smaller[:, :10], 1, atol=1e-6)
    np.testing.assert_allclose(smaller[:, 10:], 0.2, atol=1e-6)


def test_a_crop_keeps_the_centre(picture: Any) -> None:
    made = preprocess(picture, Preprocessing(size=(48, 48), fit="crop", dtype="uint8", layout="NHWC"))
    assert np.array_equal(made[0], picture[:, 8:56])


def test_every_byte_of_a_given_buffer_is_written_and_the_buffer_comes_back(picture: Any) -> None:
    for fit in ("stretch", "letterbox", "crop", "pad"):
        form = Preprocessing(size=(100, 30), fit=fit)  # type: ignore[arg-type]
        out = np.full((1, 3, 30, 100), np.nan, np.float32)
        assert preprocess(picture, form, out) is out
        assert not np.isnan(out).any()
        np.testing.assert_array_equal(out, preprocess(picture, form))


@examples(80, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, FITS, st.sampled_from(["rgb", "gray"]))
def test_any_size_into_any_size(w: int, h: int, into_w: int, into_h: int, fit: Any, color: Any) -> None:
    image = np.full((h, w, 3), 200, np.uint8)
    made = preprocess(image, Preprocessing(size=(into_w, into_h), fit=fit, fill=7, color=color))[0]
    assert set(np.unique(made)) <= {7, 199, 200, 201}
    if fit in ("stretch", "crop"):
        assert made.min() > 7


@examples(80, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, FITS)
def test_the_way_back_undoes_the_way_there(w: int, h: int, into_w: int, into_h: int, fit: Any) -> None:
    where = Preprocessing(size=(into_w, into_h), fit=fit).transform(w, h)
    for x, y in ((0, 0), (w, h), (w / 3, h / 2)):
        model = (x * where.scale_x + where.offset_x, y * where.scale_y + where.offset_y)
        assert where.to_image(*model) == pytest.approx((x, y), abs=1e-6)
        if fit != "crop":
            assert -1e-6 <= model[0] <= into_w + 1e-6
            assert -1e-6 <= model[1] <= into_h + 1e-6


@pytest.mark.parametrize("fit", ["stretch", "letterbox", "crop", "pad"])
def test_a_mark_found_in_the_model_input_is_found_again_in_the_picture(fit: Any) -> None:
    image = np.zeros((120, 200, 3), np.uint8)
    image[55:65, 95:105] = 255
    form = Preprocessing(size=(96, 96), fit=fit, color="gray")
    ys, xs = np.nonzero(preprocess(image, form)[0, 0] > 127)
    found = form.transform(200, 120).to_image(xs.mean() + 0.5, ys.mean() + 0.5)
    assert found == pytest.approx((100, 60), abs=1.5)


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "size", "color"),
    [
        ((1, 3, 224, 320), "float32", "NCHW", (320, 224), "rgb"),
        ((1, 224, 320, 3), "float32", "NHWC", (320, 224), "rgb"),
        ((1, 28, 28, 1), "uint8", "NHWC", (28, 28), "gray"),
        ((1, 1, 28, 28), "int8", "NCHW", (28, 28), "gray"),
        ((-1, 3, -1, -1), "float32", "NCHW", None, "rgb"),
    ],
)
def test_the_default_follows_the_shape(shape: Any, dtype: str, layout: str, size: Any, color: str) -> None:
    form = default_for(shape, dtype)
    assert (form.layout, form.size, form.color, form.dtype) == (layout, size, color, dtype)
    made = preprocess(np.full((40, 60, 3), 255, np.uint8), form)
    assert made.dtype == dtype
    assert size is None or made.shape == shape
    assert made.max() == pytest.approx({"float32": 1, "uint8": 255, "int8": 127}[dtype])


@pytest.mark.parametrize("shape", [(1, 1000), (1, 7, 224, 224), (8, 3, 224, 224), (1, 3, 16, 224, 224)])
def test_an_input_that_is_no_picture_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="not one picture"):
        default_for(shape, "float32")


def test_a_buffer_or_frame_of_the_wrong_kind_is_refused(picture: Any) -> None:
    with pytest.raises(OptionError, match=r"model takes \(1, 3, 8, 8\).*makes \(1, 3, 48, 64\)"):
        preprocess(picture, Preprocessing(), np.empty((1, 3, 8, 8), np.float32))
    with pytest.raises(VideoError, match="not a picture"):
        preprocess(picture[..., 0], Preprocessing())


def test_threads_do_not_disturb_each_other() -> None:
    forms = [Preprocessing(size=(40 + n, 30), fit="letterbox", fill=n) for n in range(8)]
    images = [frame.image for frame in open_source("synthetic:80x60:8")]
    wanted = [preprocess(image, form) for image, form in zip(images, forms, strict=True)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            for made, same in zip(pool.map(preprocess, images, forms), wanted, strict=True):
                np.testing.assert_array_equal(made, same)


# Files


def test_a_toml_file_changes_what_it_names_and_leaves_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "input.toml"
    path.write_text('fit = "letterbox"\nfill = 114\nmean = [0.5, 0.5, 0.5]\nstd = [0.5]\nsize = [640, 288]\n')
    form = Preprocessing.from_toml(path, default_for((1, 3, 224, 224), "float32"))
    assert form == Preprocessing(
        size=(640, 288), fit="letterbox", fill=114, mean=(0.5, 0.5, 0.5), std=(0.5,), scale=1 / 255
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fits = 1", r"line 1: preprocessing: there is no key fits; did you mean fit\?"),
        ('fit = "squeeze"', r"line 1: preprocessing: fit = 'squeeze'; it must be one of stretch, letterbox, crop, pad"),
        ("size = [640]", r"size = \[640\]; it must be \[width, height\]"),
        ("size = [640, 0]", r"size = \(640, 0\); it must be \[width, height\] in pixels, both above 0"),
        ("fill = 300", r"fill = 300; it must be a whole number from 0 to 255"),
        ("fill = true", r"fill = True"),
        ('color = "hsv"', "rgb, bgr, gray"),
        ("mean = [1, 2]", "of one for each channel"),
        ("std = [0]", "all above 0"),
        ("scale = nan", "scale = nan"),
        ('dtype = "float16"', "float32, uint8, int8"),
        ("quantization = [0.5, 3]", "for dtype uint8 or int8"),
        ("fit letterbox", "a line looks like fit = "),
    ],
)
def test_mistakes_in_a_file_are_named_with_what_is_allowed(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "input.toml"
    path.write_text(line)
    with pytest.raises(OptionError, match=said) as caught:
        Preprocessing.from_toml(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"missing\.toml"):
        Preprocessing.from_toml(tmp_path / "missing.toml")


def test_it_survives_json() -> None:
    form = Preprocessing(size=(4, 5), mean=(1, 2, 3), dtype="int8", quantization=(0.5, -3), layout="NHWC")
    assert Preprocessing.from_dict(json.loads(json.dumps(form.to_dict()))) == form
    assert Preprocessing.from_dict(Preprocessing().to_dict()) == Preprocessing()
