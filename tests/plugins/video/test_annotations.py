"""What is drawn on a frame, pixel by pixel."""

from __future__ import annotations

import numpy as np

from tests.plugins.video.test_video_file import frames
from tvm_pipeline_video import Annotation, draw


def test_boxes_labels_and_points_appear_where_they_belong_and_the_frame_stays() -> None:
    image = np.zeros((240, 320, 3), np.uint8)
    drawn = draw(image, [Annotation("cat", 0.9, (100, 80, 200, 180), ((150, 130),))])
    assert not image.any()
    lit = drawn.any(axis=2)
    assert lit[80, 100:201].all()
    assert lit[180, 100:201].all()
    assert lit[80:181, 100].all()
    assert lit[80:181, 200].all()
    assert lit[130, 150]
    assert lit[62:80, 100:150].any()  # the label above the box
    assert not lit[84:120, 105:195].any()
    assert not lit[190:].any()


def test_annotations_without_a_box_are_lines_at_the_top_left() -> None:
    image = np.zeros((240, 320, 3), np.uint8)
    one = draw(image, [Annotation("cat", 0.9)]).any(axis=2)
    two = draw(image, [Annotation("cat", 0.9), Annotation("dog")]).any(axis=2)
    assert one.any()
    assert not one[24:].any()
    assert two[14:28, :20].any()
    assert not two[40:].any()


def test_the_same_label_has_the_same_colour_and_no_annotation_changes_nothing() -> None:
    image = frames()[0]
    assert np.array_equal(draw(image, []), image)
    cat = Annotation("cat", None, (10, 30, 40, 50))
    assert np.array_equal(draw(image, [cat]), draw(image, [cat]))


def test_boxes_outside_the_frame_or_turned_round_do_not_fail() -> None:
    image = np.zeros((64, 96, 3), np.uint8)
    draw(image, [Annotation("a", 1, (-50, -50, 500, 500)), Annotation("b", 1, (90, 60, 10, 10))])
    draw(image, [Annotation("", None, (200, 200, 300, 300)), Annotation("été 猫", 0.1)])


def test_boxes_and_labels_of_nonsense_are_drawn_at_once() -> None:
    """A box of 1e308 with a label of 5000 characters did not end in 90 s."""
    image = np.zeros((48, 64, 3), np.uint8)
    far = Annotation("x" * 5000, 0.5, (-1e308, 1e308, 1e308, -1e308), ((1e308, -1e308), (5, 5)))
    drawn = draw(image, [far, Annotation("several\nlines"), Annotation(7, 1)])  # type: ignore[arg-type]
    assert drawn[5, 5].any()
