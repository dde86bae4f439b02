"""Which decoder and which preprocessing a model gets: by name, recognised, or none, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("av")

from tests.plugins.video.decoding import interface
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline_video import (
    FAMILIES,
    PRESETS,
    Annotation,
    Mask,
    Preprocessing,
    Request,
    detections,
    interpret,
    preprocess,
)
from tvm_pipeline_video.decoders.labels import COCO, read_labels
from tvm_pipeline_video.detections import tracking_package

ULTRALYTICS = {"task": "detect", "names": "{0: 'cat', 1: 'dog'}"}
SIZE = (96, 64)
CELLS = 126  # of grids over this size


@pytest.mark.parametrize(
    ("outputs", "size", "metadata", "form"),
    [
        ({"output0": (1, 84, 8400)}, (640, 640), {}, "yolov8: output0 [1, 84, 8400], 80 classes"),
        ({"output0": (1, 84, 3 * 6300 // 3)}, (640, 480), {}, "yolov8: output0 [1, 84, 6300], 80 classes"),
        ({"output0": (1, 25200, 85)}, (640, 640), {}, "yolov5: output0 [1, 25200, 85], 80 classes"),
        ({"output0": (1, 300, 6)}, (640, 640), ULTRALYTICS, "yolov10: output0 [1, 300, 6], 2 classes"),
        ({"output0": (1, 6, CELLS)}, SIZE, ULTRALYTICS, f"yolov8: output0 [1, 6, {CELLS}], 2 classes"),
        ({"output0": (1, CELLS, 6)}, SIZE, ULTRALYTICS, f"yolov8: output0 [1, {CELLS}, 6], 2 classes"),
        (
            {"output0": (1, 116, 8400), "output1": (1, 32, 160, 160)},
            (640, 640),
            {},
            "yolov8-seg: output0 [1, 116, 8400], output1 [1, 32, 160, 160], 80 classes",
        ),
        ({"output0": (1, 56, 8400)}, (640, 640), {"task": "pose", "kpt_shape": "[17, 3]"}, "yolov8-pose: output0"),
        ({"output0": (1, 56, 8400)}, (640, 640), {"task": "pose", "kpt_shape": "-" * 100_000}, "yolov8-pose: output0"),
        ({"output0": (1, 56, 8400)}, (640, 640), {"task": "pose", "kpt_shape": "[-5, 3]"}, "yolov8-pose: output0"),
        ({"output0": (1, 20, 8400)}, (640, 640), {"task": "obb"}, "yolov8-obb: output0 [1, 20, 8400], 15 classes"),
        ({"prob": (1, 1000)}, (224, 224), {}, "classification: prob [1, 1000], 1000 classes"),
        ({"out": (1, 4)}, (224, 224), {"character": "0\n90\n180\n270"}, "classification: out [1, 4], 4 classes"),
        ({"r": (1, 896, 16), "c": (1, 896, 1)}, (128, 128), {}, "face-short: r [1, 896, 16], c [1, 896, 1]"),
        ({"r": (1, 2016, 18), "c": (1, 2016, 1)}, (192, 192), {}, "palm: r [1, 2016, 18], c [1, 2016, 1]"),
        ({"b": (1, 1917, 4), "s": (1, 1917, 91)}, (300, 300), {}, "ssd-anchors: b [1, 1917, 4], s [1, 1917, 91], 90"),
        ({"b": (1, 1917, 1, 4), "s": (1, 1917, 24)}, (300, 300), {}, "ssd-anchors: b [1, 1917, 1, 4], s [1, 1917, 24]"),
        ({"out": (1, 21, 65, 65)}, (513, 513), {}, "segmentation-argmax: out [1, 21, 65, 65], 21 classes"),
        ({"p": (1, 63), "a": (1, 1), "b": (1, 1), "c": (1, 63)}, (224, 224), {}, "landmarks: p [1, 63], a [1, 1]"),
    ],
)
def test_known_models_are_recognised_and_it_is_said(outputs, size, metadata, form) -> None:
    found = interpret(interface(outputs, size), metadata)
    assert found.decode is not None
    assert found.said[1].startswith(f"decoder: {form}")
    assert ", recognised from its outputs" in found.said[1]
    assert "assumed from" not in found.said[0] or form.startswith(("classification", "segmentation"))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"scores": (1, 10)}, "the shapes of scores [1, 10] do not tell what they mean; if it fits, give `decoder` as"),
        ({"map": (1, 1, 64, 96)}, "give `decoder` as segmentation-sigmoid or text, or as file.py:function"),
        ({"output": (1, CELLS, 85)}, f"output [1, {CELLS}, 85] can be read as yolov8, yolov5, yolox; give one of them"),
        ({"odd": (1, 7, 7)}, "odd [1, 7, 7] has the form of no known family (classification, yolo, ssd, "),
    ],
)
def test_what_is_not_certain_gets_no_decoder_and_a_reason(outputs, words) -> None:
    found = interpret(interface(outputs, SIZE))
    assert found.decode is None
    assert found.name == ""
    assert words in found.said[1]
    assert "docs/decoders.md" in found.said[1]


def test_the_number_of_labels_tells_yolox_from_yolov8() -> None:
    model = interface({"output": (1, CELLS, 6)}, SIZE)
    assert interpret(model, None, Request(labels=("a", "b"))).said[1].startswith("decoder: yolov8")
    with pytest.raises(OptionError, match=r"can be read as yolov8, yolov5, yolox; give one of these, or `labels`"):
        interpret(model, None, Request("yolo"))
    assert interpret(model, None, Request("yolox")).name == "yolox"


@pytest.mark.parametrize(
    ("outputs", "request_", "words"),
    [
        ({"out": (1, 84, CELLS)}, Request("yolov9"), "did you mean yolov8"),
        (
            {"out": (1, 10)},
            Request("ssd"),
            r"`decoder` ssd cannot read the outputs out \[1, 10\]; it reads \[1, N, 4\]",
        ),
        ({"out": (1, 10)}, Request(threshold=0.5), "`threshold` goes with a decoder: none, since the shapes of out"),
        ({"out": (1, 10)}, Request("classification", threshold=7), "`threshold` 7: it must be above 0 and below 1"),
        ({"out": (1, 84, CELLS)}, Request(labels=("cat",)), "`labels`: there are 1, and the model has 80 classes"),
        ({"out": (1, 84, CELLS)}, Request(classes=("persn",)), "`classes` persn: .* such as person"),
        ({"out": (1, 84, CELLS)}, Request(classes=("80",)), "`classes` 80: the model has no class"),
        (
            {"out": (1, 21, 64, 96)},
            Request(threshold=0.5),
            "`threshold` 0.5: the decoder segmentation-argmax takes none",
        ),
        ({"out": (1, 10)}, Request("json:loads", threshold=0.5), "`threshold` is for the decoders in the box"),
    ],
)
def test_options_that_do_not_fit_are_refused(outputs, request_, words) -> None:
    with pytest.raises(OptionError, match=words):
        interpret(interface(outputs, SIZE), None, request_)


def test_classes_and_threshold_choose_what_is_listed() -> None:
    model = interface({"out": (1, 84, CELLS)}, SIZE)
    rows = np.zeros((1, 84, CELLS), np.float32)
    rows[0, :4] = np.linspace(0, 60, CELLS)
    for cell, kind, score in ((5, 0, 0.9), (40, 2, 0.5), (70, 16, 0.3)):
        rows[0, :4, cell], rows[0, 4 + kind, cell] = (cell / 2, 20, 8, 8), score

    def labels(**options) -> list[str]:
        found = interpret(model, None, Request("yolo", **options))
        return [one.label for one in found.decode({"out": rows}, found.preprocessing.transform(*SIZE))]

    assert labels() == ["person", "car", "dog"]
    assert labels(threshold=0.4) == ["person", "car"]
    assert labels(classes=("dog", "2")) == ["car", "dog"]
    assert labels(labels=tuple(f"thing {index}" for index in range(80)))[0] == "thing 0"
    assert "assumed to be COCO's: `labels` gives others" in interpret(model).said[1]


def test_every_name_of_the_table_is_that_of_one_form() -> None:
    names = [name for family in FAMILIES.values() for name in family.names]
    assert len(set(names)) == len(names)
    assert "none" not in names
    assert interpret(interface({"out": (1, 84, CELLS)}, SIZE), None, Request("none")).decode is None


def test_the_page_lists_every_family_form_and_preset() -> None:
    page = (Path(__file__).parents[3] / "docs" / "decoders.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    names = [*FAMILIES, *(name for family in FAMILIES.values() for name in family.names), *PRESETS]
    assert [name for name in names if not any(f"`{name}`" in row for row in rows)] == []


def test_labels_of_files(tmp_path) -> None:
    assert read_labels("coco") == COCO
    assert (len(COCO), COCO[0], COCO[9], COCO[79]) == (80, "person", "traffic light", "toothbrush")
    path = tmp_path / "labels.txt"
    path.write_text("cat\n\n dog \n\n")
    assert read_labels(str(path)) == ("cat", "", "dog")
    for content, words in ((b"\n", "it has no labels"), (b"\xff\xfe", "no text in UTF-8")):
        path.write_bytes(content)
        with pytest.raises(OptionError, match=words):
            read_labels(str(path))


# ------------------------------------------------------------------------------------------- preprocessing


def test_the_preprocessing_and_where_it_is_from_is_said(tmp_path) -> None:
    toml = tmp_path / "net.toml"
    toml.write_text('preset = "imagenet"\nfit = "letterbox"\n')
    scores, detector = interface({"out": (1, 10)}), interface({"out": (1, 84, CELLS)}, SIZE)
    classifier = interface({"out": (1, 1000)}, (224, 224))
    mean = "0..1 less [0.485, 0.456, 0.406] by [0.229, 0.224, 0.225]"
    for model, metadata, given, words in (
        (
            scores,
            {},
            None,
            "64x64 stretch, rgb, 0..1: assumed from the input's shape and type; if that is wrong, write",
        ),
        (scores, {}, toml, f"64x64 letterbox, rgb, {mean}: from {toml}"),
        (scores, {}, "signed", "64x64 stretch, rgb, -1..1: the preset signed (-1 to 1: Keras's mode tf"),
        (scores, {}, {"fit": "crop"}, "64x64 crop, rgb, 0..1: from the bundle"),
        (
            detector,
            {"task": "detect"},
            None,
            "96x64 letterbox, rgb, 0..1: as yolov8 takes it by the model's metadata, the",
        ),
        (
            detector,
            {},
            None,
            "96x64 letterbox, rgb, 0..1: as yolov8 takes it, the preset yolo (Ultralytics' LetterBox)",
        ),
        (detector, {}, "raw", "96x64 stretch, rgb, 0..255: the preset raw"),
        (classifier, {"producer_name": "pytorch"}, None, f"224x224 crop, rgb, {mean}: as classification takes it"),
        (classifier, {}, None, "224x224 stretch, rgb, 0..1: assumed from"),
        (
            scores,
            {"input_mean": "127.5", "input_std": "127.5"},
            None,
            "64x64 stretch, rgb, -1..1: from the model's meta",
        ),
    ):
        found = interpret(model, metadata, None, given, "from the bundle")
        assert found.said[0].startswith(f"preprocessing: {words}")


def test_presets_of_integers_and_of_gray_pictures() -> None:
    found = interpret(interface({"out": (1, 84, CELLS)}, SIZE, takes="uint8"))
    assert found.preprocessing == Preprocessing(size=SIZE, fit="letterbox", fill=114, dtype="uint8")
    for name in PRESETS:
        gray = Preprocessing(size=(8, 8), color="gray").with_preset(name)
        assert (gray.color, len(gray.mean)) == ("gray", 1)
    assert Preprocessing(size=(8, 8), scale=0.5, mean=(3.0,)).with_preset("raw") == Preprocessing(size=(8, 8))


def test_quantised_inputs_and_outputs_by_the_scales_of_the_file() -> None:
    scales = {"input_quantization": "0.01865845 -14", "output_quantization": "0.5 -3"}
    model = interface({"out": (1, 1000)}, takes="int8", gives="int8")
    found = interpret(model, scales, None, "imagenet")
    white = preprocess(np.full((64, 64, 3), 255, np.uint8), found.preprocessing)
    real = (white[0, :, 0, 0].astype(float) + 14) * 0.01865845
    np.testing.assert_allclose(real, (1 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225], atol=0.01)
    logits = np.full((1, 1000), -128, np.int8)
    logits[0, 7], logits[0, 8] = 27, 23  # 15 and 13 in real values
    first, second = found.decode({"out": logits}, found.preprocessing.transform(64, 64))
    assert (first.label, second.label) == ("class 7", "class 8")
    assert first.score / second.score == pytest.approx(np.exp(2))

    shares = interpret(
        interface({"out": (1, 3)}, gives="int8"), {"output_quantization": "0.00390625 -128"}, Request("classification")
    )
    (best, *_) = shares.decode({"out": np.array([[102, -110, -120]], np.int8)}, shares.preprocessing.transform(64, 64))
    assert best.score == pytest.approx(230 / 256)

    unknown = interpret(model)
    assert unknown.decode is None
    assert "the outputs out [1, 1000] are quantised, and the model's file does not say their scale" in unknown.said[1]
    with pytest.raises(OptionError, match=r"`decoder` classification: the outputs out .* are quantised"):
        interpret(model, None, Request("classification"))


def test_a_preset_or_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(OptionError, match=r"`preprocessing` imagnet: there is no such file, and no such preset; the"):
        interpret(interface({"out": (1, 10)}), preprocessing="imagnet")
    with pytest.raises(OptionError, match=r"there is no preset 'yolov'; the presets are raw, unit"):
        Preprocessing.from_dict({"preset": "yolov"})


# ------------------------------------------------------------------------------------------- supervision


def test_detections_of_supervision() -> None:
    needs("tracking")
    supervision = tracking_package("supervision")
    mask = Mask.of(np.eye(4))
    found = [
        Annotation("dog", 0.5, (1.0, 2.0, 3.0, 4.0), mask=mask),
        Annotation("cat", None, (5.0, 6.0, 7.0, 8.0), mask=mask),
        Annotation("all", 1.0),
    ]
    made = detections(found, ["cat", "dog"])
    assert isinstance(made, supervision.Detections)
    assert made.xyxy.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert made.class_id.tolist() == [1, 0]
    assert made.confidence.tolist() == [0.5, 1]
    assert made.data["class_name"].tolist() == ["dog", "cat"]
    assert np.array_equal(made.mask, [np.eye(4, dtype=bool)] * 2)
    assert len(detections([])) == 0


def test_detections_without_supervision_name_the_package(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "supervision", None)
    with pytest.raises(PipelineError, match=r"pip install .tvm-pipeline\[tracking\]"):
        detections([])
