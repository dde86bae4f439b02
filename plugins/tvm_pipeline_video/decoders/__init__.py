"""Decoders in the box: what the outputs of known families of models mean, with numpy alone.

choice.py           the table of families; chooses by name, or recognises a model, and says so
interface.py        what a family is asked, and what it answers
labels.py           the names of classes
boxes.py            overlap, suppression, and the way back to the picture
masks.py            masks of a model become masks of the picture
anchors.py          the anchors of single-shot detectors
components.py          connected components and turned rectangles
classification.py   scores of classes
yolo.py             boxes of YOLO v5 to v12, YOLOX, v10 and YOLO26
yolo_variants.py    their masks, key points and turned boxes
ssd.py              single-shot detectors of TensorFlow and Caffe
heat_maps.py        CenterNet and CenterFace
mediapipe.py        faces, palms and persons by MediaPipe's anchors
picodet.py          PicoDet and NanoDet
segmentation.py     the class of each pixel
text.py             boxes of text by DBNet
keypoints.py        bodies, hands and faces that fill the picture

A decoder is a function `(outputs, transform) -> annotations`, as those that users write. Read choice.py next.
"""

from __future__ import annotations

from tvm_pipeline_video.decoders.choice import FAMILIES, Choice, Request, check_name, choose, is_known
from tvm_pipeline_video.decoders.labels import read_labels

__all__ = ["FAMILIES", "Choice", "Request", "check_name", "choose", "is_known", "read_labels"]
