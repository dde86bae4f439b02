"""Decoders of maps, scores and points: what is drawn into the outputs is found again."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw

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
from tvm_pipeline_video.decoders.components import components, smallest_rectangle

SIZE = (96, 64)
LABELS = ("cat", "dog", "bird")


def test_the_best_classes_of_scores_and_of_logits() -> None:
    logits = np.zeros((1, 3, 1, 1), np.float32)
    logits[0, 1] = 3
    best = found_in({"scores": logits}, Request(labels=LABELS))
    assert [one.label for one in best] == ["dog", "cat", "bird"]
    assert best[0].score == pytest.approx(np.exp(3) / (np.exp(3) + 2))
    shares = np.array([[0.004, 0.9, 0.096]], np.float32)
    best = found_in({"scores": shares}, Request("classification"))
    assert [(one.label, pytest.approx(one.score)) for one in best] == [("class 1", 0.9), ("class 2", 0.096)]


def test_peaks_of_centernet() -> None:
    heat, size, offset = (np.zeros((1, channels, 16, 24), np.float32) for channels in (3, 2, 2))
    outputs = {"hm": heat, "wh": size, "reg": offset}
    found = interpret(interface(shapes(outputs), SIZE))
    for box, kind in THINGS:
        center = as_center(on_input(found, box)) / 4
        x, y = center[:2].astype(int)
        heat[0, kind, y, x], heat[0, kind, y, x - 1] = 0.9, 0.7  # the second is no peak
        size[0, :, y, x], offset[0, :, y, x] = center[2:], center[:2] - (x, y)
    wanted = [(box, LABELS[kind]) for box, kind in THINGS]
    assert_things(found_in(outputs, Request(labels=LABELS), SIZE), wanted)
    logits = {**outputs, "hm": np.log(heat + 1e-9) - np.log1p(1e-9 - heat)}
    assert_things(found_in(logits, Request(labels=LABELS), SIZE), wanted)


def test_faces_of_centerface_with_their_points() -> None:
    heat, size, offset, marks = (np.zeros((1, n, 16, 24), np.float32) for n in (1, 2, 2, 10))
    outputs = {"a": heat, "b": size, "c": offset, "d": marks}
    found = interpret(interface(shapes(outputs), SIZE))
    assert found.said[1].startswith("decoder: centerface: a [1, 1, 16, 24], b")
    for box, _ in THINGS[:2]:
        x, y, width, height = as_center(on_input(found, box)) / 4
        column, row = int(x), int(y)
        for near, score in ((0, 0.9), (1, 0.6)):  # the same face from the next cell
            heat[0, 0, row, column + near] = score
            size[0, :, row, column + near] = np.log([height, width])
            offset[0, :, row, column + near] = y - row - 0.5, x - column - near - 0.5
            marks[0, :, row, column + near] = np.tile([0.25, 0.5], 5)  # y, x
    faces = found_in(outputs, size=SIZE)
    assert_things(faces, [(box, "face") for box, _ in THINGS[:2]])
    for face in faces:
        left, top, right, bottom = face.box
        np.testing.assert_allclose(face.points, [((left + right) / 2, top + (bottom - top) / 4)] * 5, atol=0.1)


def drawn(found) -> np.ndarray:
    """Return the classes of the things on the model's input, as a map: 0 is the background."""
    image = Image.new("L", SIZE)
    for box, kind in THINGS:
        left, top, right, bottom = on_input(found, box)
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), fill=kind + 1)
    return np.asarray(image)


@pytest.mark.parametrize("form", ["channels first", "channels last", "classes"])
def test_the_classes_of_pixels_become_masks(form: str) -> None:
    labels = ("background", *LABELS)
    request = Request("segmentation", labels)
    stretched = interpret(interface({"out": (1, 4, 64, 96)}, SIZE), None, request)
    classes = drawn(stretched)
    scores = np.eye(4, dtype=np.float32)[classes][None] * 5 - 2
    arrays = {"channels first": scores.transpose(0, 3, 1, 2), "channels last": scores, "classes": classes[None]}
    array = arrays[form].astype("int64" if form == "classes" else "float32")
    found = interpret(interface({"out": array.shape}, SIZE, gives=str(array.dtype)), None, request)
    masks = {one.label: one for one in found.decode({"out": array}, found.preprocessing.transform(*PICTURE))}
    assert set(masks) == set(LABELS)
    wanted = np.zeros(PICTURE[::-1], int)
    for box, kind in THINGS:  # a later thing covers an earlier one, as it is drawn
        left, top, right, bottom = map(int, box)
        wanted[top:bottom, left:right] = kind + 1
    for kind, label in enumerate(LABELS):
        pixels = masks[label].mask.pixels()
        assert pixels.shape == PICTURE[::-1]
        assert np.mean(pixels != (wanted == kind + 1)) < 0.03
    np.testing.assert_allclose(masks["bird"].box, THINGS[1][0], atol=5)


def test_one_class_by_a_threshold() -> None:
    values = np.full((1, 1, 32, 48), -4.0, np.float32)
    values[0, 0, :16] = 4.0
    request = Request("segmentation", ("road",), 0.8)
    found = interpret(interface({"out": values.shape}, SIZE), None, request)
    (road,) = found.decode({"out": values}, found.preprocessing.transform(*PICTURE))
    assert road.label == "road"
    assert 0.9 < road.score <= 1
    pixels = road.mask.pixels()
    assert pixels[:115].all()
    assert not pixels[121:].any()
    nothing = found.decode({"out": values * 0 - 4}, found.preprocessing.transform(*PICTURE))
    assert nothing == []


def test_lines_of_text_are_turned_rectangles_that_have_grown() -> None:
    """Two lines, one level and one turned, and a dot of noise; a line grows by area * 1.5 / perimeter on each side."""
    size = (320, 192)
    image = Image.new("F", size)
    pen = ImageDraw.Draw(image)
    pen.rectangle((40, 20, 139, 39), fill=0.9)
    center, along, beside = np.array([200.0, 120.0]), np.array([0.8, 0.6]), np.array([-0.6, 0.8])
    corners = [center + a * 60 * along + b * 10 * beside for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    pen.polygon([tuple(corner) for corner in corners], fill=0.8)
    pen.point((300, 10), fill=1.0)
    pen.rectangle((10, 150, 60, 170), fill=0.4)  # unlikely
    values = np.asarray(image)[None, None]
    found = interpret(interface({"maps": values.shape}, size), None, Request("text"), {"size": list(size)})
    level, turned = found.decode({"maps": values}, found.preprocessing.transform(*size))
    grown = 100 * 20 * 1.5 / 240
    np.testing.assert_allclose(level.box, (40 - grown, 20 - grown, 140 + grown, 40 + grown), atol=0.01)
    assert level.score == pytest.approx(0.9)
    more = 120 * 20 * 1.5 / 280
    wanted = [
        center + a * (60 + more) * along + b * (10 + more) * beside for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))
    ]
    for corner in wanted:  # a pixel around the slanted line counts whole, and lets it grow by one more
        assert np.linalg.norm(np.array(turned.polygon) - corner, axis=1).min() < 3
    assert found.decode({"maps": values * 0}, found.preprocessing.transform(*size)) == []


def test_components_against_a_flood() -> None:
    """On random maps and on a spiral, runs of one component are the pixels that a flood of eight neighbours reaches."""
    draw = np.random.default_rng(1)
    spiral = np.zeros((21, 21), bool)
    spiral[0], spiral[:, 20], spiral[20], spiral[2:, 0], spiral[2, :19], spiral[2:19, 18] = (True,) * 6
    for pixels in (*(draw.random((15, 20)) < share for share in (0.2, 0.4, 0.6)), spiral, np.zeros((3, 3), bool)):
        flooded = np.zeros(pixels.shape, int)
        count = 0
        for start in zip(*np.nonzero(pixels), strict=True):
            if flooded[start]:
                continue
            count += 1
            todo = [start]
            while todo:
                y, x = todo.pop()
                if 0 <= y < pixels.shape[0] and 0 <= x < pixels.shape[1] and pixels[y, x] and not flooded[y, x]:
                    flooded[y, x] = count
                    todo += [(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
        runs = components(pixels)
        filled = np.zeros(pixels.shape, int)
        for row, start, end, component in zip(*runs, strict=True):
            filled[row, start:end] = component + 1
        assert np.array_equal(filled, flooded)


@pytest.mark.thorough
def test_the_smallest_rectangle_has_the_least_area_of_all_angles() -> None:
    draw = np.random.default_rng(2)
    for _ in range(20):
        points = draw.normal(size=(12, 2)) @ draw.normal(size=(2, 2)) * 10
        found = smallest_rectangle(points)
        areas = []
        for angle in np.linspace(0, np.pi / 2, 2000):
            turned = points @ np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            areas.append(np.prod(np.ptp(turned, axis=0)))
        assert 4 * np.prod(found.half) <= min(areas) + 1e-9
        inside = (points - found.center) @ np.stack([found.along, [-found.along[1], found.along[0]]], axis=1)
        assert (np.abs(inside) <= found.half + 1e-9).all()
    assert smallest_rectangle(np.array([[3, 4], [3, 4]])).half.tolist() == [0, 0]


def test_points_of_a_body_and_of_a_hand() -> None:
    rows = np.zeros((1, 1, 17, 3), np.float32)
    found = interpret(interface({"out": rows.shape}, (192, 192), nhwc=True))
    box = THINGS[0][0]
    left, top, right, bottom = on_input(found, box) / 192
    rows[0, 0, :3] = (top, left, 0.9), (bottom, right, 0.7), (0.5, 0.5, 0.1)
    (person,) = found_in({"out": rows}, size=(192, 192), nhwc=True)
    assert_things([person], [(box, "person")])
    assert person.score == pytest.approx(0.8)
    assert len(person.points) == 2
    hand = np.zeros((1, 63), np.float32)
    outputs = {"points": hand, "present": np.array([[0.9]], np.float32)}
    corners = on_input(interpret(interface(shapes(outputs), (224, 224), nhwc=True)), box)
    hand.reshape(21, 3)[:, :2] = corners[:2]
    hand.reshape(21, 3)[0, :2] = corners[2:]
    assert_things(found_in(outputs, size=(224, 224), nhwc=True), [(box, "hand")])
    assert found_in({**outputs, "present": np.array([[0.1]], np.float32)}, size=(224, 224), nhwc=True) == []
