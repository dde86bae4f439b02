"""Decoders of boxes: known boxes are written as each family's model would write them, and read again."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.parts import needs

needs("av")

from tests.plugins.video.decoding import (
    PICTURE,
    THINGS,
    as_center,
    assert_things,
    found_in,
    interface,
    on_input,
    shapes,
)
from tvm_pipeline_video import Request, interpret
from tvm_pipeline_video.decoders import anchors, mediapipe
from tvm_pipeline_video.decoders.boxes import groups, kept

SIZE = (96, 64)
CELLS = 12 * 8 + 6 * 4 + 3 * 2
LABELS = ("cat", "dog", "bird")
WANTED = [(box, LABELS[index]) for box, index in THINGS]
NAMES = {"names": str(dict(enumerate(LABELS)))}


def preprocessed(shapes_: dict, request: Request | None = None, size=SIZE, metadata=NAMES, nhwc=False):
    return interpret(interface(shapes_, size, nhwc=nhwc), metadata, request)


def table(columns: int, count: int, found, first_score: int) -> np.ndarray:
    """Return rows (count, columns) of YOLO with the things at some cells, each twice, the second a little weaker."""
    rows = np.zeros((count, columns), np.float32)
    # Cells without a thing have centers all over the input.
    rows[:, 0], rows[:, 1] = np.linspace(1, SIZE[0], count), np.linspace(1, SIZE[1], count)
    for index, (box, kind) in enumerate(THINGS):
        for copy in (0, 1):
            row = rows[10 * index + copy]
            row[:4] = as_center(on_input(found, box)) + 0.3 * copy
            row[first_score + kind] = 0.9 - 0.2 * copy
    return rows


@pytest.mark.parametrize("share", [False, True], ids=["pixels", "shares"])
def test_yolov8_with_columns_or_rows_first(share: bool) -> None:
    found = preprocessed({"output0": (1, 7, CELLS)})
    rows = table(7, CELLS, found, 4)
    if share:  # as Ultralytics exports TFLite
        rows[:, :4] /= np.array([*SIZE, *SIZE], np.float32)
    assert_things(found_in({"output0": rows.T[None]}, size=SIZE, metadata=NAMES), WANTED)
    assert_things(found_in({"output0": rows[None]}, size=SIZE, metadata=NAMES), WANTED)
    assert "640" not in found.said[0]
    assert found.said[0].startswith("preprocessing: 96x64 letterbox, rgb, 0..1: as yolov8 takes it")
    assert found.said[1] == f"decoder: yolov8: output0 [1, 7, {CELLS}], 3 classes, recognised from its outputs"


def test_yolov5_weighs_scores_with_objectness() -> None:
    found = preprocessed({"output": (1, 3 * CELLS, 8)})
    rows = table(8, 3 * CELLS, found, 5)
    rows[:, 4] = 1.0
    rows[10, 4] = rows[11, 4] = 0.1  # no object after all
    wanted = [WANTED[0], WANTED[2]]
    assert_things(found_in({"output": rows[None]}, size=SIZE, metadata=NAMES), wanted)
    heads = {f"head{side}": np.zeros((1, 3, side, side, 8), np.float32) for side in (8, 4, 2)}
    assert_things(found_in({"output": rows[None], **heads}, size=SIZE, metadata=NAMES), wanted)


def test_yolox_is_relative_to_its_cells() -> None:
    request = Request("yolox", LABELS)
    found = preprocessed({"output": (1, CELLS, 8)}, request)
    assert "pad, bgr, 0..255" in found.said[0]
    rows = np.zeros((CELLS, 8), np.float32)
    for stride, first, across in ((8, 0, 12), (16, 96, 6), (32, 120, 3)):
        box, kind = THINGS[(8, 16, 32).index(stride)]
        center = as_center(on_input(found, box))
        x, y = (center[:2] // stride).astype(int)
        row = rows[first + y * across + x]
        row[:4] = *(center[:2] / stride - (x, y)), *np.log(center[2:] / stride)
        row[4], row[5 + kind] = 0.9, 0.8
    annotations = found_in({"output": rows[None]}, request, SIZE)
    assert_things(annotations, WANTED)
    assert all(one.score == pytest.approx(0.72) for one in annotations)


def test_end_to_end_yolo_is_read_as_it_is() -> None:
    found = preprocessed({"output0": (1, 20, 6)})
    rows = np.zeros((1, 20, 6), np.float32)
    for index, (box, kind) in enumerate(THINGS):
        rows[0, index] = *on_input(found, box), 0.8, kind
    rows[0, 3] = 1, 2, 30, 40, 0.1, 0
    assert_things(found_in({"output0": rows}, size=SIZE, metadata=NAMES), WANTED)


def test_yolo_masks_lie_where_the_things_are() -> None:
    """Each prototype covers the input but for its right half, or its left one; the weights choose one of them."""
    shapes_ = {"output0": (1, 7 + 2, CELLS), "output1": (1, 2, 16, 24)}
    found = preprocessed(shapes_)
    rows = table(9, CELLS, found, 4)
    rows[:, 7] = 1.0
    protos = np.full((1, 2, 16, 24), -5.0, np.float32)
    protos[0, 0, :, :12] = 5.0
    outputs = {"output0": rows.T[None], "output1": protos}
    annotations = found_in(outputs, size=SIZE, metadata=NAMES)
    assert_things(annotations, WANTED)
    for one in annotations:
        assert one.mask is not None
        left, top, right, bottom = map(round, one.box)
        wanted = np.zeros(PICTURE[::-1], bool)
        wanted[top:bottom, left : min(right, PICTURE[0] // 2)] = True
        assert one.mask.size == PICTURE[::-1]
        assert np.mean(one.mask.pixels() != wanted) < 0.01


def test_yolo_pose_by_metadata() -> None:
    metadata = {"names": "{0: 'person'}", "task": "pose", "kpt_shape": "[2, 3]"}
    found = preprocessed({"output0": (1, 4 + 1 + 6, CELLS)}, metadata=metadata)
    rows = np.zeros((CELLS, 11), np.float32)
    box = THINGS[0][0]
    corners = on_input(found, box)
    rows[7, :5] = *as_center(corners), 0.9
    rows[7, 5:] = *corners[:2], 0.9, *corners[2:], 0.2  # the second point is not seen
    (person,) = found_in({"output0": rows.T[None]}, size=SIZE, metadata=metadata)
    assert person.label == "person"
    np.testing.assert_allclose(person.points, [box[:2]], atol=0.05)


def test_turned_boxes_are_polygons() -> None:
    metadata = {**NAMES, "task": "obb"}
    rows = np.zeros((CELLS, 8), np.float32)
    rows[:, 0] = 48
    rows[5] = 48, 32, 20, 10, 0, 0.9, 0, np.pi / 2
    (dog,) = found_in({"output0": rows.T[None]}, size=(96, 64), metadata=metadata)
    assert dog.label == "dog"
    scale = 64 / 240  # the picture fills the height of the input
    offset = (96 - 300 * scale) / 2
    wanted = {((48 - offset + dx) / scale, (32 + dy) / scale) for dx in (-5, 5) for dy in (-10, 10)}
    np.testing.assert_allclose(sorted(dog.polygon), sorted(wanted), atol=0.5)


def test_ssd_with_its_own_suppression_in_both_orders() -> None:
    found = preprocessed({"a": (1, 10, 4), "b": (1, 10), "c": (1, 10), "d": (1,)}, nhwc=True)
    boxes, kinds, scores = (
        np.zeros((1, 10, 4), np.float32),
        np.zeros((1, 10), np.float32),
        np.zeros((1, 10), np.float32),
    )
    for index, (box, kind) in enumerate(THINGS):
        boxes[0, index] = (on_input(found, box) / np.array([*SIZE, *SIZE]))[[1, 0, 3, 2]]
        kinds[0, index], scores[0, index] = kind, 0.9
    count = np.array([3.0], np.float32)
    for outputs in (
        {"a": boxes, "b": kinds, "c": scores, "d": count},
        {"a": scores, "b": boxes, "c": count, "d": kinds},
    ):
        assert_things(found_in(outputs, Request(labels=LABELS), SIZE, nhwc=True), WANTED)


def test_rows_of_detection_output() -> None:
    rows = np.zeros((1, 1, 6, 7), np.float32)
    found = preprocessed({"detection_out": rows.shape})
    for index, (box, kind) in enumerate(THINGS):
        rows[0, 0, index] = 0, kind, 0.9, *(on_input(found, box) / np.array([*SIZE, *SIZE]))
    rows[0, 0, 3, 0] = -1
    rows[0, 0, 3, 2] = 1
    assert_things(found_in({"detection_out": rows}, Request(labels=LABELS), SIZE), WANTED)


@pytest.mark.parametrize("shape", [(1, 1917, 4), (1, 1917, 1, 4)])
def test_ssd_relative_to_the_anchors_of_tensorflow(shape: tuple[int, ...]) -> None:
    """Each thing is written for the anchor that overlaps it most; TensorFlow's lists of labels begin with `???`."""
    options = anchors.SSD_300
    own = anchors.anchors(options)
    found = preprocessed({"boxes": (1, 1917, 4), "scores": (1, 1917, 4)}, size=(300, 300))
    boxes, scores = np.zeros((1, 1917, 4), np.float32), np.zeros((1, 1917, 4), np.float32)
    scores[0, :, 0] = 1  # the background
    for box, kind in THINGS:
        x, y, width, height = as_center(on_input(found, box)) / 300
        distances = np.abs(own[:, :2] - (x, y)).sum(axis=1) + np.abs(np.log(own[:, 2:] / (width, height))).sum(axis=1)
        best = int(distances.argmin())
        cx, cy, w, h = own[best]
        boxes[0, best] = 10 * (y - cy) / h, 10 * (x - cx) / w, 5 * np.log(height / h), 5 * np.log(width / w)
        scores[0, best, 1 + kind] = 0.9
    outputs = {"boxes": boxes.reshape(shape), "scores": scores}
    assert_things(found_in(outputs, Request(labels=("???", *LABELS)), (300, 300)), WANTED)


def test_anchors_are_as_many_and_where_mediapipe_has_them() -> None:
    """The counts are those of MediaPipe's models; the positions those of its SsdAnchorsCalculator's golden files."""
    counts = {kind.name: kind.options.count for kind in mediapipe.KINDS}
    assert counts == {
        "face-short": 896,
        "face-back": 896,
        "face-full": 2304,
        "palm": 2016,
        "palm-256": 2944,
        "pose-detection": 2254,
    }
    face = anchors.anchors(anchors.FACE_SHORT)
    np.testing.assert_allclose(face[:3], [[0.03125, 0.03125, 1, 1]] * 2 + [[0.09375, 0.03125, 1, 1]])
    np.testing.assert_allclose(face[512:519, :2], [[0.0625, 0.0625]] * 6 + [[0.1875, 0.0625]])
    ssd = anchors.anchors(anchors.SSD_300)
    np.testing.assert_allclose(
        ssd[:3, 2:], [[0.1, 0.1], [0.2 * 2**0.5, 0.2 / 2**0.5], [0.2 / 2**0.5, 0.2 * 2**0.5]], 1e-6
    )
    np.testing.assert_allclose(ssd[-1], [0.5, 0.5, (0.95 * 1.0) ** 0.5, (0.95 * 1.0) ** 0.5], 1e-6)
    np.testing.assert_allclose(ssd[-6, 2:], [0.95, 0.95], 1e-6)


@pytest.mark.parametrize("kind", mediapipe.KINDS, ids=lambda kind: kind.name)
def test_mediapipe_around_its_anchors(kind: mediapipe.Kind) -> None:
    """Scores come before the sigmoid, in one part or in two; two neighbouring anchors see the same thing."""
    options, columns = kind.options, 4 + 2 * kind.points
    size = (options.size, options.size)
    found = preprocessed({"r": (1, options.count, columns), "c": (1, options.count, 1)}, size=size, nhwc=True)
    rows, scores = np.zeros((1, options.count, columns), np.float32), np.full((1, options.count, 1), -200, np.float32)
    centers = anchors.anchors(options)[:, :2] * options.size
    box = THINGS[0][0]
    corners = on_input(found, box)
    x, y, width, height = as_center(corners)
    nearest = np.argsort(np.abs(centers - (x, y)).sum(axis=1), kind="stable")[:2]
    for index, score in zip(nearest, (5.0, 3.0), strict=True):
        rows[0, index, :4] = x - centers[index, 0], y - centers[index, 1], width, height
        rows[0, index, 4:] = (np.tile(corners[:2], kind.points).reshape(-1, 2) - centers[index]).reshape(-1)
        scores[0, index] = score
    outputs = {"r": rows, "c": scores}
    (one,) = found_in(outputs, size=size, nhwc=True)
    assert_things([one], [(box, kind.label)], within=0.1)
    assert one.score == pytest.approx(1 / (1 + np.exp(-5)))
    np.testing.assert_allclose(one.points, [box[:2]] * kind.points, atol=0.1)
    parted = {"c1": scores[:, :300], "c2": scores[:, 300:], "r1": rows[:, :300], "r2": rows[:, 300:]}
    assert found_in(parted, size=size, nhwc=True) == [one]
    assert found_in({**outputs, "c": np.full_like(scores, -200)}, size=size, nhwc=True) == []


def test_picodet_expects_the_distance_to_each_side() -> None:
    counts = {8: 96, 16: 24, 32: 6}
    outputs = {f"s{stride}": np.zeros((1, count, 3), np.float32) for stride, count in counts.items()}
    outputs |= {f"d{stride}": np.zeros((1, count, 32), np.float32) for stride, count in counts.items()}
    found = preprocessed(shapes(outputs))
    for (stride, across), (box, kind) in zip(((8, 12), (32, 3), (16, 6)), THINGS, strict=True):
        corners = on_input(found, box)
        x, y = ((corners[:2] + corners[2:]) / 2 // stride).astype(int)
        center = (np.array([x, y]) + 0.5) * stride
        sides = np.concatenate([center - corners[:2], corners[2:] - center]) / stride
        bins = np.full((4, 8), -30.0, np.float32)
        for side, distance in enumerate(sides):  # between two bins, by their shares
            low = int(distance)
            bins[side, low], bins[side, low + 1] = np.log(1 - distance + low + 1e-9), np.log(distance - low + 1e-9)
        outputs[f"s{stride}"][0, y * across + x, kind] = 0.9
        outputs[f"d{stride}"][0, y * across + x] = bins.reshape(-1)
    assert_things(found_in(outputs, size=SIZE, metadata=NAMES), WANTED)


def test_suppression_against_the_loop_that_one_would_write_first() -> None:
    draw = np.random.default_rng(0)
    corners = draw.uniform(0, 50, (200, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + draw.uniform(5, 30, (200, 2)).astype(np.float32)], axis=1)
    scores, classes = draw.uniform(0, 1, 200).astype(np.float32), draw.integers(0, 3, 200)

    def share(a, b):
        width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        both = max(0.0, width) * max(0.0, height)
        return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)

    stay: list[int] = []
    for index in np.argsort(-scores):
        if all(classes[index] != classes[other] or share(boxes[index], boxes[other]) <= 0.45 for other in stay):
            stay.append(index)
    assert kept(boxes, scores, classes, 0.45).tolist() == stay
    assert sorted(np.concatenate(groups(boxes, scores, classes, 0.45)).tolist()) == list(range(200))
    assert len(kept(boxes[:0], scores[:0], classes[:0], 0.45)) == 0
